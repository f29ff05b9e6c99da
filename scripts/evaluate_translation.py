r"""Score a sequence-to-sequence model on a test set: BLEU, chrF, exact match, loss and perplexity.

    python scripts/evaluate_translation.py --model_name_or_path out/my-model --test_file test.en test.de --num_beams 4
    python scripts/evaluate_translation.py --model_name_or_path out/my-model --dataset_name user/corpus \
        --source_lang en --target_lang de --output_dir out/my-model/test
    python scripts/evaluate_translation.py --model_name_or_path out/demo --builtin_corpus

Prints a table; with --output_dir, also writes hypotheses.txt (one translation per line) and metrics.json there.
"""

import argparse
import json
import logging
import platform
import shlex
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import HfArgumentParser, PreTrainedModel
from transformers.hf_argparser import DataClassType

from vanilla_transformer.data import load_parallel_corpus
from vanilla_transformer.evaluation import score_loss, score_translations
from vanilla_transformer.translation import InferenceArguments, one_line, translate

OUTPUT_FILES = ("hypotheses.txt", "metrics.json")
DISTRIBUTIONS = ("vanilla-transformer", "transformers", "torch", "tokenizers", "datasets", "sacrebleu")


@dataclass
class EvaluationArguments(InferenceArguments):
    """What to score, on which sentence pairs."""

    builtin_corpus: bool = field(default=False, metadata={"help": "Test on generated numbers and dates, spelled out."})
    test_file: list[str] | None = field(
        default=None,
        metadata={"help": "Two aligned text files, source first, or one .tsv, .csv, .json(l) or .parquet; .gz too."},
    )
    dataset_name: str | None = field(default=None, metadata={"help": "A dataset of the Hub, or a local folder of one."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "The dataset's configuration."})
    dataset_split: str = field(
        default="test",
        metadata={"aliases": ["--split"], "help": "Split of the dataset or built-in corpus. Default: test."},
    )
    source_column: str | None = field(default=None, metadata={"help": "Column of the sources."})
    target_column: str | None = field(default=None, metadata={"help": "Column of the references."})
    max_samples: int | None = field(default=None, metadata={"help": "Score the first so many pairs only."})
    drop_empty_lines: bool = field(
        default=False, metadata={"help": "Leave out pairs that are empty on one side instead of stopping at them."}
    )
    max_target_length: int | None = field(
        default=None,
        metadata={
            "help": "For the loss, longer references are truncated to so many tokens. Default: the tokenizer's limit."
        },
    )
    lowercase: bool = field(default=False, metadata={"help": "Ignore case in BLEU and chrF."})
    bleu_tokenize: str = field(
        default="13a",
        metadata={"help": "SacreBLEU's tokeniser: 13a (default), intl, zh, ja-mecab, ko-mecab, char, ..."},
    )
    output_dir: str | None = field(default=None, metadata={"help": "Folder for hypotheses.txt and metrics.json."})
    overwrite: bool = field(default=False, metadata={"help": "Replace these files where they exist."})

    def __post_init__(self) -> None:
        super().__post_init__()
        named = [name for name in ("builtin_corpus", "test_file", "dataset_name") if getattr(self, name)]
        if len(named) != 1:
            found = ", ".join(named) or "none"
            raise ValueError(f"Give exactly one of --builtin_corpus, --test_file and --dataset_name; got {found}.")
        if self.max_samples is not None and self.max_samples < 1:
            raise ValueError(f"--max_samples is {self.max_samples}; it must be at least 1.")


def make_parser() -> HfArgumentParser:
    """The command line's parser."""
    return HfArgumentParser(
        DataClassType(EvaluationArguments), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def load_pairs(arguments: EvaluationArguments) -> Dataset:
    """The sentence pairs to score on, columns "source" and "target"."""
    if not arguments.builtin_corpus:
        return load_parallel_corpus(
            files=arguments.test_file,
            dataset_name=arguments.dataset_name,
            dataset_config_name=arguments.dataset_config_name,
            split=arguments.dataset_split,
            source_column=arguments.source_column,
            target_column=arguments.target_column,
            source_lang=arguments.source_lang,
            target_lang=arguments.target_lang,
            max_samples=arguments.max_samples,
            empty_lines="drop" if arguments.drop_empty_lines else "error",
        )
    # Its generators are needed for nothing else.
    from vanilla_transformer.numbers_and_dates import numbers_and_dates

    split: Any = arguments.dataset_split
    pairs = numbers_and_dates(
        source_lang=arguments.source_lang or "en", target_lang=arguments.target_lang or "de", split=split
    )
    return pairs.select(range(min(arguments.max_samples or len(pairs), len(pairs))))


def evaluate(arguments: EvaluationArguments, pairs: Dataset, output_dir: Path | None) -> dict[str, Any]:
    """Translate, write the translations, and score them.

    Returns:
        What metrics.json says about the model and its translations; `seconds` are those of translating alone.
    """
    model, tokenizer, generate_kwargs = arguments.load()
    sources, references = list(pairs["source"]), list(pairs["target"])
    shared: dict[str, Any] = {"batch_size": arguments.batch_size, "max_source_length": arguments.max_source_length}
    start = time.perf_counter()
    hypotheses = translate(
        model,
        tokenizer,
        sources,
        source_prefix=arguments.source_prefix,
        progress=not arguments.disable_tqdm and "translating",
        **shared,
        **generate_kwargs,
    )
    seconds = time.perf_counter() - start
    if output_dir is not None:
        lines = "".join(one_line(hypothesis) + "\n" for hypothesis in hypotheses)
        (output_dir / "hypotheses.txt").write_text(lines, encoding="utf-8", newline="\n")
    scores = score_translations(hypotheses, references, lowercase=arguments.lowercase, tokenize=arguments.bleu_tokenize)
    loss = score_loss(
        model,
        tokenizer,
        [arguments.source_prefix + source for source in sources],
        references,
        max_target_length=arguments.max_target_length,
        progress=not arguments.disable_tqdm and "scoring references",
        **shared,
    )
    # As the tokenizer splits the translations, </s> included: what a search found, without its discarded beams.
    output_tokens = sum(map(len, tokenizer(text_target=hypotheses, verbose=False)["input_ids"]))
    speed = measure_speed(seconds, sentences=len(sources), output_tokens=output_tokens)
    return {**scores, **loss, **speed, **describe(model, generate_kwargs)}


def measure_speed(seconds: float, *, sentences: int, output_tokens: int) -> dict[str, float]:
    """How much was translated, and how fast."""
    return {
        "sentences": sentences,
        "output_tokens": output_tokens,
        "seconds": seconds,
        "sentences_per_second": sentences / seconds,
        "output_tokens_per_second": output_tokens / seconds,
    }


def describe(model: PreTrainedModel, generate_kwargs: dict[str, Any]) -> dict[str, Any]:
    """The model's size and place, and the generation config in force: its own, with what the command line changes."""
    search = model.generation_config.to_diff_dict() | generate_kwargs
    return {
        "parameters": model.num_parameters(),
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "num_beams": search.get("num_beams") or 1,
        "generation_config": search,
    }


def surroundings(argv: list[str] | None) -> dict[str, Any]:
    """What another machine needs to know to repeat the run."""
    versions = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    words = ["scripts/evaluate_translation.py", *(sys.argv[1:] if argv is None else argv)]
    return {"command": shlex.join(["python", *words]), "versions": versions, "machine": platform.platform()}


def make_table(metrics: dict[str, Any]) -> str:
    """The scores, one per line, with the signatures that make them comparable."""
    search = "greedy" if metrics["num_beams"] == 1 else f"{metrics['num_beams']} beams"
    rows = [
        ("BLEU", f"{metrics['bleu']:.2f}", metrics["bleu_signature"]),
        ("BLEU, lowercased tokens", f"{metrics['bleu_lowercase']:.2f}", metrics["bleu_lowercase_signature"]),
        ("chrF", f"{metrics['chrf']:.2f}", metrics["chrf_signature"]),
        ("exact match", f"{metrics['exact_match']:.2f}", "% of sentences"),
        ("loss", f"{metrics['loss']:.4f}", f"nats per target token, {metrics['tokens']:,} tokens with </s>"),
        ("perplexity", f"{metrics['perplexity']:.3f}", "per target token"),
        ("sentences", f"{metrics['sentences']:,}", search),
        ("seconds", f"{metrics['seconds']:.1f}", f"on {metrics['device']} in {metrics['dtype']}"),
        ("sentences/s", f"{metrics['sentences_per_second']:.1f}", ""),
        ("output tokens/s", f"{metrics['output_tokens_per_second']:,.0f}", ""),
    ]
    return "\n".join(f"{name:<24}{value:>10}  {note}".rstrip() for name, value, note in rows)


def prepare_output_dir(arguments: EvaluationArguments) -> Path | None:
    """Make the output folder, unless results are in it already."""
    if arguments.output_dir is None:
        return None
    output_dir = Path(arguments.output_dir)
    existing = [name for name in OUTPUT_FILES if (output_dir / name).exists()]
    if existing and not arguments.overwrite:
        raise FileExistsError(
            f"{output_dir} holds {' and '.join(existing)}; choose another folder or give --overwrite."
        )
    output_dir.mkdir(parents=True, exist_ok=True)
    return output_dir


def main(argv: list[str] | None = None) -> None:
    """Parse the arguments (`argv`, else the command line's), score the model and report."""
    parser = make_parser()
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        (arguments,) = parser.parse_args_into_dataclasses(args=argv)
        # A wrong tokeniser or a missing library is found now rather than after an hour of translating.
        score_translations(["a"], ["a"], tokenize=arguments.bleu_tokenize)
        pairs = load_pairs(arguments)
        output_dir = prepare_output_dir(arguments)
    except (FileExistsError, FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    metrics = evaluate(arguments, pairs, output_dir)
    print(make_table(metrics))
    if output_dir is not None:
        report = metrics | {"arguments": asdict(arguments)} | surroundings(argv)
        (output_dir / "metrics.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
