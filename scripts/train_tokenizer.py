r"""Train a byte-level BPE tokenizer, whose vocabulary source and target share.

    python scripts/train_tokenizer.py --files train.en train.de.gz --vocab_size 8000 --output_dir out/tokenizer
    python scripts/train_tokenizer.py --files train.tsv --output_dir out/tokenizer
    python scripts/train_tokenizer.py --dataset_name user/corpus --source_lang en --target_lang de \
        --output_dir out/tokenizer

Prints the size of the vocabulary, how many tokens the sentences of each side come to, and some of them cut into tokens.
"""

import argparse
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from tokenizers import decoders
from transformers import HfArgumentParser, PreTrainedTokenizerBase
from transformers.hf_argparser import DataClassType

from vanilla_transformer.data import load_parallel_corpus, read_lines
from vanilla_transformer.tokenizer_training import MINIMUM_VOCAB_SIZE, train_tokenizer

TABLE_SUFFIXES = (".tsv", ".csv", ".json", ".jsonl", ".parquet")
SAMPLE_SIZE = 5000


@dataclass
class TokenizerArguments:
    """What to train the tokenizer on, and how."""

    output_dir: str = field(metadata={"help": "Folder to save the tokenizer to."})
    files: list[str] | None = field(
        default=None,
        metadata={
            "help": "Any number of UTF-8 files: text with one sentence per line, or tables of sentence pairs "
            f"({', '.join(TABLE_SUFFIXES)}); .gz too."
        },
    )
    dataset_name: str | None = field(
        default=None, metadata={"help": "Sentence pairs from the Hub or a local dataset folder, instead of --files."}
    )
    dataset_config_name: str | None = field(
        default=None, metadata={"help": "The dataset's configuration, where it has several."}
    )
    split: str = field(default="train", metadata={"help": "The dataset's split. Default: train."})
    source_column: str | None = field(
        default=None, metadata={"help": "Column of the source texts. Default: source, or --source_lang."}
    )
    target_column: str | None = field(
        default=None, metadata={"help": "Column of the target texts. Default: target, or --target_lang."}
    )
    source_lang: str | None = field(
        default=None, metadata={"help": "Source language, as columns or the keys of a translation feature are named."}
    )
    target_lang: str | None = field(default=None, metadata={"help": "Target language, likewise."})
    vocab_size: int = field(
        default=37000,
        metadata={
            "help": f"Tokens in the vocabulary, at least {MINIMUM_VOCAB_SIZE}. Default: 37000, as in the paper for "
            "4.5 million pairs; 8000 to 10000 suit tens of thousands."
        },
    )
    min_frequency: int = field(
        default=2, metadata={"help": "How often two tokens must meet to be merged into one. Default: 2."}
    )
    model_max_length: int = field(
        default=1024, metadata={"help": "Tokens that truncation leaves of a longer text. Default: 1024."}
    )
    overwrite_output_dir: bool = field(
        default=False, metadata={"help": "Replace the tokenizer that the output folder already holds."}
    )
    disable_tqdm: bool = field(default=False, metadata={"help": "Show no progress bars."})

    def __post_init__(self) -> None:
        if (self.files is None) == (self.dataset_name is None):
            raise ValueError("Give either --files or --dataset_name.")


def make_parser() -> HfArgumentParser:
    """The command line's parser."""
    return HfArgumentParser(
        DataClassType(TokenizerArguments), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def load_texts(arguments: TokenizerArguments) -> dict[str, Sequence[str]]:
    """The sentences by where they come from: the name of a text file, or that of a table or dataset and the side."""
    columns = {
        name: getattr(arguments, name) for name in ("source_column", "target_column", "source_lang", "target_lang")
    }
    corpora = {}
    if arguments.dataset_name is not None:
        corpora[arguments.dataset_name] = load_parallel_corpus(
            dataset_name=arguments.dataset_name,
            dataset_config_name=arguments.dataset_config_name,
            split=arguments.split,
            empty_lines="drop",
            **columns,
        )
    texts: dict[str, Sequence[str]] = {}
    for file in arguments.files or []:
        if file.lower().removesuffix(".gz").endswith(TABLE_SUFFIXES):
            corpora[file] = load_parallel_corpus(files=[file], empty_lines="drop", **columns)
        else:
            texts[file] = read_lines(file)
    for name, corpus in corpora.items():
        texts |= {f"{name}, {side}": corpus[side] for side in ("source", "target")}
    return texts


def segment(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The text's tokens in readable form: "▁" marks a token that begins with a space, "�" a part of a character."""
    byte_level = decoders.ByteLevel()
    return " ".join(byte_level.decode([token]).replace(" ", "▁") for token in tokenizer.tokenize(text))


def describe(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> str:
    """Length of the sentences in tokens, over a sample of them, and two of them cut into tokens."""
    indices = random.Random(0).sample(range(len(texts)), k=min(SAMPLE_SIZE, len(texts)))
    sample = [texts[index] for index in indices if texts[index].strip()]
    if not sample:
        return "  no text"
    tokens = sum(map(len, tokenizer(sample, add_special_tokens=False, verbose=False)["input_ids"]))
    words = sum(len(text.split()) for text in sample)
    lines = [f"{tokens / len(sample):.1f} tokens per sentence, {tokens / words:.2f} per word, without </s>"]
    lines += [segment(tokenizer, text) for text in sample[:2]]
    return "\n".join(f"  {line}" for line in lines)


def run(arguments: TokenizerArguments) -> None:
    """Train the tokenizer, save it and show what it does."""
    output_dir = Path(arguments.output_dir)
    held = [name for name in ("tokenizer.json", "tokenizer_config.json") if (output_dir / name).exists()]
    if held and not arguments.overwrite_output_dir:
        raise FileExistsError(f"{output_dir} holds a tokenizer ({held[0]}); --overwrite_output_dir replaces it.")
    if output_dir.exists() and not output_dir.is_dir():
        raise FileExistsError(f"{output_dir} is a file; --output_dir must be a folder.")
    texts = load_texts(arguments)
    tokenizer = train_tokenizer(
        chain.from_iterable(texts.values()),
        vocab_size=arguments.vocab_size,
        min_frequency=arguments.min_frequency,
        length=sum(map(len, texts.values())),
        show_progress=not arguments.disable_tqdm,
        model_max_length=arguments.model_max_length,
    )
    tokenizer.save_pretrained(output_dir)
    print(f"{len(tokenizer):,} tokens, saved to {output_dir}")
    for name, sentences in texts.items():
        print(f"{name}: {len(sentences):,} sentences", describe(tokenizer, sentences), sep="\n")


def main(argv: list[str] | None = None) -> None:
    """Parse the arguments (`argv`, else the command line's) and train."""
    parser = make_parser()
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("vanilla_transformer").setLevel(logging.INFO)
    try:
        (arguments,) = parser.parse_args_into_dataclasses(args=argv)
        run(arguments)
    except (ValueError, FileExistsError, FileNotFoundError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
