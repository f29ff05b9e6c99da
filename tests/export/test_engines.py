"""`--engine auto`: which engine is taken for what, why, and that each translates alike."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_vanilla import make_model
from transformers import GenerationConfig

from vanilla_transformer.commands.serve import ServingArguments
from vanilla_transformer.commands.translate import TranslationArguments
from vanilla_transformer.data.tokenizer_training import train_tokenizer
from vanilla_transformer.export.ctranslate2 import EXPORT_FOLDER, export_ctranslate2
from vanilla_transformer.export.ctranslate2_model import (
    CTranslate2Model,
    find_export,
    find_reason_against,
    load_for_ctranslate2,
)
from vanilla_transformer.export.engines import EngineArguments
from vanilla_transformer.inference.translate import translate
from vanilla_transformer.model import static_decoding_vanilla_transformer as static_decoding
from vanilla_transformer.model.generation_vanilla_transformer import VanillaTransformerForConditionalGeneration

ctranslate2: Any = pytest.importorskip("ctranslate2")

TEXTS = ["a man rides a horse .", "two dogs run", "the sun shines on the old house", "a dog"]
CLASSES = {"transformers": VanillaTransformerForConditionalGeneration, "ctranslate2": CTranslate2Model}


def save(folder: Path, seed: int = 0) -> None:
    tokenizer = train_tokenizer(TEXTS, vocab_size=270)
    model = make_model(vocab_size=len(tokenizer), seed=seed)
    model.generation_config.update(num_beams=2, early_stopping=True, max_new_tokens=8)
    for part in (model, tokenizer):
        part.save_pretrained(folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder with its export in it; tests that change it take a copy."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    save(folder)
    export_ctranslate2(str(folder), folder / EXPORT_FOLDER)
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.fixture
def taken(caplog: pytest.LogCaptureFixture) -> Callable[..., tuple[str, str]]:
    """Loads with `--engine auto`; returns the engine, whose class is checked, and what the log says."""

    def load(name: Path | str, kind: Any = EngineArguments, **options: Any) -> tuple[str, str]:
        caplog.clear()
        with caplog.at_level(logging.INFO, "vanilla_transformer"):
            arguments = kind(model_name_or_path=str(name), **{"device": "cpu", **options})
            model, *_ = arguments.load()
        assert isinstance(model, CLASSES[arguments.engine])
        said = [record.getMessage() for record in caplog.records if "The engine for" in record.getMessage()]
        assert len(said) == 1
        assert said[0].startswith(f"The engine for {name} is {arguments.engine}, since ")
        assert said[0].endswith(" Choose another with --engine.")
        return arguments.engine, said[0]

    return load


def test_an_export_beside_the_weights_is_taken_and_translates_alike(saved: Path, taken: Any) -> None:
    engine, said = taken(saved)
    assert (engine, f"{saved / EXPORT_FOLDER} has the same weights" in said) == ("ctranslate2", True)
    found = []
    for name in ("auto", "transformers"):
        model, tokenizer, settings = EngineArguments(str(saved), engine=name, device="cpu", num_beams=3).load()
        found.append(translate(model, tokenizer, TEXTS, progress=False, **settings))
    assert found[0] == found[1]
    assert any(found[0])


def test_static_memory_may_be_asked_for(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []

    def step(*args: Any, decode_step: Any = static_decoding.decode_step) -> Any:
        steps.append(args)
        return decode_step(*args)

    monkeypatch.setattr(static_decoding, "decode_step", step)
    found = []
    for kind in (None, "static"):
        arguments = EngineArguments(str(saved), engine="transformers", device="cpu", cache_implementation=kind)
        model, tokenizer, settings = arguments.load()
        assert not steps
        found.append(translate(model, tokenizer, TEXTS, progress=False, **settings))
    assert found[0] == found[1]
    assert steps


def test_without_an_export_it_is_transformers(tmp_path: Path, taken: Any) -> None:
    save(tmp_path / "model")
    assert taken(tmp_path / "model")[0] == "transformers"


def test_the_export_is_of_the_very_weights(copied: Path, taken: Any, caplog: pytest.LogCaptureFixture) -> None:
    path = copied / "config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"langs": ["en", "de"], "dropout": 0.3}))  # changes no translation
    assert taken(copied)[0] == "ctranslate2"
    path.write_text(json.dumps({name: value for name, value in settings.items() if name != "initializer_gain"}))
    assert taken(copied)[0] == "ctranslate2"  # which code before this field has saved
    assert settings["ffn_bias"] != settings["lm_head_bias"]
    path.write_text(json.dumps({name: settings[name] for name in settings if name not in ("ffn_bias", "lm_head_bias")}))
    assert taken(copied)[0] == "ctranslate2"  # whose defaults are the same
    path.write_text(json.dumps(settings | {"scale_embedding": False}))
    assert taken(copied)[0] == "transformers"
    path.write_text(json.dumps(settings))
    assert taken(copied)[0] == "ctranslate2"
    save(copied, seed=1)  # as after more training
    engine, said = taken(copied)
    assert engine == "transformers"
    assert f"{copied / EXPORT_FOLDER} is not of the weights and config.json that are there now (delete it, and" in said
    assert caplog.records[-1].levelno == logging.WARNING  # which every command shows
    assert load_for_ctranslate2(str(copied), device="cpu")[0].num_parameters()  # converts in passing
    shutil.rmtree(copied / EXPORT_FOLDER)
    export_ctranslate2(make_model(vocab_size=270), copied / EXPORT_FOLDER)  # nobody says of what
    assert "is not of the weights and config.json that are there now" in taken(copied)[1]
    assert find_export(copied / EXPORT_FOLDER)[1] == f"there is no export to CTranslate2 in {copied / EXPORT_FOLDER}"


def test_what_else_is_in_the_folder_may_have_changed(copied: Path) -> None:
    config = GenerationConfig.from_pretrained(copied)
    config.update(num_beams=3, max_new_tokens=5)
    config.save_pretrained(copied)
    model, tokenizer, _ = EngineArguments(str(copied), device="cpu").load()
    assert isinstance(model, CTranslate2Model)
    assert (model.generation_config.num_beams, model.generation_config.max_new_tokens) == (3, 5)
    torch_model, *_ = EngineArguments(str(copied), device="cpu", engine="transformers").load()
    assert translate(model, tokenizer, TEXTS, progress=False) == translate(
        torch_model, tokenizer, TEXTS, progress=False
    )


def test_what_ctranslate2_cannot_do_is_done_by_torch(
    copied: Path, taken: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "terms.tsv").write_text("dog\tHund\n")
    glossary = {"glossary": str(tmp_path / "terms.tsv"), "num_beams": 2}
    engine, said = taken(copied, TranslationArguments, **glossary)
    assert (engine, "--glossary needs torch" in said) == ("transformers", True)
    (one,) = ServingArguments([str(copied)], **glossary, device="cpu").divide()  # type: ignore[arg-type]
    assert isinstance(one.load()[0], CLASSES["transformers"])
    assert taken(copied, TranslationArguments, num_beams=2)[0] == "ctranslate2"

    assert "5000 new tokens are asked for" in taken(copied, max_new_tokens=5000)[1]
    config = GenerationConfig.from_pretrained(copied)
    config.update(do_sample=True)
    config.save_pretrained(copied)
    engine, said = taken(copied)
    assert (engine, "do_sample is True, of which it has no counterpart" in said) == ("transformers", True)
    assert taken(copied, dtype="int8")[0] == "ctranslate2"  # asked for: its search says no
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    assert 'pip install "vanilla-transformer[export]"' in taken(copied)[1]


def test_types_that_both_have(saved: Path, taken: Any) -> None:
    supported = ctranslate2.get_supported_compute_types("cpu")
    for dtype in ("float32", "bfloat16", "float16"):
        expected = "ctranslate2" if dtype in supported else "transformers"
        engine, said = taken(saved, dtype=dtype)
        assert engine == expected
        assert dtype in supported or f"CTranslate2 cannot compute in {dtype} here" in said


def test_an_export_in_8_bits_is_taken_unless_more_are_asked_for(copied: Path, taken: Any) -> None:
    shutil.rmtree(copied / EXPORT_FOLDER)
    export_ctranslate2(str(copied), copied / EXPORT_FOLDER, quantization="int8")
    assert taken(copied)[0] == "ctranslate2"
    engine, said = taken(copied, dtype="float32")
    assert (engine, "are int8, not float32" in said) == ("transformers", True)
    exact, _ = load_for_ctranslate2(str(copied), device="cpu", dtype="float32")  # converted in passing
    rounded = CTranslate2Model(copied / EXPORT_FOLDER, device="cpu", compute_type="float32")
    ids = torch.tensor([[5, 6, 7, 2]])
    losses = [model.sum_losses(ids, torch.ones_like(ids), ids) for model in (exact, rounded)]
    ours: Any = VanillaTransformerForConditionalGeneration.from_pretrained(copied)
    assert losses[0] == pytest.approx(4 * float(ours(input_ids=ids, labels=ids).loss.detach()), rel=1e-5)
    assert losses[0] != pytest.approx(losses[1], rel=1e-5)


def test_integers_are_ctranslate2s_with_an_export_or_without(saved: Path, tmp_path: Path, taken: Any) -> None:
    save(tmp_path / "model")
    for folder in (saved, tmp_path / "model"):
        for dtype in ("int8", "int8_float32"):
            engine, said = taken(folder, dtype=dtype)
            assert (engine, f"--dtype is {dtype}" in said) == ("ctranslate2", True)
            model, *_ = EngineArguments(str(folder), dtype=dtype, device="cpu").load()
            assert model.dtype == "int8_float32"
    refused = EngineArguments(str(saved), dtype="int8", engine="transformers")
    with pytest.raises(ValueError, match="not compute in int8, and --engine is transformers: leave out --dtype int8"):
        refused.load()
    refused.needs_torch, refused.engine = "--glossary needs torch", "auto"
    with pytest.raises(ValueError, match="not compute in int8, and --glossary needs torch: leave out --dtype int8"):
        refused.load()


def test_a_device_that_was_named_is_taken_or_refused(saved: Path, tmp_path: Path) -> None:
    save(tmp_path / "model")
    for folder in (saved, tmp_path / "model"):
        with pytest.raises(ValueError, match="cannot be loaded on mps"):
            EngineArguments(str(folder), engine="ctranslate2", device="mps").load()


def test_exported_folders_have_their_own_engine(saved: Path, taken: Any) -> None:
    engine, said = taken(saved / EXPORT_FOLDER)
    assert (engine, "it was exported to CTranslate2" in said) == ("ctranslate2", True)


@pytest.mark.parametrize("engine", ["auto", "transformers"])
def test_a_folder_has_no_revision(saved: Path, engine: Any) -> None:
    for names in (str(saved), str(saved / EXPORT_FOLDER), [str(saved), str(saved)]):
        with pytest.raises(ValueError, match="--revision v1 is for models on the Hub"):
            EngineArguments(names, engine=engine, revision="v1").load()  # type: ignore[arg-type]


def test_several_models_are_torchs(saved: Path) -> None:
    names: Any = [str(saved), str(saved)]
    arguments = EngineArguments(names, device="cpu")
    assert not isinstance(arguments.load()[0], CTranslate2Model)
    assert arguments.engine == "transformers"
    with pytest.raises(ValueError, match="exported to CTranslate2, and only torch takes several models"):
        EngineArguments([*names, str(saved / EXPORT_FOLDER)]).load()  # type: ignore[arg-type]


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_reason_against("cpu", "auto") is None
    monkeypatch.setattr(ctranslate2, "get_cuda_device_count", lambda: 0)
    assert find_reason_against("cuda:0", "auto") == "CTranslate2 cannot use cuda here"
    assert find_reason_against("mps", "auto") == "CTranslate2 cannot use mps here"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert find_reason_against("auto", "auto") == "CTranslate2 cannot use cuda here"
    monkeypatch.setattr(ctranslate2, "get_cuda_device_count", lambda: 1)
    types = {"cuda": {"float16"}, "cpu": {"int8"}}
    monkeypatch.setattr(ctranslate2, "get_supported_compute_types", types.__getitem__)
    assert find_reason_against("auto", "float16") is find_reason_against("cuda:0", "float16") is None
    for device in ("auto", "cpu"):
        assert find_reason_against(device, "bfloat16") == "CTranslate2 cannot compute in bfloat16 here"
    assert find_reason_against("cpu", "float16") == "CTranslate2 cannot compute in float16 here"


def test_the_export_command_writes_it_where_it_is_found(
    main: Any, tmp_path: Path, taken: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    save(folder)
    words = ["--model_name_or_path", folder, "--format", "ctranslate2"]
    main("export_model")(*words)
    assert taken(folder)[0] == "ctranslate2"

    def refuse(*arguments: Any) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit):
            main("export_model")(*arguments)
        return capsys.readouterr().err

    assert f"{folder / EXPORT_FOLDER} is a folder that is not empty" in refuse(*words)
    assert "--format onnx needs --output_dir" in refuse(*words[:3], "onnx")
    assert "user/model is on the Hub" in refuse("--model_name_or_path", "user/model", *words[2:])
