r"""Remove the pairs of a parallel corpus that are no translations, and mend texts.

    vanilla-transformer clean --source_lang en --target_lang de --files train.en train.de \
        --output_files clean.en clean.de --removed_file removed.tsv
    vanilla-transformer clean --source_lang en --target_lang de --files corpus/ --output_files clean.jsonl.gz \
        --without num_mismatch TerminalPunctuationFilter --set LengthFilter.max_length=80
    vanilla-transformer clean --source_lang en --target_lang de --show_rules > rules.yaml
    vanilla-transformer clean --config rules.yaml --files train.tsv --output_files clean.tsv

The corpus is two aligned text files, tables (.tsv, .csv, .jsonl, .parquet), folders and patterns of them, compressed
too (.gz), or a dataset of the Hub. It may be larger than memory. Rules have OpusFilter's names and parameters, and are
followed in their order. A report with counts and examples is written beside the output.

With models, pairs are also judged by dual conditional cross-entropy (Junczys-Dowmunt, 2018): the best of them stay.

    vanilla-transformer clean --source_lang en --target_lang de --files train.tsv --output_files clean.tsv \
        --model_name_or_path out/en-de --reverse_model_name_or_path out/de-en --keep_share 0.7

Many processes divide the work, each with a GPU of its own where there are several:

    torchrun --nproc_per_node 8 -m vanilla_transformer clean --config rules.yaml --files train.tsv \
        --output_files clean.tsv

An interrupted run goes on with the parts that it had not finished when the same command is given again. Existing files
are not touched without --overwrite.
"""

import logging
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vanilla_transformer.options import DISABLE_TQDM, option, refuse_unused

from .command_line import make_argument_parser, make_main

_CORPUS = (
    *("files", "dataset_name", "dataset_config_name", "split", "source_column", "target_column"),
    *("source_lang", "target_lang", "removed_file", "report_file", "overwrite", "window_size"),
)
_OF_MODELS = {"reverse_model_name_or_path", "keep_share", "max_score", "batch_size", "device", "dtype"}


@dataclass
class CleaningArguments:
    """The corpus, the rules, and what is written."""

    files: list[str] | None = option(
        "Two aligned text files, the source's first, or tables; .gz, .bz2 and .xz too.", None
    )
    dataset_name: str | None = option("Dataset of the Hub or a local folder of one, instead of --files.", None)
    dataset_config_name: str | None = option("The dataset's configuration, where it has several.", None)
    split: str = option("The dataset's split. Default: train.", "train")
    source_column: str | None = option("Column of the source texts. Default: source, or --source_lang.", None)
    target_column: str | None = option("Column of the target texts. Default: target, or --target_lang.", None)
    source_lang: str | None = option("Source language, such as en; the default rules need it.", None)
    target_lang: str | None = option("Target language, likewise.", None)
    output_files: list[str] | None = option(
        "Two text files, or one .tsv, .jsonl or .parquet with the columns source and target; .gz, .bz2 and .xz too.",
        None,
    )
    removed_file: str | None = option(
        "A .tsv, .jsonl or .parquet for the pairs that were removed, with the names of the rules.", None
    )
    report_file: str | None = option("JSON with counts and examples. Default: the first output, .report.json.", None)
    overwrite: bool = option("Replace existing output files, or a run that was begun with other settings.", False)
    config: str | None = option(
        "YAML of rules, a list or the steps of an OpusFilter file. Default: rules for sentences (--show_rules).", None
    )
    without: list[str] = field(
        default_factory=list, metadata={"help": "Names of rules that are switched off. Default: none."}
    )
    set: list[str] = field(
        default_factory=list,
        metadata={"help": "Parameters of rules, such as LengthFilter.max_length=80; of YAML, [80, 60] for both sides."},
    )
    show_rules: bool = option("Print the rules as YAML, for --config, and do nothing else.", False)
    model_name_or_path: str | None = option("Folder or Hub name of a model that scores targets given sources.", None)
    reverse_model_name_or_path: str | None = option("One that scores sources given targets.", None)
    keep_share: float | None = option("Keep the best pairs by the models' scores: such a share, above 0 up to 1.", None)
    max_score: float | None = option("Instead, keep those with at most this score, in nats per token.", None)
    batch_size: int = option("Pairs that models score at a time. Default: 32.", 32)
    device: str = option("Of the models: auto (default: cuda, mps or cpu), or one such as cuda:1.", "auto")
    dtype: str = option("Of the models: auto (default: as saved), float32, bfloat16 or float16.", "auto")
    window_size: int = option("The most pairs of a part, which an interruption may cost. Default: 4096.", 4096)
    disable_tqdm: bool = option(DISABLE_TQDM, False)

    def __post_init__(self) -> None:
        if self.config is None and (self.source_lang is None or self.target_lang is None):
            raise ValueError("Give --source_lang and --target_lang, or rules of your own (--config).")
        refuse_unused(self, {"model_name_or_path": _OF_MODELS, "dataset_name": {"dataset_config_name", "split"}})
        if self.model_name_or_path is not None and (self.keep_share is None) == (self.max_score is None):
            raise ValueError("--model_name_or_path needs either --keep_share or --max_score.")
        if not self.show_rules and self.output_files is None:
            raise ValueError("Give --output_files: two text files, or one table.")


def choose_rules(arguments: CleaningArguments) -> list[Any]:
    """The rules of the file or the default ones, with what the options change."""
    import yaml

    from vanilla_transformer.data.cleaning import default_rules, make_rule, make_rules, read_rules
    from vanilla_transformer.inference.cleaning import ALL_RULES

    if arguments.config is not None:
        rules = read_rules(arguments.config, ALL_RULES)
    else:
        rules = make_rules(default_rules(str(arguments.source_lang), str(arguments.target_lang)))
    if arguments.model_name_or_path is not None:
        languages = None if arguments.source_lang is None else [arguments.source_lang, arguments.target_lang]
        own: dict[str, Any] = {name: getattr(arguments, name) for name in ("batch_size", "device", "dtype")}
        own |= {"model": arguments.model_name_or_path, "reverse_model": arguments.reverse_model_name_or_path}
        own |= {"threshold": arguments.max_score, "share": arguments.keep_share, "languages": languages}
        rules.append(make_rule("DualCrossEntropyFilter", own, ALL_RULES))
    names = [str(rule) for rule in rules]
    for setting in arguments.set:
        path, _, text = setting.partition("=")
        name, _, parameter = path.rpartition(".")
        if name not in names or not text:
            raise ValueError(f"--set {setting}: it must be RULE.PARAMETER=VALUE; the rules are {', '.join(names)}.")
        place = names.index(name)
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"--set {setting}: {' '.join(str(error).split())}.") from error
        changed = {**rules[place].parameters, "name": name, parameter: value}
        rules[place] = make_rule(find_kind(rules[place]), changed, ALL_RULES)
    if wrong := [name for name in arguments.without if name not in names]:
        raise ValueError(f"--without {wrong[0]}: there is no such rule; the rules are {', '.join(names)}.")
    return [rule for rule in rules if str(rule) not in arguments.without]


def find_kind(rule: Any) -> str:
    """The name under which files of rules know it."""
    from vanilla_transformer.inference.cleaning import ALL_RULES

    return next(name for name, kind in ALL_RULES.items() if kind is type(rule))


def show(rules: list[Any]) -> str:
    """The rules as a file has them."""
    import json

    import yaml

    found = [{find_kind(rule): {"name": str(rule), **rule.parameters}} for rule in rules]
    return str(
        yaml.safe_dump(json.loads(json.dumps(found)), sort_keys=False, allow_unicode=True, default_flow_style=None)
    )


def summarize(report: dict[str, Any]) -> str:
    """A row for each rule, and what stays."""
    width = max(len(rule["name"]) for rule in report["rules"]) if report["rules"] else 0
    lines = [f"{'rule':<{width}}  {'seen':>12}  {'removed':>12}  {'':>6}  {'changed':>12}"]
    for rule in report["rules"]:
        counts = f"{rule['seen']:>12,}  {rule['removed']:>12,}  {rule['removed'] / max(rule['seen'], 1):>6.1%}"
        lines.append(f"{rule['name']:<{width}}  {counts}  {rule['changed']:>12,}")
    share = report["kept"] / max(report["pairs"], 1)
    return "\n".join([*lines, f"{report['kept']:,} of {report['pairs']:,} pairs stay ({share:.1%})"])


def run(arguments: CleaningArguments) -> None:
    """Chooses the rules and cleans."""
    logging.getLogger("vanilla_transformer").setLevel(logging.INFO)
    from vanilla_transformer.inference.cleaning import clean_corpus
    from vanilla_transformer.inference.processes import Processes

    rules = choose_rules(arguments)
    if arguments.show_rules:
        print(show(rules), end="")
        return
    options: dict[str, Any] = {name: getattr(arguments, name) for name in _CORPUS}
    options |= {"progress": not arguments.disable_tqdm, "processes": Processes.from_environment()}
    report = clean_corpus(rules, arguments.output_files or [], **options)
    if report:
        print(summarize(report))


make_parser = partial(make_argument_parser, CleaningArguments, __doc__)
main = make_main(
    make_parser,
    run,
    "Interrupted: the same command goes on with what was not finished.",
    divides_work=True,
    reads_datasets=True,
)
