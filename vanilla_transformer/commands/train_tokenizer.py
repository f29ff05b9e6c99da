r"""Train a tokenizer, with one vocabulary for source and target or with one for each.

    vanilla-transformer train-tokenizer --files train.en train.de.gz --vocab_size 8000 --output_dir out/tokenizer
    vanilla-transformer train-tokenizer --files train.tsv --output_dir out/tokenizer
    vanilla-transformer train-tokenizer --separate_vocabularies --source_files train.en --target_files train.zh \
        --vocab_size 8000 --target_vocab_size 6000 --output_dir out/tokenizer
    vanilla-transformer train-tokenizer --dataset_name user/corpus --source_lang en --target_lang de \
        --output_dir out/tokenizer
    vanilla-transformer train-tokenizer --model_type wordlevel --files train.bpe.en train.bpe.de --output_dir out/pieces
    vanilla-transformer train-tokenizer --separate_vocabularies --model_type char --target_model_type wordlevel \
        --files words-and-sounds.tsv --output_dir out/letters-to-sounds

Tokens are merged pairs of bytes (bpe) or the likeliest pieces of them (unigram), which can write every text; or words
that are cut at white space, and may be pieces of words already (wordlevel), or characters (char): what was not in the
texts is then <unk>.

Prints the size of each vocabulary, how many tokens the sentences come to, and some of them cut into tokens.
"""

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from vanilla_transformer.options import DISABLE_TQDM, option

from .command_line import make_argument_parser, make_main

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vanilla_transformer.model.tokenization_vanilla_transformer import VanillaTransformerTokenizer

SAMPLE_SIZE = 5000


@dataclass
class TokenizerArguments:
    """What to train the tokenizer on, and how."""

    output_dir: str = option("Folder to save the tokenizer to.")
    files: list[str] | None = option(
        "UTF-8 files: a sentence per line, or tables of pairs (.tsv, .csv, .json(l), .parquet); compressed too.", None
    )
    separate_vocabularies: bool = option("A vocabulary for each side: see --source_files, --target_files.", False)
    source_files: list[str] | None = option(
        "With --separate_vocabularies: text of source sentences; compressed too.", None
    )
    target_files: list[str] | None = option("The same for target sentences, aligned with the source's or not.", None)
    dataset_name: str | None = option("Pairs of the Hub or a local dataset folder, instead of --files.", None)
    dataset_config_name: str | None = option("The dataset's configuration, where it has several.", None)
    split: str = option("The dataset's split. Default: train.", "train")
    source_column: str | None = option("Column of the source texts. Default: source, or --source_lang.", None)
    target_column: str | None = option("Column of the target texts. Default: target, or --target_lang.", None)
    source_lang: str | None = option("Source language, as columns or keys of translations are named.", None)
    target_lang: str | None = option("Target language, likewise.", None)
    model_type: str = option("bpe, unigram, wordlevel or char. Default: bpe.", "bpe")
    target_model_type: str | None = option("With --separate_vocabularies. Default: --model_type, for either.", None)
    vocab_size: int = option(
        "Default: 37000, as in the paper for 4.5 million pairs; 8000 suit tens of thousands.", 37000
    )
    target_vocab_size: int | None = option("With --separate_vocabularies. Default: --vocab_size, for either.", None)
    added_tokens: list[str] | None = option("Words that are never cut, such as <BT>, besides --vocab_size.", None)
    min_frequency: int | None = option(
        "How often two tokens must meet to be merged (default: 2), or a word or character be there (default: 1).", None
    )
    model_max_length: int = option("Tokens that truncation leaves of a longer text. Default: 1024.", 1024)
    overwrite_output_dir: bool = option("Replace the tokenizer that the output folder already holds.", False)
    disable_tqdm: bool = option(DISABLE_TQDM, False)

    def __post_init__(self) -> None:
        if self.separate_vocabularies:
            self._check_sides()
            return
        for name in ("source_files", "target_files", "target_vocab_size", "target_model_type"):
            if (value := getattr(self, name)) is not None:
                raise ValueError(f"--{name} {value} needs --separate_vocabularies.")
        if (self.files is None) == (self.dataset_name is None):
            raise ValueError("Give either --files or --dataset_name.")

    def _check_sides(self) -> None:
        from vanilla_transformer.data.lines import is_table

        if (self.source_files is None) != (self.target_files is None):
            raise ValueError("Give both --source_files and --target_files, or neither.")
        given = [name for name in ("files", "dataset_name", "source_files") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError("Give one of --files (tables), --dataset_name, and --source_files with --target_files.")
        for file in [*(self.source_files or []), *(self.target_files or [])]:
            if is_table(file):
                raise ValueError(f"{file} is a table, which has both sides: name it after --files.")
        for file in self.files or []:
            if not is_table(file):
                raise ValueError(
                    f"--files {file} does not say which side it is: give --source_files and --target_files."
                )


class Texts(NamedTuple):
    """Sentences of one file, or of one side of a table or dataset."""

    name: str
    side: Literal["source", "target"] | None
    sentences: Sequence[str]


def load_texts(arguments: TokenizerArguments) -> list[Texts]:
    """The sentences by where they come from; those of `--files` that are plain text may be of either side."""
    from vanilla_transformer.data.corpora import load_parallel_corpus
    from vanilla_transformer.data.lines import is_table, read_lines

    files = list(dict.fromkeys(arguments.files or []))
    texts = [Texts(file, None, read_lines(file)) for file in files if not is_table(file)]
    texts += [Texts(file, "source", read_lines(file)) for file in arguments.source_files or []]
    texts += [Texts(file, "target", read_lines(file)) for file in arguments.target_files or []]
    columns = ("source_column", "target_column", "source_lang", "target_lang")
    options: dict[str, Any] = {name: getattr(arguments, name) for name in columns} | {"empty_lines": "drop"}
    corpora = {file: load_parallel_corpus(files=[file], **options) for file in files if is_table(file)}
    if arguments.dataset_name is not None:
        options |= {name: getattr(arguments, name) for name in ("dataset_name", "dataset_config_name", "split")}
        corpora[arguments.dataset_name] = load_parallel_corpus(**options)
    for name, corpus in corpora.items():
        texts.append(Texts(f"{name}, source", "source", corpus["source"]))
        texts.append(Texts(f"{name}, target", "target", corpus["target"]))
    return texts


def train(arguments: TokenizerArguments, texts: Sequence[Texts]) -> "VanillaTransformerTokenizer":
    """Trains one vocabulary on all texts, or one for each side on its own."""
    from vanilla_transformer.data.tokenizer_training import train_separate_tokenizer, train_tokenizer

    names = ("model_type", "vocab_size", "min_frequency", "model_max_length")
    options: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    options |= {"show_progress": not arguments.disable_tqdm, "added_tokens": arguments.added_tokens or ()}
    if not arguments.separate_vocabularies:
        sentences = [item.sentences for item in texts]
        return train_tokenizer(chain.from_iterable(sentences), length=sum(map(len, sentences)), **options)
    source, target = ([item.sentences for item in texts if item.side == side] for side in ("source", "target"))
    return train_separate_tokenizer(
        chain.from_iterable(source),
        chain.from_iterable(target),
        target_model_type=cast(Any, arguments.target_model_type),
        target_vocab_size=arguments.target_vocab_size,
        length=sum(map(len, source)),
        target_length=sum(map(len, target)),
        **options,
    )


def describe(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> str:
    """Lengths of a sample of sentences, and two of them in tokens; "▁" is a space, "�" a part of a character."""
    from tokenizers import decoders

    indices = random.Random(0).sample(range(len(texts)), k=min(SAMPLE_SIZE, len(texts)))
    sample = [texts[index] for index in indices if texts[index].strip()]
    if not sample:
        return "  no text"
    ids = [index for row in tokenizer(sample, add_special_tokens=False, verbose=False)["input_ids"] for index in row]
    words = sum(len(text.split()) for text in sample)
    described = f"{len(ids) / len(sample):.1f} tokens per sentence, {len(ids) / words:.2f} per word, without </s>"
    if unknown := ids.count(tokenizer.unk_token_id):
        described += f"; {unknown / len(ids):.2%} unknown"
    lines = [described]
    is_byte_level = "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)
    byte_level = decoders.ByteLevel()
    for text in sample[:2]:
        tokens = tokenizer.tokenize(text)
        if is_byte_level:
            tokens = [byte_level.decode([token]) for token in tokens]
        lines.append(" ".join(token.replace(" ", "▁") for token in tokens))
    return "\n".join(f"  {line}" for line in lines)


def run(arguments: TokenizerArguments) -> None:
    """Trains the tokenizer, saves it and shows what it does."""
    logging.getLogger("vanilla_transformer").setLevel(logging.INFO)
    from vanilla_transformer.files import replacing_files
    from vanilla_transformer.model.tokenization_vanilla_transformer import VanillaTransformerTokenizer

    output_dir = Path(arguments.output_dir)
    target_file = VanillaTransformerTokenizer.vocab_files_names["target_tokenizer_file"]
    held = [name for name in ("tokenizer.json", "tokenizer_config.json", target_file) if (output_dir / name).exists()]
    if held and not arguments.overwrite_output_dir:
        raise FileExistsError(f"{output_dir} holds a tokenizer ({held[0]}); --overwrite_output_dir replaces it.")
    if output_dir.exists() and not output_dir.is_dir():
        raise FileExistsError(f"{output_dir} is a file; --output_dir must be a folder.")
    texts = load_texts(arguments)
    tokenizer = train(arguments, texts)
    with replacing_files(output_dir) as partial_folder:
        tokenizer.save_pretrained(partial_folder)
    if arguments.separate_vocabularies:
        print(f"{len(tokenizer):,} source and {tokenizer.target_vocab_size:,} target tokens, saved to {output_dir}")
    else:
        (output_dir / target_file).unlink(missing_ok=True)
        print(f"{len(tokenizer):,} tokens, saved to {output_dir}")
    for name, side, sentences in texts:
        own = tokenizer.target_tokenizer if side == "target" else tokenizer
        print(f"{name}: {len(sentences):,} sentences", describe(own, sentences), sep="\n")


make_parser = partial(make_argument_parser, TokenizerArguments, __doc__)
main = make_main(make_parser, run, reads_datasets=True)
