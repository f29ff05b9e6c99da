"""scripts/export_model.py, and the scripts that translate with what it writes."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import sentencepiece
from tiny_vanilla import make_model

from vanilla_transformer.conversion.tokenizers.sentencepiece import convert_sentencepiece
from vanilla_transformer.data.tokenizer_training import train_tokenizer

pytest.importorskip("ctranslate2")

TEXTS = ["a man rides a horse .", "two dogs run", "the sun shines on the old house", "a dog"]

Main = Callable[..., None]
Refuse = Callable[..., str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random model with settings of its own for the search, and test sets."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(TEXTS, vocab_size=270)
    random = make_model(vocab_size=len(tokenizer))
    random.generation_config.update(num_beams=2, early_stopping=True, max_new_tokens=8)
    random.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, lines in (("test.en", TEXTS), ("test.de", TEXTS[::-1])):
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return folder


@pytest.fixture
def exported(main: Callable[[str], Main], model: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "exported"
    words = ["--model_name_or_path", model, "--format", "ctranslate2", "--output_dir", folder]
    main("export_model")(*words, "--quantization", "float32", "--max_positions", 60)
    return folder


@pytest.fixture
def refuse(main: Callable[[str], Main], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Expects a script to end with an error, and returns what it says."""

    def run(script: str, *arguments: Any, status: int = 2) -> str:
        with pytest.raises(SystemExit) as end:
            main(script)(*arguments)
        assert end.value.code == status
        return capsys.readouterr().err

    return run


def test_every_engine_translates_alike(main: Any, model: Path, exported: Path, tmp_path: Path) -> None:
    """By transformers, by CTranslate2 from its own folder, and from the model's, converted in passing."""
    runs = {"transformers": model, "ctranslate2": exported, "ctranslate2-in-passing": model}
    for name, folder in runs.items():
        main("translate")(
            *("--model_name_or_path", folder, "--engine", name.split("-")[0], "--device", "cpu", "--disable_tqdm"),
            *("--input_file", model / "test.en", "--output_file", tmp_path / f"{name}.txt", "--n_best", 2),
        )
    first, *others = [(tmp_path / f"{name}.txt").read_text(encoding="utf-8").splitlines() for name in runs]
    assert len(first) == 2 * len(TEXTS)
    for lines in others:
        for line, expected in zip(lines, first, strict=True):
            (number, score, text), (its_number, its_score, its_text) = line.split("\t"), expected.split("\t")
            assert (number, text) == (its_number, its_text)
            assert float(score) == pytest.approx(float(its_score), abs=2e-4)


def test_the_exported_model_has_the_same_scores(main: Any, model: Path, exported: Path, tmp_path: Path) -> None:
    for engine, folder in (("transformers", model), ("ctranslate2", exported)):
        main("evaluate_translation")(
            *("--model_name_or_path", folder, "--engine", engine, "--device", "cpu", "--disable_tqdm"),
            *("--test_file", model / "test.en", model / "test.de", "--output_dir", tmp_path / engine),
        )
    engines = ("transformers", "ctranslate2")
    ours, theirs = (json.loads((tmp_path / name / "metrics.json").read_text()) for name in engines)
    assert theirs["loss"] == pytest.approx(ours["loss"], abs=1e-5)
    for name in ("bleu", "chrf", "tokens", "sentences", "output_tokens", "parameters", "num_beams", "architecture"):
        assert theirs[name] == ours[name], name
    assert (theirs["dtype"], theirs["device"]) == ("float32", "cpu")
    assert list(theirs["weights_sha256"]) == ["model.bin"]
    assert "ctranslate2" in theirs["versions"]


def test_stdin_is_translated_in_8_bits(
    main: Callable[[str], Main], exported: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("a dog\n\n"))
    words = ["--engine", "ctranslate2", "--dtype", "int8", "--device", "cpu"]
    main("translate")("--model_name_or_path", exported, *words)
    first, second = capsys.readouterr().out.splitlines()
    assert (bool(first), second) == (True, "")


def test_wrong_input_is_explained(
    refuse: Refuse, model: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--model_name_or_path", model, "--format", "ctranslate2", "--output_dir"]
    assert "exported is a folder that is not empty" in refuse("export_model", *words, exported)
    assert "invalid choice: 'int4'" in refuse("export_model", *words, tmp_path / "x", "--quantization=int4")
    said = refuse("export_model", *words, tmp_path / "x", "--revision", "v1")
    assert f"--revision v1 is for models on the Hub, and {model} is a folder" in said
    learned = tmp_path / "learned"
    shutil.copytree(model, learned)
    random = make_model(vocab_size=270, activation_function="mish", position_embedding_type="learned")
    random.save_pretrained(learned)
    words[1] = learned
    said = refuse("export_model", *words, tmp_path / "x", "--max_positions", 50)
    assert re.search("activation_function is 'mish'.*max_positions is 50, but learned positions end", said, re.DOTALL)
    assert not (tmp_path / "x").exists()

    words[1] = exported
    for script, more in (("export_model", words[2:]), ("convert_checkpoint", ["--to", "marian", "--output_dir"])):
        said = refuse(script, *words[:2], *more, tmp_path / "x")
        assert f"{exported} was exported to CTranslate2: name the folder of the model that was exported" in said

    from_exported = ["--model_name_or_path", exported, "--input_file", model / "test.en", "--device", "cpu"]
    for engine in ("transformers", "onnx"):
        said = refuse("translate", *from_exported, "--engine", engine)
        assert f"{exported} holds a model exported to CTranslate2: it needs --engine ctranslate2" in said
    from_exported += ["--engine", "ctranslate2"]
    for arguments, message in (
        (["--dtype", "int4"], "dtype is 'int4'; it must be one of auto, float32, "),
        (["--dtype", "float16"], f"{exported} cannot be loaded on cpu: "),
        (["--max_new_tokens", 61], "61 new tokens are asked for (can be: 1 to 60, for so many it has positions)"),
        (["--revision", "v1"], "--revision v1 is for models on the Hub"),
    ):
        assert message in refuse("translate", *from_exported, *arguments)
    pairs = ["--test_file", model / "test.en", model / "test.de", "--max_new_tokens", 61]
    evaluated = ["--model_name_or_path", exported, "--device", "cpu", "--engine", "ctranslate2", *pairs]
    assert "61 new tokens are asked for" in refuse("evaluate_translation", *evaluated)
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    assert 'pip install "vanilla-transformer[export]"' in refuse("translate", *from_exported)


def test_settings_that_ctranslate2_will_refuse(main: Any, model: Path, tmp_path: Path, caplog: Any) -> None:
    shutil.copytree(model, tmp_path / "model")
    settings = json.loads((model / "generation_config.json").read_text())
    words = ["--model_name_or_path", tmp_path / "model", "--format", "ctranslate2", "--output_dir"]
    every: list[dict[str, Any]] = [{}, {"suppress_tokens": [5]}, {"suppress_tokens": [5], "num_beams": 1}]
    for number, changes in enumerate(every):
        (tmp_path / "model" / "generation_config.json").write_text(json.dumps({**settings, **changes}))
        caplog.clear()
        main("export_model")(*words, tmp_path / str(number))
        expected = (
            r"1: CTranslate2 will refuse its search settings:\n  - suppress_tokens is \[5\], which .* num_beams=1"
        )
        found = [text for text in caplog.messages if "will refuse" in text]
        assert len(found) == (number == 1)
        assert not found or re.search(expected, found[0])


def test_packages_for_argos_translate(main: Any, refuse: Refuse, model: Path, tmp_path: Path) -> None:
    words = ["--model_name_or_path", model, "--format", "argos", "--output_dir", tmp_path / "package"]
    said = refuse("export_model", *words, "--source_lang", "english")
    assert re.search(
        "not made from a sentencepiece model.*source_lang is 'english'.*target_lang is None", said, re.DOTALL
    )
    with (tmp_path / "spm.model").open("wb") as file:
        options: dict[str, Any] = {"vocab_size": 40, "hard_vocab_limit": False, "minloglevel": 2}
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXTS), model_writer=file, **options)
    tokenizer = convert_sentencepiece(tmp_path / "spm.model")
    make_model(vocab_size=len(tokenizer), langs=["en", "de"]).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    words[1] = tmp_path / "model"
    main("export_model")(*words, "--quantization", "int8", "--target_lang", "nl", "--package_version", "1.2")
    assert [path.name for path in (tmp_path / "package").iterdir()] == ["translate-en_nl-1_2.argosmodel"]


def test_options_of_other_formats_are_refused(refuse: Callable[..., str], model: Path, tmp_path: Path) -> None:
    words = ["--model_name_or_path", model, "--output_dir", tmp_path / "x", "--format"]
    said = refuse("export_model", *words, "onnx", "--quantization", "int8", "--max_positions", 70)
    assert "--quantization int8 is for --format ctranslate2 or web or argos, --max_positions 70 is for" in said
    said = refuse("export_model", *words, "ctranslate2", "--opset", 18)
    assert "--opset 18 is for --format onnx or transformersjs or web or explainer; this is --format ctranslate2" in said


def test_missing_and_damaged_models_are_explained(refuse: Refuse, model: Path, exported: Path, tmp_path: Path) -> None:
    words = ["--engine", "ctranslate2", "--input_file", model / "test.en"]
    nowhere = tmp_path / "nowhere" / "at" / "all"
    pairs = ["--test_file", model / "test.en", model / "test.de"]
    for script, arguments in (
        *(("translate", [*words, "--engine", engine]) for engine in ("ctranslate2", "onnx", "transformers")),
        ("evaluate_translation", pairs),
        ("export_model", ["--format", "onnx", "--output_dir", tmp_path / "x"]),
    ):
        said = refuse(script, *arguments, "--model_name_or_path", nowhere)
        assert said.endswith(f"error: There is no folder {nowhere}.\n")
    words += ["--model_name_or_path", exported]
    assert f"{exported} cannot be loaded on foo" in refuse("translate", *words, "--device", "foo")
    (exported / "model.bin").write_bytes((exported / "model.bin").read_bytes()[:-100])
    assert f"{exported} cannot be loaded on cpu" in refuse("translate", *words, "--device", "cpu")


def test_an_interrupted_export_says_so_and_leaves_nothing(
    refuse: Refuse, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.GenerationConfig.save_pretrained", Mock(side_effect=KeyboardInterrupt))
    words = ["--model_name_or_path", model, "--format", "ctranslate2", "--output_dir", tmp_path / "exported"]
    assert refuse("export_model", *words, status=130).endswith("Interrupted: nothing was exported.\n")
    assert not list(tmp_path.iterdir())
