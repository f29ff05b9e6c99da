"""What the files in a model's folder say about it, in words and numbers, for its model card."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from huggingface_hub import EvalResult
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from transformers.utils import logging

from vanilla_transformer.files import AVERAGED_FOLDER, AVERAGING_FILE, digest_weights, read_architecture, read_json
from vanilla_transformer.model.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.model.pipeline_vanilla_transformer import find_directions
from vanilla_transformer.tasks import TASKS, TRANSLATION, find_prefix, find_single_stack, find_task

from .words import NOT_RECORDED, as_code, describe_search, escape, format_value, quote, to_number

logger = logging.get_logger(__name__)

_EXAMPLES = 5
# How the Trainer's arguments are written that are not set.
_NOTHING = ("None", "[]", "{}", "")
# The columns of the table of scores, and the Hub's names of those that go into the metadata and the summary.
_SCORES = {"sacreBLEU": "bleu", "lowercased": "bleu_lowercase", "chrF": "chrf", "TER": "ter"}
_SCORES |= {f"ROUGE-{kind}": f"rouge{kind}" for kind in ("1", "2", "L", "Lsum")}
_SCORES |= {"exact match, %": "exact_match", "WER": "wer", "PER": "per", "perplexity": "perplexity"}
# The same in the scores of a training, whose BLEU is greedy search's.
_HEADLINES = {"bleu": "BLEU", "chrf": "chrF"} | {key: name for name, key in _SCORES.items() if name.startswith("ROUGE")}
_HUB_METRICS = {"sacreBLEU": "sacrebleu", "chrF": "chrf", "WER": "wer"}
_HUB_METRICS |= dict.fromkeys((name for name in _SCORES if name.startswith("ROUGE")), "rouge")
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# A name of the Hub, unless it is the path of a local folder.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
# The Hub wants ISO 639 codes; corpora say en, en_XX, eng_Latn or en-US.
_LANGUAGE = re.compile(r"([A-Za-z]{2,3})([-_].*)?")
_NAME_PART = re.compile(r"[^._-]*[._-]?")
_UNNAMED_LABEL = re.compile(r"LABEL_\d+")
# What a person who opens the repository reads of its code.
_READABLE = ("configuration", "modeling", "attention", "positions")
# Of what the Trainer measures, the parts that say nothing about the model.
_COSTS = re.compile(r"gen_len|runtime|.*_per_second|.*_time|epoch|step|mem_.*|num_input_tokens_seen")


@dataclass(frozen=True)
class _Evaluation:
    """What an evaluation left in a sub-folder: scores, and the name of its test set for readers and the model-index."""

    folder: Path
    scores: Mapping[str, Any]
    name: str
    kind: str
    config: str | None
    split: str | None
    note: str

    @property
    def label(self) -> str:
        return f"{self.name} ({self.note})" if self.note else self.name

    @property
    def search(self) -> str:
        settings, dtype = _mapping(self.scores, "generation_config"), self.scores.get("dtype")
        search = describe_search(self.scores.get("num_beams", settings.get("num_beams")), settings)
        return search if dtype in (None, "float32") else f"{search}, {dtype}"

    def score(self, column: str) -> float | None:
        return to_number(self.scores.get(_SCORES[column]))

    def signature(self, column: str) -> str | None:
        """How a score was computed; ROUGE's scores share one."""
        kind = "rouge" if column.startswith("ROUGE") else _SCORES[column]
        signature = self.scores.get(f"{kind}_signature")
        return signature if isinstance(signature, str) else None

    def headline(self) -> list[str]:
        """The scores that the summary tells."""
        columns = [column for column in _HUB_METRICS if column != "ROUGE-Lsum"]
        return [f"{score:.2f} {column}" for column in columns if (score := self.score(column)) is not None]

    def results(self) -> Iterator[EvalResult]:
        """The scores as the Hub's model-index has them."""
        task = TASKS.get(str(self.scores.get("task")), TRANSLATION)
        for column, metric in _HUB_METRICS.items():
            score, signature = self.score(column), self.signature(column)
            if score is not None:
                place: Any = {"dataset_config": self.config, "dataset_split": self.split}
                place |= {"task_type": task.pipeline, "dataset_type": self.kind, "dataset_name": self.name}
                told: Any = {"metric_name": f"{column} ({self.search})", "metric_value": round(score, 2)}
                told["metric_args"] = {"signature": signature} if signature else None
                yield EvalResult(metric_type=metric, **place, **told)


class ModelFolder:
    """Reads the folder of a model, or of a single stack, and says in words what is in it."""

    def __init__(
        self,
        path: Path,
        repo_id: str | None = None,
        *,
        revision: str | None = None,
        config: Mapping[str, Any] | None = None,
        base_model: str | None = None,
    ) -> None:
        self.path, self.repo_id, self.revision, self.given_base_model = path, repo_id, revision, base_model
        self.name = path.resolve().name
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"{path} has no config.json: a card is made for a folder with a saved model.")
        self.config = _read(path / "config.json") if config is None else config
        self.generation = _read(path / "generation_config.json")
        self.metrics, self.state = _read(path / "metrics.json"), _read(path / "trainer_state.json")
        self.conversion, self.arguments = _read(path / "conversion.json"), _read(path / "arguments.json")
        # metrics.json has what the other two have, and more; older trainings, and the library's, have only these.
        self.scores = _read(path / "train_results.json") | _read(path / "eval_results.json")
        self.scores |= _mapping(self.metrics, "metrics")
        self.search = describe_search(self.generation.get("num_beams", 1), self.generation)
        self.stack = find_single_stack(self.config)
        # What scripts/train.py and conversions record tells of an encoder-decoder that the stack was made from.
        self.has_other_records = self.stack is not None and bool(self.arguments or self.conversion)
        self.has_curves = (path / "curves.png").is_file() and not self.has_other_records
        self.has_tokenizer = any(path.glob("token*.json"))
        if self.has_other_records:
            self.state, self.scores = {}, {}
        if self.stack is not None:
            self.metrics, self.conversion, self.arguments = {}, {}, {}
        self.model, self.data, self.training = (
            {name: None if value in _NOTHING else value for name, value in self._mark_paths(found).items()}
            for found in (_mapping(self.arguments, part) for part in ("model", "data", "training"))
        )
        self.task = self.stack or find_task(self.config)
        self.is_converted = bool(self.conversion) and not self.arguments

    def _mark_paths(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """With "./" before names of folders where the training ran: "out/base" may be a name on the Hub as well."""
        local = self.arguments.get("local")
        marked = dict(arguments)
        for key in ("model_name_or_path", "dataset_name"):
            if isinstance(local, list) and arguments.get(key) in local:
                marked[key] = f"./{arguments[key]}"
        return marked

    @property
    def kind(self) -> str:
        """What the card's sentences are chosen by; a regression is told by the same rule as in the library's loss."""
        problem = self.config.get("problem_type")
        if self.task.name != "text classifier" or problem not in (None, "regression"):
            return self.task.name
        return "regression" if problem or len(self.labels) == 1 else self.task.name

    @property
    def labels(self) -> list[str]:
        """Those of a head that has some, in their order."""
        # The library leaves out what is so by default. Of a file the keys are texts, of a configuration integers.
        labels = self.config.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
        return [str(labels[key]) for key in sorted(labels, key=int)]

    @property
    def labels_are_unnamed(self) -> bool:
        """Whether they are the library's placeholders."""
        return all(map(_UNNAMED_LABEL.fullmatch, self.labels))

    @cached_property
    def directions(self) -> dict[tuple[str, str], str]:
        """The pairs of languages of a model that has several, each with its prefix."""
        if self.stack is not None or self.config.get("model_type") != VanillaTransformerConfig.model_type:
            return {}
        found = find_directions(SimpleNamespace(**self.config))
        return found if len(found) > 1 else {}

    @property
    def shown_direction(self) -> tuple[str, ...] | None:
        """The one of the card's example, which has the first sentence of the first evaluation, if there is one."""
        shown = find_languages(self.evaluations[0].scores) if self.examples else ()
        return shown if shown in self.directions else next(iter(self.directions), None)

    @property
    def unseen_directions(self) -> list[tuple[str, str]]:
        """Those that it was not trained on, where it is known which it was."""
        pairs = [pair.split("-") for pair in self.data.get("lang_pairs") or []]
        trained = {*map(tuple, pairs), *(tuple(pair[::-1]) for pair in pairs if self.data.get("both_directions"))}
        return [pair for pair in self.directions if trained and pair not in trained]

    @property
    def languages(self) -> list[str] | None:
        """Source and target, or those of all pairs; of a single stack the language of its side."""
        if self.directions:
            return list(dict.fromkeys(language for pair in self.directions for language in pair))
        pair = self.config.get("langs")
        if not pair and self.data.get("builtin_corpus"):
            pair = [self.data.get("source_lang") or "en", self.data.get("target_lang") or "de"]
        pair = pair or [self.data.get("source_lang"), self.data.get("target_lang")]
        if not isinstance(pair, list) or len(pair) != 2 or not all(pair):
            return None
        languages = [str(language) for language in pair]
        return languages if self.stack is None else [languages[self.stack.side == "decoder"]]

    @cached_property
    def stored(self) -> tuple[int, str] | None:
        """Number and type of the stored parameters, from the headers; `None` for quantized or damaged weights."""
        count, types = 0, set()
        for path in sorted(self.path.glob("model*.safetensors")):
            try:
                with safe_open(path, framework="pt") as weights:
                    parts = [weights.get_slice(name) for name in weights.keys()]  # noqa: SIM118 (not a mapping)
                    count += sum(math.prod(part.get_shape()) for part in parts)
                    types |= {part.get_dtype() for part in parts}
            except (OSError, SafetensorError):
                return None
        if not types or not types <= _FLOATS.keys():
            return None
        return count, ", ".join(sorted(_FLOATS[name] for name in types))

    @property
    def parameters(self) -> int | None:
        """Their number, tied ones counted once."""
        return self.metrics.get("parameters", self.stored[0] if self.stored else None)

    @property
    def base_model(self) -> str | None:
        """The model that the training went on from, or the one on the Hub that was converted."""
        name = self.given_base_model or self.model.get("model_name_or_path")
        if self.is_converted and self.conversion.get("revision") and not name:
            name = self.conversion.get("name")
        return str(name) if name else None

    @cached_property
    def evaluations(self) -> list[_Evaluation]:
        """Those of these very weights, test sets before data that the training has seen, wide searches first."""
        found = []
        for path in sorted(self.path.glob("*/metrics.json")) if self.stack is None else ():
            scores = _read(path)
            if to_number(scores.get("bleu")) is None and to_number(scores.get("rouge1")) is None:
                continue  # the metrics of a training in a sub-folder
            if self._is_own(scores):
                found.append(self._make_evaluation(path.parent, scores))
            else:
                logger.warning_once(f"{path} is left out of the card: it does not score the model now in {self.path}.")
        return sorted(
            found, key=lambda item: (bool(item.note), item.name, -(to_number(item.scores.get("num_beams")) or 0))
        )

    def _is_own(self, scores: Mapping[str, Any]) -> bool:
        """Told by the digests of the weights; of a model on the Hub there are none, only its name."""
        architecture = read_architecture(self.config)
        # Of the new fields of later code an evaluation says nothing.
        recorded = read_architecture(_mapping(scores, "architecture")).items()
        if any(architecture.get(name) != value for name, value in recorded):
            return False
        if scores.get("ensemble"):
            return False
        if digests := scores.get("weights_sha256"):
            return bool(digests == self._digests)
        return self.repo_id is not None and _mapping(scores, "arguments").get("model_name_or_path") == self.repo_id

    @cached_property
    def _digests(self) -> dict[str, str]:
        return digest_weights(self.path)

    def _make_evaluation(self, folder: Path, scores: Mapping[str, Any]) -> _Evaluation:
        made = self._name_evaluation(folder, scores)
        if (pair := find_languages(scores)) not in self.directions:
            return made
        config = "-".join([*([made.config] if made.config else []), *pair])
        return replace(made, name=f"{made.name}, {' to '.join(pair)}", config=config)

    def _name_evaluation(self, folder: Path, scores: Mapping[str, Any]) -> _Evaluation:
        arguments = self._mark_paths(_mapping(scores, "arguments"))
        split = str(arguments["dataset_split"]) if arguments.get("dataset_split") else None
        files = base_names(arguments.get("test_file"))
        sources = [name for name in ("dataset_name", "builtin_corpus") if arguments.get(name)]
        same_source = any(arguments[name] == self.data.get(name) for name in sources)
        notes = []
        for part, key in (("training", "train"), ("validation", "validation")):
            same_split = same_source and split == (self.data.get(f"{key}_split") or part)
            if same_split or _is_corpus_of(arguments.get("test_file"), self.data.get(f"{key}_file")):
                notes.append(f"{part} data")
        if arguments.get("max_samples"):
            notes.append(f"first {format_value(arguments['max_samples'])} pairs")
        if arguments.get("glossary"):
            notes.append("with a glossary")
        note = ", ".join(notes)
        if arguments.get("builtin_corpus"):
            sides = "-".join(self.languages) if self.languages and not self.directions else None
            return _Evaluation(folder, scores, f"numbers and dates in words ({split})", "generated", sides, split, note)
        if name := arguments.get("dataset_name"):
            public = public_name(str(name))
            kind, config = public if is_hub_name(name) else "local", arguments.get("dataset_config_name")
            return _Evaluation(folder, scores, f"{public} ({split})", kind, config, split, note)
        name = _common_name(files) or ", ".join(files) or NOT_RECORDED
        return _Evaluation(folder, scores, name, "local", name, None, note)

    def metadata(self, name: str) -> dict[str, Any]:
        """What the Hub reads, as keyword arguments of `ModelCardData`."""
        results = [result for item in self.evaluations if not item.note for result in item.results()]
        codes = [match[1].lower() for language in self.languages or [] if (match := _LANGUAGE.fullmatch(language))]
        dataset = self.data.get("dataset_name")
        own_tags = ["vanilla_transformer", "attention-is-all-you-need"]
        base_model = self.base_model if is_hub_name(self.base_model) else None
        return {
            "language": codes or None,
            "library_name": "transformers",
            "pipeline_tag": self.task.pipeline,
            "tags": [self.task.pipeline, *(own_tags if self.config.get("model_type") == own_tags[0] else [])],
            "datasets": [dataset] if is_hub_name(dataset) else None,
            "base_model": base_model,
            "base_model_relation": "finetune" if base_model and not self.is_converted else None,
            "metrics": sorted({result.metric_type for result in results}, reverse=True) or None,
            "eval_results": results or None,
            "model_name": name if results else None,
        }

    @property
    def code_files(self) -> list[str]:
        """Of the code in the folder, what a person reads; none if code that config.json names is not there."""
        modules = {str(name).partition(".")[0] for name in _mapping(self.config, "auto_map").values()}
        if not all((self.path / f"{module}.py").is_file() for module in modules):
            return []
        own = () if self.stack is None else (f"{self.stack.side}_only",)
        named = [f"{name}_vanilla_transformer.py" for name in (*own, *_READABLE)]
        return [name for name in named if (self.path / name).is_file()]

    @property
    def other_tasks(self) -> list[str]:
        """The task's other names."""
        return [name for name in _mapping(self.config, "custom_pipelines") if name != self.task.pipeline]

    @property
    def prefix(self) -> str:
        """What is put before each source, or the choice of it."""
        if self.directions:
            return ", ".join(dict.fromkeys(prefix.strip() for prefix in self.directions.values()))
        return find_prefix(self.config, find_task(self.config), langs=self.languages)

    @property
    def address(self) -> str:
        """What the loading functions are given, as arguments of Python."""
        address = quote(self.repo_id or f"path/to/{self.name}")
        return f"{address}, revision={quote(self.revision)}" if self.revision else address

    @cached_property
    def added_tokens(self) -> dict[str, list[str]]:
        """What the tokenizer puts before and behind a text, and the tokens at which `generate` stops."""
        path = self.path / "tokenizer.json"
        if self.stack is None or not self.stack.writes or not path.is_file():
            return {}
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more special
            raise ValueError(f"{path} is not a tokenizer: {error}") from error
        encoding = tokenizer.encode("a")
        inside = [place for place, sequence in enumerate(encoding.sequence_ids) if sequence is not None]
        start, end = (inside[0], inside[-1] + 1) if inside else (len(encoding.tokens), len(encoding.tokens))
        ends = self.generation.get("eos_token_id", self.config.get("eos_token_id"))
        numbers = [number for number in (ends if isinstance(ends, list) else [ends]) if number is not None]
        stops = [token for number in numbers if (token := tokenizer.id_to_token(number))]
        return {"begins": encoding.tokens[:start], "ends": encoding.tokens[end:], "stops": stops}

    @property
    def averaged(self) -> int | None:
        """How many checkpoints the weights are an average of."""
        checkpoints = _read(self.path / AVERAGED_FOLDER / AVERAGING_FILE).get("checkpoints")
        return len(checkpoints) if isinstance(checkpoints, list) else None

    def recorded_scores(self) -> list[str]:
        """What the trainers recorded: the last validation, or what the library's Trainer left for a single stack."""
        if self.stack is None:
            return [_tell_scores({key: value for key, value in self.scores.items() if key.startswith("eval_")})]
        if self.has_other_records:
            return []
        paths = [path for path in self.path.glob("*_results.json") if not path.name.startswith(("train_", "all_"))]
        told = {path.name: _tell_scores(_read(path)) for path in sorted(paths)}
        if lines := [f"{as_code(name)}: {scores}" for name, scores in told.items() if scores]:
            return lines
        last = [entry for entry in self.state.get("log_history") or [] if "eval_loss" in entry][-1:]
        text = "while it was trained, after update"
        return [f"{text} {format_value(entry.get('step'))}: {_tell_scores(entry)}" for entry in last]

    def score_table(self) -> list[list[str]]:
        """The head and the rows of a table, with the kinds of scores that there are."""
        columns = [column for column in _SCORES if any(item.score(column) is not None for item in self.evaluations)]
        rows = [["test set", "sentences", "search", *columns]]
        for item in self.evaluations:
            scores = ["" if (score := item.score(column)) is None else f"{score:.2f}" for column in columns]
            rows.append([escape(item.label), format_value(item.scores.get("sentences")), item.search, *scores])
        return rows if self.evaluations else []

    def signatures(self) -> list[str]:
        """One for each kind of score, unless evaluations differ in it."""
        lines = []
        for column in _SCORES:
            labels: dict[str, list[str]] = {}
            for item in self.evaluations:
                if item.score(column) is not None and (signature := item.signature(column)):
                    labels.setdefault(signature, []).append(f"{item.label}, {item.search}")
            for signature, rows in labels.items():
                where = f" ({escape('; '.join(rows))})" if len(labels) > 1 else ""
                lines.append(f"{column}{where}: {as_code(signature)}")
        marks = {str(_mapping(item.scores, "arguments").get("remove_bpe") or "") for item in self.evaluations} - {""}
        lines += [f"Pieces that end in {as_code(mark)} were joined to the next ones first." for mark in sorted(marks)]
        return lines

    @cached_property
    def examples(self) -> list[list[str]]:
        """The first sentences of the first evaluation: source if it is there, reference, output."""
        if not self.evaluations:
            return []
        paths = [self.evaluations[0].folder / f"{name}.txt" for name in ("sources", "references", "hypotheses")]
        if not all(path.is_file() for path in paths[1:]):
            return []
        columns = []
        for path in paths if paths[0].is_file() else paths[1:]:
            with open(path, encoding="utf-8", errors="replace", newline="\n") as lines:
                columns.append([line.strip() for line in islice(lines, _EXAMPLES)])
        return [list(row) for row in zip(*columns, strict=False)]


def _read(path: Path) -> dict[str, Any]:
    """A file's object, empty if there is no such file."""
    content = read_json(path) if path.is_file() else {}
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it must hold a JSON object.")
    return content


def _mapping(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = content.get(name)
    return value if isinstance(value, dict) else {}


def _tell_scores(entry: Mapping[str, Any]) -> str:
    """What the Trainer measured, without what it cost."""
    numbers = {key: number for key, value in entry.items() if (number := to_number(value)) is not None}
    scores = {re.sub("^(eval|predict|test)_", "", key): number for key, number in numbers.items()}
    texts = scores.pop("samples", None)
    told = ", ".join(
        f"{_HEADLINES[name]} {score:.2f}" if name in _HEADLINES else f"{name.replace('_', ' ')} {score:.4g}"
        for name, score in scores.items()
        if not _COSTS.fullmatch(name)
    )
    return f"{told} ({format_value(int(texts))} texts)" if told and texts is not None else told


def is_hub_name(name: Any) -> bool:
    """Whether this can be a name on the Hub, and is not that of a local file or folder."""
    return isinstance(name, str) and _HUB_NAME.fullmatch(name) is not None and not Path(name).exists()


def find_languages(scores: Mapping[str, Any]) -> tuple[str, ...]:
    """Source and target language of an evaluation, as far as it was told them."""
    arguments = _mapping(scores, "arguments")
    return tuple(str(arguments[name]) for name in ("source_lang", "target_lang") if arguments.get(name))


def _is_corpus_of(files: Any, corpora: Any) -> bool:
    """Whether these files are one of the corpora of a training, as far as their paths were recorded."""
    if not files or not isinstance(files, list) or not isinstance(corpora, list):
        return False
    nested = corpora if all(isinstance(each, list) for each in corpora) else [corpora]
    return any(
        len(corpus) == len(files) and all(any(_may_be_same(one, other) for other in corpus) for one in files)
        for corpus in nested
    )


def _may_be_same(one: str, other: str) -> bool:
    """Whether two paths, recorded from different places perhaps, end alike as far as the shorter one goes."""
    parts = ([part for part in re.split(r"[\\/]", str(path)) if part.strip(".")] for path in (one, other))
    return all(a == b for a, b in zip(*(reversed(each) for each in parts), strict=False))


def _base_name(path: str) -> str:
    return re.split(r"[\\/]", path.rstrip("\\/"))[-1]


def base_names(paths: Any) -> list[str]:
    """The last parts of paths, which tell nothing of this machine."""
    if not isinstance(paths, list):
        return []
    return [
        name for path in paths for name in (base_names(path) if isinstance(path, list) else [_base_name(str(path))])
    ]


def _common_name(files: list[str]) -> str:
    """What a test set's files are called: "test.2016" if they are "test.2016.en" and "test.2016.de"."""
    if len(files) == 1:
        return files[0].partition(".")[0]
    places = takewhile(lambda place: len(set(place)) == 1, zip(*map(_NAME_PART.findall, files), strict=False))
    return "".join(place[0] for place in places).rstrip("._-")


def public_name(name: str) -> str:
    """A name of the Hub whole, of a local path the last part."""
    return name if is_hub_name(name) else _base_name(name)
