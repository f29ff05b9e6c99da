"""Whether a model's folder works for those who load it, checked before it is published.

All checks look at a copy of what is to be pushed, not at the folder, so that nothing that stays here is counted on.
"""

import ast
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import transformers
from huggingface_hub import ModelCard
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging

from vanilla_transformer.data.vocabularies import get_vocabularies
from vanilla_transformer.files import find_damage, list_weights_problems
from vanilla_transformer.model.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.tasks import TRANSLATION, SingleStack, Task, find_single_stack, find_task

from .files import (
    CARD_NAME,
    CODE_FOLDER,
    Problem,
    Selection,
    find_code_files,
    find_refused_files,
    find_secrets,
    follow_imports,
    join_lines,
    read_bytes,
    read_settings,
    select_files,
)
from .trial import Outcome, make_user, use

CodeChoice = Literal["folder", "installed"]

PROBES = ("A man rides a horse.", "7")
# Of which an embedding's number of rows may be one, with spare rows at the end.
_MULTIPLES = (1, 8, 16, 32, 64, 128, 256, 512)
_TIMEOUT = 900  # seconds


@dataclass
class Inspection:
    """What was found out about a folder."""

    selection: Selection
    problems: list[Problem] = field(default_factory=list)
    replaced: dict[str, Path] = field(default_factory=dict)  # code that is taken from the installed package
    changes: Mapping[str, bytes] = field(default_factory=dict)  # the files whose content will be another one
    probes: Sequence[str] = PROBES  # what the model was tried with
    outcomes: list[str] = field(default_factory=list)  # what it makes of them, in words
    task: Task | SingleStack = TRANSLATION
    is_self_contained: bool = False  # tried with its own code, in a process without this package

    @property
    def files(self) -> dict[str, Path | bytes]:
        """What would be pushed, by the paths in the repository."""
        return {**self.selection.files, **self.replaced, **self.changes}


def check_model_folder(
    folder: str | os.PathLike[str], *, include: Sequence[str] = (), code: CodeChoice | None = None
) -> list[Problem]:
    """Returns why a model's folder, which is not changed, does not work for those who load it: all problems.

    The weights must be whole and fit the configuration, tied ones stored once; tokenizer, configuration and generation
    config must agree; the card must be valid. In a process without this package the model must do its task with the
    same outcome as here. Pickles and what looks like a secret are refused. `include` are files or sub-folders to push
    beyond those of `select_files`. Code in the folder that differs from the installed package's is a problem, unless
    `code` is "folder", which trusts and runs it, or "installed", which checks as if the package's were there.
    """
    card = read_bytes(Path(folder, CARD_NAME))
    text = None if card is None else card.decode("utf-8", errors="replace")
    return inspect_model_folder(Path(folder), card=text, include=include, code=code).problems


def inspect_model_folder(
    folder: Path,
    *,
    card: str | None,
    include: Sequence[str] = (),
    code: CodeChoice | None = None,
    changes: Mapping[str, bytes] | None = None,
) -> Inspection:
    """As `check_model_folder`, with the card and other `changes` that would be pushed, and all that was found out."""
    selection = select_files(folder, include)
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        message = "it holds an adapter of peft: push that with PeftModel.push_to_hub, or merge it and save the model."
        return Inspection(selection, [Problem("files", message)])
    problems = [*find_refused_files(folder, selection), *_check_card(card)]
    found = Inspection(selection, problems, changes=changes or {})
    if stack := find_single_stack(read_settings(folder / "config.json")):
        found.task = stack
    else:
        found.probes = _choose_probes(folder)
    found.problems += _compare_code(folder, found, code)
    with _staged(found.files) as stage, _quiet():
        parts = list(_check_parts(stage, found))
    # The copy's path would only puzzle.
    found.problems += [Problem(each.check, each.message.replace(str(stage), str(folder))) for each in parts]
    return found


def _choose_probes(folder: Path) -> Sequence[str]:
    """The first sentence that the model was scored on, if an evaluation kept it: of a kind that it knows."""
    for path in sorted(folder.glob("*/sources.txt")):
        with path.open(encoding="utf-8", errors="replace") as lines:
            if text := next(lines, "").strip():
                return text, *PROBES[1:]
    return PROBES


@contextmanager
def _staged(files: Mapping[str, Path | bytes]) -> Iterator[Path]:
    """A folder with these files and nothing else."""
    with tempfile.TemporaryDirectory(prefix="push-") as name:
        stage = Path(name, "model")
        stage.mkdir()
        for path, source in files.items():
            target = stage / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(source, bytes):
                target.write_bytes(source)
                continue
            try:
                target.symlink_to(source.resolve())
            except OSError:  # not every system lets everybody make links
                shutil.copyfile(source, target)
        yield stage


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the library from reporting in its own words what becomes a problem here."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _check_parts(stage: Path, found: Inspection) -> Iterator[Problem]:
    """Each part by itself first, then whether they agree, then whether they work."""
    problems: list[Problem] = []
    stack = found.task if isinstance(found.task, SingleStack) else None
    config = _attempt("config", problems, lambda: _load_config(stage))
    generation = None
    if stack is None or stack.writes:
        generation = _attempt("generation_config", problems, lambda: _load_generation_config(stage))
    if generation is None:
        (stage / "generation_config.json").unlink(missing_ok=True)  # the model shall load all the same
    weights = list(_check_weights(stage))
    problems += weights
    model = tokenizer = None
    if config is not None:
        if not weights:
            model = _attempt("weights", problems, lambda: _load_model(stage, stack, problems))
        tokenizer = _attempt("tokenizer", problems, lambda: _load_tokenizer(stage))
        problems += _check_ids(config, generation, tokenizer, stack)
        if tokenizer is not None:
            problems += _check_vocabulary(config, tokenizer, stack)
        problems += _check_code(stage, config, stack)
    if model is not None:
        problems += _check_ties(stage, model)
    yield from problems
    if not problems:
        yield from _check_use(stage, model, tokenizer, found)


def _check_weights(stage: Path) -> Iterator[Problem]:
    """Whether they are all there and whole; what stands in them is not looked at."""
    for message in list_weights_problems(stage):
        name = message.partition(" ")[0]
        damage = find_damage(stage / name) or ""
        yield Problem("weights", f"{name} {damage}." if "git-lfs" in damage else f"{message}.")
    if (stage / SAFE_WEIGHTS_NAME).is_file() and (stage / SAFE_WEIGHTS_INDEX_NAME).is_file():
        names = f"{SAFE_WEIGHTS_NAME} and {SAFE_WEIGHTS_INDEX_NAME}"
        yield Problem("weights", f"{names} are both there: delete the old one.")


def _attempt(check: str, problems: list[Problem], load: Callable[[], Any]) -> Any:
    try:
        return load()
    except Exception as error:  # what a damaged file provokes may be anything, and all of it is to be reported
        problems.append(Problem(check, join_lines(error)))
        return None


def _load_config(stage: Path) -> Any:
    config = AutoConfig.from_pretrained(stage, local_files_only=True, trust_remote_code=False)
    is_own = isinstance(config, VanillaTransformerConfig)
    if is_own and (problem := config.find_unknown_fields(read_settings(stage / "config.json"))):
        raise ValueError(f"config.json has fields that are none. {problem}")
    return config


def _load_generation_config(stage: Path) -> GenerationConfig:
    generation = GenerationConfig.from_pretrained(stage, local_files_only=True)
    generation.validate(strict=True)
    return generation


def _load_tokenizer(stage: Path) -> Any:
    if not (stage / "tokenizer_config.json").is_file():
        raise FileNotFoundError("tokenizer_config.json is missing: save the tokenizer into the folder too.")
    tokenizer = AutoTokenizer.from_pretrained(stage, local_files_only=True, trust_remote_code=False)
    names = ["tokenizer.json", *tokenizer.vocab_files_names.values()]
    if tokenizer.is_fast:  # which reads no sentencepiece model: it is there for other programs
        names = [name for name in names if not name.endswith(".spm")]
    if not any((stage / name).is_file() for name in names):  # some tokenizers start untrained then
        raise FileNotFoundError(f"{' or '.join(sorted(set(names)))} is missing: save the tokenizer again.")
    return tokenizer


def _stored_names(stage: Path) -> set[str]:
    names: set[str] = set()
    for path in stage.glob("*.safetensors"):
        with safe_open(path, framework="pt") as tensors:
            names |= set(tensors.keys())
    return names


def _load_model(stage: Path, stack: SingleStack | None, problems: list[Problem]) -> PreTrainedModel | None:
    auto_class: Any = getattr(transformers, "AutoModelForSeq2SeqLM" if stack is None else stack.auto_class)
    options = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, report = auto_class.from_pretrained(stage, **options)
    unexpected = set(report["unexpected_keys"])
    if stack is not None and not report["missing_keys"]:
        # A single stack passes over what an encoder-decoder has besides, but weights of its own folder are its own.
        unexpected |= _stored_names(stage) - model.state_dict().keys()
    weights = model.state_dict().items()
    misfits = [f"{name} {list(one)} instead of {list(other)}" for name, one, other in report["mismatched_keys"]]
    kinds = {
        "these weights that the model has are missing": report["missing_keys"],
        "these weights belong to no part of the model": unexpected,
        "these weights have other shapes than the configuration says": misfits,
        "these weights are not all finite numbers": [name for name, weight in weights if not weight.isfinite().all()],
    }
    bad = [Problem("weights", f"{kind}: {_join(sorted(names))}.") for kind, names in kinds.items() if names]
    problems += bad
    return None if bad else model


def _check_ties(stage: Path, model: PreTrainedModel) -> Iterator[Problem]:
    stored = _stored_names(stage)
    names = defaultdict(set)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].add(name)
    for twice in (sorted(stored & tied) for tied in names.values()):
        if len(twice) > 1:
            yield Problem("weights", f"{_join(twice)} are one weight, stored {len(twice)} times: save it again.")


def _check_ids(
    config: Any, generation: GenerationConfig | None, tokenizer: Any, stack: SingleStack | None
) -> Iterator[Problem]:
    """Special tokens have one id each, whoever is asked."""
    sources = {"config.json": config, "generation_config.json": generation, "the tokenizer": tokenizer}
    for name in ("bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id"):
        found = {source: getattr(item, name, None) for source, item in sources.items()}
        found = {source: value for source, value in found.items() if value is not None}
        # A model may stop at several tokens, of which the tokenizer's is one.
        ids = [set(value) if isinstance(value, list) else {value} for value in found.values()]
        if ids and not set.intersection(*ids):
            listed = ", ".join(f"{value} in {source}" for source, value in found.items())
            yield Problem("tokenizer", f"{name} is {listed}.")
    if stack is None and all(getattr(item, "decoder_start_token_id", None) is None for item in (config, generation)):
        yield Problem("generation_config", "decoder_start_token_id is given nowhere, so nothing can be generated.")


def _check_vocabulary(config: Any, tokenizer: Any, stack: SingleStack | None) -> Iterator[Problem]:
    """The tokenizer has as many tokens as the model; what a decoder alone reads is the target's, and has not ended."""
    source = getattr(config, "vocab_size", None)
    target = getattr(config, "decoder_vocab_size", None) or source
    source_vocabulary, target_vocabulary = get_vocabularies(tokenizer)
    has_two = target_vocabulary is not source_vocabulary
    sides = {"source": (len(tokenizer), source, "vocab_size")}
    if stack is None and (has_two or target != source):
        tokens = len(target_vocabulary) if has_two else len(tokenizer)
        sides["target"] = (tokens, target, "decoder_vocab_size")
    for side, (tokens, rows, name) in sides.items():
        if isinstance(rows, int) and rows not in [-(-tokens // multiple) * multiple for multiple in _MULTIPLES]:
            reason = "the model was trained with another tokenizer, or was not resized to this one."
            counted = f"the tokenizer has {tokens} {side} tokens, but config.json says {name}={rows}"
            yield Problem("tokenizer", f"{counted}: {reason}")
    if stack is not None and stack.side == "decoder" and has_two:
        reason = "it reads texts in the source's vocabulary, but a decoder-only model knows the target's"
        yield Problem("tokenizer", f"{reason}: save tokenizer.target_tokenizer into the folder.")
    elif stack is not None and stack.writes and tokenizer(PROBES[0])["input_ids"][-1] == tokenizer.eos_token_id:
        reason = f"it ends prompts with {tokenizer.eos_token}, after which a language model has nothing to say"
        yield Problem("tokenizer", f"{reason}: save it with add_bos_token=True, add_eos_token=False.")


def _check_card(text: str | None) -> Iterator[Problem]:
    """What can be told without asking the Hub, which says what is wrong with the values."""
    if text is None:
        yield Problem("card", f"{CARD_NAME} is missing: model_card.write_model_card writes it.")
        return
    yield from find_secrets(CARD_NAME, text)
    try:
        card = ModelCard(text)
    except Exception as error:  # YAML's errors, and those of the classes that read it
        yield Problem("card", f"the metadata of {CARD_NAME} cannot be read: {join_lines(error)}")
        return
    if not card.data.to_dict():
        yield Problem("card", f"{CARD_NAME} has no metadata between two lines of ---.")


def _compare_code(folder: Path, found: Inspection, code: CodeChoice | None) -> Iterator[Problem]:
    """Notes which files are to be replaced by the installed package's, or says that it must be decided."""
    theirs = [path.name for path in find_code_files(folder)]
    known = [name for name in theirs if (CODE_FOLDER / name).is_file()]
    ours = [path.name for path in follow_imports(CODE_FOLDER, known)]
    names = sorted({*theirs, *ours})
    differing = [name for name in names if read_bytes(folder / name) != read_bytes(CODE_FOLDER / name)]
    if code == "installed":
        found.replaced = {name: CODE_FOLDER / name for name in differing if name in ours}
        for name in found.replaced:
            found.selection.left_out.pop(name, None)
        differing = [name for name in differing if name not in ours]
    if differing and code != "folder":
        advice = "--code installed takes the package's; --code folder, if you changed the code, tries and pushes that"
        what = f"{_join(differing)} in the folder and in the installed package are not the same"
        yield Problem("code", f"{what}: {advice}.")


def _check_code(stage: Path, config: Any, stack: SingleStack | None) -> Iterator[Problem]:
    """The configurations name code, and the code is there and can be parsed."""
    if config.model_type == VanillaTransformerConfig.model_type:
        yield from _check_names_of_code(stage, config, stack)
    for path in find_code_files(stage):
        if not path.is_file():
            yield Problem("code", f"{path.name}, which the configurations or other code name, is missing.")
            continue
        try:
            ast.parse(path.read_bytes(), path.name)
        except (SyntaxError, ValueError) as error:
            yield Problem("code", f"{path.name} is not Python: {error}")


def _check_names_of_code(stage: Path, config: Any, stack: SingleStack | None) -> Iterator[Problem]:
    """Those without this package find its classes; somebody's own classes, or another repository's, are not known."""
    settings, tokenizer = read_settings(stage / "config.json"), read_settings(stage / "tokenizer_config.json")
    fresh = VanillaTransformerConfig(is_encoder_decoder=stack is None, is_decoder=config.is_decoder).to_dict()
    needed = {f"auto_map.{key} in config.json": (settings, "auto_map", key) for key in fresh["auto_map"]}
    if stack is None:
        task = find_task(config).pipeline
        needed[f"custom_pipelines.{task} in config.json"] = settings, "custom_pipelines", task
    if tokenizer and not hasattr(transformers, str(tokenizer.get("tokenizer_class"))):  # the library's own needs none
        needed["auto_map.AutoTokenizer in tokenizer_config.json"] = tokenizer, "auto_map", "AutoTokenizer"
    absent = []
    for place, (content, field_name, key) in needed.items():
        entries = content.get(field_name)
        reference = entries.get(key) if isinstance(entries, dict) else None
        expected = fresh["auto_map"].get(key) if content is settings else reference
        if not reference:
            absent.append(place)
        elif isinstance(reference, str) and reference != expected:
            code = f"{reference.partition('.')[0]}.py"
            if read_bytes(stage / code) == read_bytes(CODE_FOLDER / code) is not None:
                yield Problem("code", f"{place} is {reference}, but must be {expected} here.")
    if absent:
        advice = "load the model and the tokenizer with it, and save them again."
        yield Problem("code", f"there is no {_join(absent)}, which those without this package need: {advice}")


def _check_use(stage: Path, model: Any, tokenizer: Any, found: Inspection) -> Iterator[Problem]:
    """The model does its task here, and with the same outcome where this package is not installed."""
    if not isinstance(found.task, SingleStack):
        found.task = find_task(model.config)
    task = found.task.pipeline
    try:
        outcomes = use(task, make_user(task, model, tokenizer), found.probes)
    except Exception as error:  # whatever the model's parts do not agree on
        yield Problem("use", f"using it on {found.probes[0]!r} fails: {join_lines(error)}")
        return
    found.outcomes = [text for text, _ in outcomes]
    if not isinstance(found.task, SingleStack) and not any(text.strip() for text in found.outcomes):
        texts = _join([repr(text) for text in found.probes])
        yield Problem("use", f"of {texts} it makes nothing but empty texts.")
    found.is_self_contained = bool(find_code_files(stage))
    # No code is run that comes with something suspicious, or that nobody has decided about.
    if found.is_self_contained and not found.problems:
        yield from _try_without_the_package(stage, task, found.probes, outcomes)


def _try_without_the_package(
    stage: Path, task: str, probes: Sequence[str], expected: Sequence[Outcome]
) -> Iterator[Problem]:
    where = "in a process without this package"
    report = stage.parent / "report.json"
    # The code in the folder gets no token of the Hub, and finds no code of an earlier trial.
    environment = {key: value for key, value in os.environ.items() if not key.endswith("_TOKEN")}
    environment |= {"HF_MODULES_CACHE": str(stage.parent / "modules"), "HF_TOKEN_PATH": str(stage.parent / "no-token")}
    environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-P", str(Path(__file__).with_name("trial.py")), task, str(stage), str(report), *probes]
    options: Any = {"capture_output": True, "cwd": stage.parent, "env": environment, "stdin": subprocess.DEVNULL}
    try:
        ended = subprocess.run(command, timeout=_TIMEOUT, **options)
    except subprocess.TimeoutExpired:
        yield Problem("code", f"{where} nothing came out in {_TIMEOUT} seconds.")
        return
    result = read_settings(report)
    if ended.returncode or not result:
        lines = ended.stderr.decode(errors="replace").strip().splitlines()
        yield Problem("code", f"{where} loading or using the model fails: {lines[-1] if lines else 'no message'}")
        return
    known = ("transformers_modules.", "transformers.")
    if strangers := sorted(name for name, module in result["modules"].items() if not module.startswith(known)):
        yield Problem("code", f"{where} {_join(strangers)} came neither from the folder's code nor from transformers.")
    yield from _compare_outcomes(where, probes, expected, result["outcomes"])


def _compare_outcomes(
    where: str, probes: Sequence[str], expected: Sequence[Outcome], found: Sequence[Outcome]
) -> Iterator[Problem]:
    for probe, (here, numbers), (there, others) in zip(probes, expected, found, strict=True):
        if here != there:
            yield Problem("code", f"{probe!r} becomes {here!r} here, but {there!r} {where}.")
            continue
        pairs = zip(numbers, others, strict=True)
        if differing := [pair for pair in pairs if not math.isclose(*pair, rel_tol=1e-4, abs_tol=1e-4)]:
            example = "{1:.6g}, say, instead of {0:.6g}".format(*differing[0])
            count = f"{len(differing)} of {len(numbers)}"
            yield Problem("code", f"for {probe!r} {count} numbers are others {where}: {example}.")


def _join(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
