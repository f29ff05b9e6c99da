"""Folders that version 0.1.0 saved, when the package's files had other names, still load, with and without the package.

`expected.json` in the archive holds what that version computed.
"""

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from remote_process import RemotePython

import vanilla_transformer

# What a process reports of all three folders: starting one for each would take seconds more.
REPORT = """
import json, sys
from pathlib import Path
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, AutoTokenizer

def report(root, expected, **options):
    texts = expected["texts"]
    found, models = {}, {}
    for name, auto_class in (
        ("seq2seq", AutoModelForSeq2SeqLM),
        ("classifier", AutoModelForSequenceClassification),
        ("language_model", AutoModelForCausalLM),
    ):
        models[name] = auto_class.from_pretrained(root / name, **options)
    tokenizer = AutoTokenizer.from_pretrained(root / "seq2seq", **options)
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    model = models["seq2seq"]
    translate = transformers.pipeline("translation", model=str(root / "seq2seq"), device="cpu", **options)
    prompt = torch.tensor(expected["language_model"]["prompt"])
    with torch.no_grad():
        decoder_input_ids = torch.tensor(expected["seq2seq"]["decoder_input_ids"])
        found["seq2seq"] = {
            "logits": model(**batch, decoder_input_ids=decoder_input_ids).logits[:, :, :40].tolist(),
            "greedy": model.generate(**batch, num_beams=1).tolist(),
            "beam": model.generate(**batch, num_beams=4).tolist(),
            "translations": [each["translation_text"] for each in translate(texts)],
        }
        found["classifier"] = {"logits": models["classifier"](**batch).logits.tolist()}
        model = models["language_model"]
        found["language_model"] = {
            "logits": model(input_ids=prompt).logits[:, :, :40].tolist(),
            "greedy": model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt)).tolist(),
        }
    found["input_ids"] = batch["input_ids"].tolist()
    found["modules"] = {name: type(model).__module__ for name, model in models.items()}
    return found, models
"""
PROGRAM = """
root = Path(root)
report(root, json.loads((root / "expected.json").read_text()), trust_remote_code=True)[0]
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, repository_root: Path) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    with tarfile.open(repository_root / "tests" / "support" / "saved_by_0.1.0.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "saved_by_0.1.0"


@pytest.fixture(scope="module")
def expected(root: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((root / "expected.json").read_text())
    return content


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["input_ids"] == expected["input_ids"]
    for name in ("seq2seq", "classifier", "language_model"):
        for key, value in found[name].items():
            if key == "logits":
                torch.testing.assert_close(torch.tensor(value), torch.tensor(expected[name][key]), atol=1e-5, rtol=0.0)
            else:
                assert value == expected[name][key], (name, key)


def test_with_the_package(root: Path, expected: dict[str, Any], tmp_path: Path) -> None:
    namespace: dict[str, Any] = {}
    exec(REPORT, namespace)
    found, models = namespace["report"](root, expected)
    check(found, expected)
    assert all(module.startswith("vanilla_transformer.") for module in found["modules"].values())
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        settings = json.loads((tmp_path / name / "config.json").read_text())
        assert "config_version" not in settings
        for reference in settings["auto_map"].values():
            file = f"{reference.partition('.')[0]}.py"
            assert (tmp_path / name / file).is_file(), reference
            assert (Path(vanilla_transformer.__file__).parent / "model" / file).is_file()


def test_by_their_own_code(root: Path, expected: dict[str, Any], without_the_package: RemotePython) -> None:
    """The code beside the weights is that of version 0.1.0."""
    found = without_the_package.run(REPORT + PROGRAM, root=str(root))
    check(found, expected)
    assert all(module.startswith("transformers_modules.") for module in found["modules"].values())
    assert found["modules"]["classifier"].endswith(".encoder_vanilla_transformer")
