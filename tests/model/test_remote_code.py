"""A saved folder carries its own code: processes without the package load it and generate the same tokens.

Starting a process costs seconds, so one answers for all tests.
"""

import ast
import json
import re
import shutil
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from remote_process import RemotePython
from tiny_single_stacks import SINGLE_STACKS as AUTO_CLASSES
from tiny_vanilla import make_loud_model
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    dynamic_module_utils,
    pipeline,
)
from transformers.dynamic_module_utils import get_cached_module_file, get_relative_import_files

import vanilla_transformer
from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
    VanillaTransformerTokenizer,
)
from vanilla_transformer.data.tokenizer_training import train_tokenizer
from vanilla_transformer.training.arguments import DataArguments, TranslationTrainingArguments
from vanilla_transformer.training.setup import build_trainer

PACKAGE = Path(vanilla_transformer.__file__).parent / "model"
REMOTE_FILES = {path.name: path for path in sorted(PACKAGE.glob("*_vanilla_transformer.py"))}
ENCODER_FILE, DECODER_FILE = "encoder_only_vanilla_transformer.py", "decoder_only_vanilla_transformer.py"
FILES_OF_BOTH_STACKS = set(REMOTE_FILES) - {ENCODER_FILE, DECODER_FILE}
SINGLE_STACKS = {name: found.__name__ for name, found in AUTO_CLASSES.items() if found is not AutoModel}
# What only a model that generates from a source needs.
GENERATION_FILES = {
    f"{role}_vanilla_transformer.py" for role in ["generation", "search", "static_decoding", "pipeline"]
}
FILES_OF = {
    name: FILES_OF_BOTH_STACKS - GENERATION_FILES | {DECODER_FILE if name.endswith("CausalLM") else ENCODER_FILE}
    for name in SINGLE_STACKS
}
# safetensors is transformers' own requirement, and its exception is what tells a damaged file from other errors.
LEGAL_PACKAGES = {"torch", "transformers", "tokenizers", "huggingface_hub", "safetensors", *sys.stdlib_module_names}
TEXTS = ["a man rides a horse", "two dogs", "", "a man rides a horse and two dogs rest 🐎"]

# What a process without the package is asked, once for several tests.
FIRST_PROGRAM = """
import json, sys
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

report = {"refusals": []}
for load in (
    AutoConfig.from_pretrained,
    AutoTokenizer.from_pretrained,
    AutoModel.from_pretrained,
    AutoModelForSeq2SeqLM.from_pretrained,
    lambda model: pipeline("translation", model=model),
):
    try:
        load(folder)
    except ValueError as error:
        report["refusals"].append(str(error))

config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True)
batch = tokenizer(texts, padding=True, return_tensors="pt")
report["generated"] = {str(beams): model.generate(**batch, num_beams=beams).tolist() for beams in (1, 4)}
pipe = pipeline("translation", model=folder, trust_remote_code=True, device="cpu")
report["translations"] = pipe(texts, num_beams=4)
loaded = (config, tokenizer, model, pipe)
report["classes"] = {type(item).__name__: type(item).__module__ for item in loaded}
inputs = tokenizer("a man", return_tensors="pt")
base = AutoModel.from_pretrained(folder, trust_remote_code=True)
report["base"] = [type(base).__name__, base(**inputs, decoder_input_ids=torch.tensor([[0, 5]]))[0].sum().item()]
model.save_pretrained(again)
tokenizer.save_pretrained(again)
report["files"] = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
report
"""
SINGLE_STACKS_PROGRAM = """
import json
import torch
import transformers
from transformers import AutoTokenizer, pipeline

seq2seq, report = f"{root}/seq2seq", {"refusals": [], "found": {}}
tokenizer = AutoTokenizer.from_pretrained(seq2seq, trust_remote_code=True)
batch = tokenizer(texts[0], return_tensors="pt")

def load(auto_class, folder, **kwargs):
    return getattr(transformers, auto_class).from_pretrained(folder, **kwargs)

def describe(model):
    assert type(model).__module__.startswith("transformers_modules.")
    return type(model).__name__, sum(output.sum().item() for output in model(**batch, use_cache=False).values())

for name, auto_class in single_stacks.items():
    try:
        load(auto_class, f"{root}/{name}")
    except ValueError as error:
        report["refusals"].append(str(error))
    model = load(auto_class, f"{root}/{name}", trust_remote_code=True)
    report["found"][name] = [describe(model), describe(load("AutoModel", f"{root}/{name}", trust_remote_code=True))]
    model.save_pretrained(f"{again}/{name}")
write = pipeline("text-generation", model=f"{root}/VanillaTransformerForCausalLM", trust_remote_code=True)
report["text"] = write(texts[0], do_sample=False, max_new_tokens=5)
settings = {"label_smoothing_factor": 0.2, "report_to": "none", "use_cpu": True}
trainer = transformers.Trainer(write.model, transformers.TrainingArguments(f"{again}-training", **settings))
report["smoothed"] = trainer.compute_loss(write.model, {**batch, "labels": batch["input_ids"]}).item()
report
"""


def make_model(vocab_size: int) -> VanillaTransformerForConditionalGeneration:
    """Weights with which sources and beams matter, in a configuration far from the defaults."""
    changes = {"d_k": 5, "lm_head_bias": True, "normalize_before": True, "position_offset": 2}
    changes |= {"tie_word_embeddings": False, "vocab_size": vocab_size}
    return make_loud_model(VanillaTransformerConfig.from_preset("tiny", **changes))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("saved") / "model"
    tokenizer = train_tokenizer(TEXTS * 3, vocab_size=275, show_progress=False)
    make_model(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def here(saved: Path) -> SimpleNamespace:
    """What this process, with the package, makes of the folder."""
    tokenizer = AutoTokenizer.from_pretrained(saved)
    model = AutoModelForSeq2SeqLM.from_pretrained(saved)
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    generated = {str(beams): model.generate(**batch, num_beams=beams).tolist() for beams in (1, 4)}
    assert len({tuple(row) for rows in generated.values() for row in rows}) > 4, "sources and beams must matter"
    base = AutoModel.from_pretrained(saved)
    inputs = tokenizer("a man", return_tensors="pt")
    checksum = base(**inputs, decoder_input_ids=torch.tensor([[0, 5]]))[0].sum().item()
    # Any, since the library types the names of its own tasks only.
    make_pipeline: Any = pipeline
    translations = make_pipeline("translation", model=str(saved), device="cpu")(TEXTS, num_beams=4)
    return SimpleNamespace(generated=generated, translations=translations, checksum=checksum)


@pytest.fixture(scope="module")
def moved(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder somewhere else, as if it had been downloaded."""
    return Path(shutil.copytree(saved, tmp_path_factory.mktemp("moved") / "my-model"))


@pytest.fixture(scope="module")
def first(moved: Path, tmp_path_factory: pytest.TempPathFactory, without_the_package: RemotePython) -> SimpleNamespace:
    """What a process without the package reports of the folder; it saves everything again, to `again`."""
    again = tmp_path_factory.mktemp("again") / "model"
    report = without_the_package.run(FIRST_PROGRAM, folder=str(moved), again=str(again), texts=TEXTS)
    return SimpleNamespace(again=again, **report)


def test_a_process_without_the_package_generates_the_same_tokens(first: SimpleNamespace, here: SimpleNamespace) -> None:
    assert first.generated == here.generated
    assert first.translations == here.translations
    assert [set(item) for item in first.translations] == [{"translation_text"}] * len(TEXTS)
    name, checksum = first.base
    assert name == "VanillaTransformerModel"
    assert checksum == pytest.approx(here.checksum, rel=1e-5)
    assert len(first.refusals) == 5
    assert all("trust_remote_code=True" in message for message in first.refusals)


def test_there_the_code_is_the_folders(first: SimpleNamespace) -> None:
    expected = {
        "VanillaTransformerConfig": "configuration_vanilla_transformer",
        "VanillaTransformerForConditionalGeneration": "generation_vanilla_transformer",
        "VanillaTransformerTokenizer": "tokenization_vanilla_transformer",
        "TranslationPipeline": "pipeline_vanilla_transformer",
    }
    for name, module in expected.items():
        assert first.classes[name].startswith("transformers_modules.")
        assert first.classes[name].endswith(f".{module}")
    assert not [file for file in first.files if file and Path(file).is_relative_to(PACKAGE)]
    assert any("transformers_modules" in file for file in first.files)


def test_a_folder_saved_there_is_the_same(first: SimpleNamespace, moved: Path) -> None:
    names = {path.name for path in moved.iterdir()}
    assert {path.name for path in first.again.iterdir()} == names
    for name in names - {"config.json", "tokenizer_config.json"}:
        assert (first.again / name).read_bytes() == (moved / name).read_bytes(), name
    for name in ("config.json", "tokenizer_config.json"):
        before, after = (json.loads((folder / name).read_text()) for folder in (moved, first.again))
        assert after == before


@pytest.fixture(scope="module")
def single_stack_folders(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("single_stacks")
    shutil.copytree(saved, root / "seq2seq")
    tokenizer = AutoTokenizer.from_pretrained(saved, add_bos_token=True, add_eos_token=False)
    for name in SINGLE_STACKS:
        torch.manual_seed(1)
        getattr(vanilla_transformer, name).from_pretrained(saved).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root


@pytest.fixture(scope="module")
def single_stacks_report(
    single_stack_folders: Path, tmp_path_factory: pytest.TempPathFactory, without_the_package: RemotePython
) -> SimpleNamespace:
    again = tmp_path_factory.mktemp("again")
    names = {"root": str(single_stack_folders), "again": str(again), "texts": TEXTS, "single_stacks": SINGLE_STACKS}
    found = without_the_package.run(SINGLE_STACKS_PROGRAM, **names)
    return SimpleNamespace(again=again, **found)


class TestSingleStacks:
    """Encoder and decoder alone, and their heads, from their own folders and from that of a translation model."""

    def test_they_give_the_same_numbers(
        self, single_stacks_report: SimpleNamespace, single_stack_folders: Path
    ) -> None:
        batch = AutoTokenizer.from_pretrained(single_stack_folders / "seq2seq")(TEXTS[0], return_tensors="pt")
        for name, found in single_stacks_report.found.items():
            single = getattr(vanilla_transformer, name).from_pretrained(single_stack_folders / name)
            for model, (there, total) in zip((single, single.base_model), found, strict=True):
                assert there == type(model).__name__
                expected = sum(tensor.sum().item() for tensor in model(**batch, use_cache=False).values())
                assert total == pytest.approx(expected, rel=1e-5)
        write: Any = pipeline("text-generation", model=str(single_stack_folders / "VanillaTransformerForCausalLM"))
        assert single_stacks_report.text == write(TEXTS[0], do_sample=False, max_new_tokens=5)
        assert len(single_stacks_report.refusals) == len(SINGLE_STACKS)
        assert all("trust_remote_code=True" in message for message in single_stacks_report.refusals)

    def test_there_too_the_trainer_smooths_a_language_models_shifted_labels(
        self, single_stacks_report: SimpleNamespace, single_stack_folders: Path
    ) -> None:
        tokenizer = AutoTokenizer.from_pretrained(single_stack_folders / "seq2seq")
        ids = tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
        model = AutoModelForCausalLM.from_pretrained(single_stack_folders / "VanillaTransformerForCausalLM")
        with torch.no_grad():
            scores = model(input_ids=ids).logits[0, :-1].log_softmax(dim=-1)
        expected = -0.8 * scores.gather(1, ids[0, 1:, None])[:, 0] - 0.2 * scores.mean(dim=-1)
        assert single_stacks_report.smoothed == pytest.approx(float(expected.mean()), rel=1e-4)

    def test_what_is_saved_there_is_what_was_saved_here(
        self, single_stacks_report: SimpleNamespace, single_stack_folders: Path
    ) -> None:
        for name in SINGLE_STACKS:
            for path in (single_stacks_report.again / name).iterdir():
                assert path.read_bytes() == (single_stack_folders / name / path.name).read_bytes(), path
            again = {path.name for path in (single_stacks_report.again / name).glob("*.py")}
            assert again == FILES_OF[name] - {"tokenization_vanilla_transformer.py"}


class TestWithThePackage:
    def test_no_remote_code_runs_with_or_without_the_flag(self, moved: Path) -> None:
        before = {name for name in sys.modules if name.startswith("transformers_modules")}
        config = AutoConfig.from_pretrained(moved)
        make_pipeline: Any = pipeline
        pipe = make_pipeline("translation", model=str(moved), device="cpu")
        loaded: list[tuple[Any, type]] = [
            (config, VanillaTransformerConfig),
            (AutoModel.from_pretrained(moved), VanillaTransformerModel),
            *(
                (AutoModelForSeq2SeqLM.from_pretrained(moved, **flag), VanillaTransformerForConditionalGeneration)
                for flag in ({}, {"trust_remote_code": True})
            ),
            (AutoTokenizer.from_pretrained(moved), VanillaTransformerTokenizer),
            (pipe, vanilla_transformer.TranslationPipeline),
            (pipe.model, VanillaTransformerForConditionalGeneration),
        ]
        for item, expected in loaded:
            assert type(item) is expected
        assert {name for name in sys.modules if name.startswith("transformers_modules")} == before

    def test_custom_pipelines_are_dropped_on_load_and_written_on_save(self, moved: Path, tmp_path: Path) -> None:
        assert "custom_pipelines" in json.loads((moved / "config.json").read_text())
        config = AutoConfig.from_pretrained(moved)
        assert not hasattr(config, "custom_pipelines")
        config.save_pretrained(tmp_path)
        written = json.loads((tmp_path / "config.json").read_text())["custom_pipelines"]["translation"]
        module, _, name = written["impl"].partition(".")
        assert hasattr(import_module(f"vanilla_transformer.model.{module}"), name)
        assert written["pt"] == ["AutoModelForSeq2SeqLM"]


class TestFolder:
    def test_model_and_tokenizer_saved_to_one_folder_bring_what_they_need(
        self, saved: Path, single_stack_folders: Path
    ) -> None:
        assert {path.name for path in saved.glob("*.py")} == FILES_OF_BOTH_STACKS
        for name, expected in FILES_OF.items():
            assert {path.name for path in (single_stack_folders / name).glob("*.py")} == expected

    @pytest.mark.parametrize(("auto_class", "role"), [(AutoConfig, "configuration"), (AutoTokenizer, "tokenization")])
    def test_configuration_and_tokenizer_bring_their_own_file(
        self, auto_class: Any, role: str, saved: Path, tmp_path: Path
    ) -> None:
        auto_class.from_pretrained(saved).save_pretrained(tmp_path)
        assert [path.name for path in tmp_path.glob("*.py")] == [f"{role}_vanilla_transformer.py"]

    def test_a_checkpoint_of_the_trainer_brings_all_of_it(self, saved: Path, tmp_path: Path) -> None:
        model: Any = AutoModelForSeq2SeqLM.from_pretrained(saved)
        corpora = DatasetDict(train=Dataset.from_dict({"source": ["two dogs"] * 2, "target": ["a horse"] * 2}))
        arguments = TranslationTrainingArguments(
            output_dir=str(tmp_path), max_steps=1, eval_strategy="no", use_cpu=True, disable_tqdm=True
        )
        data_arguments = DataArguments(train_file=["in memory"])
        build_trainer(model, AutoTokenizer.from_pretrained(saved), corpora, data_arguments, arguments).train()
        checkpoint = tmp_path / "checkpoint-1"
        assert {path.name for path in checkpoint.glob("*.py")} == FILES_OF_BOTH_STACKS
        for name in FILES_OF_BOTH_STACKS:
            assert (checkpoint / name).read_bytes() == REMOTE_FILES[name].read_bytes()


@pytest.mark.parametrize("name", REMOTE_FILES)
class TestTheRuleForRemoteFiles:
    """transformers finds what to copy by a regular expression over the raw text, and copies flat files only."""

    def test_imports_are_legal(self, name: str) -> None:
        tree = ast.parse(REMOTE_FILES[name].read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                roots = {alias.name.partition(".")[0] for alias in node.names}
                assert roots <= LEGAL_PACKAGES, f"line {node.lineno}"
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                assert str(node.module).partition(".")[0] in LEGAL_PACKAGES, f"line {node.lineno}"
            if isinstance(node, ast.ImportFrom) and node.level > 0:
                assert node.level == 1, f"line {node.lineno}: leaves the folder"
                assert f"{node.module}.py" in REMOTE_FILES, f"line {node.lineno}: no file that travels"
                assert all(alias.name != "*" for alias in node.names)

    def test_the_library_finds_the_same_imports(self, name: str) -> None:
        def siblings(path: Path) -> set[str]:
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            return {f"{node.module}.py" for node in nodes if isinstance(node, ast.ImportFrom) and node.level > 0}

        reachable: set[str] = set()
        waiting = siblings(REMOTE_FILES[name])
        while waiting:
            reachable |= waiting
            waiting = {more for found in waiting for more in siblings(REMOTE_FILES[found])} - reachable
        copied = {Path(file).name for file in get_relative_import_files(str(REMOTE_FILES[name]))}
        assert copied | {name} == reachable | {name}


@pytest.mark.parametrize("name", ["my model", "a+b, c'd\"e", "größe\tdes 模型s"])
def test_a_folder_may_have_any_name(
    name: str, saved: Path, here: SimpleNamespace, tmp_path: Path, without_the_package: RemotePython
) -> None:
    folder = shutil.copytree(saved, tmp_path / name)
    program = """
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True)
batch = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)(texts, padding=True, return_tensors="pt")
model.generate(**batch).tolist()
"""
    assert without_the_package.run(program, folder=str(folder), texts=TEXTS) == here.generated["1"]


@pytest.mark.parametrize("name", ["generation", "modeling", "encoder_only", "decoder_only"])
def test_what_an_interrupted_first_use_left_out_is_copied_by_the_next(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model of the Hub; so it is with what another process is still copying."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    repository, commit = tmp_path / "hub" / "models--me--mine", "a" * 40
    shutil.copytree(PACKAGE, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)

    def copy() -> Path:
        file = get_cached_module_file("me/mine", f"{name}_vanilla_transformer.py", cache_dir=tmp_path / "hub")
        return tmp_path / "modules" / file

    folder = copy().parent
    copied = set(folder.glob("*_vanilla_transformer.py"))
    assert len(copied) > 5
    for file in copied:
        file.unlink()
        copy()
        assert set(folder.glob("*_vanilla_transformer.py")) == copied, file


@pytest.mark.parametrize("version", ["4.57.1", "5.11.2", "5.9.0.dev0"])
@pytest.mark.parametrize("role", ["configuration", "tokenization"])
def test_the_files_that_are_loaded_first_name_the_version_that_is_needed(
    role: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = REMOTE_FILES[f"{role}_vanilla_transformer.py"].read_text(encoding="utf-8")
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    for missing in ("huggingface_hub.dataclasses", "tokenizers"):  # which shows that they are not imported before
        monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=f"needs transformers >= 5.12, and this is {version}: pip install --upgrade"):
        exec(compile(source, role, "exec"), {"__name__": "transformers_modules.some"})


def test_the_version_that_is_needed_is_the_packages() -> None:
    root = PACKAGE.parent
    needed = re.search(r"transformers>=([0-9.]+)", (root.parent / "pyproject.toml").read_text(encoding="utf-8"))
    assert needed is not None
    for role in ("configuration", "tokenization"):
        text = REMOTE_FILES[f"{role}_vanilla_transformer.py"].read_text(encoding="utf-8")
        assert f"transformers >= {needed[1]}," in text
    card = (root / "hub" / "model_card.md").read_text(encoding="utf-8")
    assert f"transformers` (at least version {needed[1]})" in card
