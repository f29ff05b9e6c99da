"""Quantized loading by torchao and bitsandbytes, and the script that shows what it costs and saves."""

import importlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from letters import TEXTS, TOKENIZER, logits_of, make_letters_model, train_on_letters, translate
from peft import LoraConfig, TaskType, get_peft_model
from tiny_vanilla import SHARING, make_model
from torch import nn
from transformers import AutoModelForSeq2SeqLM, BitsAndBytesConfig, TorchAoConfig, pipelines

torchao = pytest.importorskip("torchao.quantization", reason="torchao is not here: scripts/test --quantization has it")

SCHEMES: dict[str, Callable[[], Any]] = {
    "int8 weights": torchao.Int8WeightOnlyConfig,
    "int8 weights and activations": torchao.Int8DynamicActivationInt8WeightConfig,
    "float8 weights": torchao.Float8WeightOnlyConfig,
}


def save_letters_model(path: Path, **changes: Any) -> Path:
    model = make_letters_model(**changes)
    train_on_letters(model, path / "training")
    assert TOKENIZER.batch_decode(translate(model), skip_special_tokens=True) == TEXTS
    model.save_pretrained(path / "model")
    TOKENIZER.save_pretrained(path / "model")
    return path / "model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_letters_model(tmp_path_factory.mktemp("letters"))


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One as wide as a block of bitsandbytes' four-bit weights, which some CPUs do not split."""
    return save_letters_model(tmp_path_factory.mktemp("wide"), d_model=64, encoder_ffn_dim=64, decoder_ffn_dim=64)


def load(folder: Path, **settings: Any) -> Any:
    return AutoModelForSeq2SeqLM.from_pretrained(folder, **settings)


def quantized_layers(model: nn.Module) -> set[str]:
    """The last names of the linear layers whose weights are not plain tensors of floats."""
    return {
        name.rsplit(".", 1)[-1]
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
        and (type(layer.weight) is not nn.Parameter or not layer.weight.is_floating_point())
    }


def check_ties(model: Any) -> None:
    assert model.lm_head.weight is model.model.decoder.embed_tokens.weight
    assert model.model.encoder.embed_tokens.weight is model.model.decoder.embed_tokens.weight


def similarity(one: torch.Tensor, other: torch.Tensor) -> float:
    return nn.functional.cosine_similarity(one.float().flatten(), other.float().flatten(), dim=0).item()


EVERY_LAYER = {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_torchao_quantizes_on_loading(scheme: str, dtype: torch.dtype, folder: Path, tmp_path: Path) -> None:
    """The same translations from all but the same logits; saved as safetensors, and the very same when loaded again."""
    plain = load(folder)
    model = load(folder, dtype=dtype, quantization_config=TorchAoConfig(SCHEMES[scheme]()))
    assert quantized_layers(model) == EVERY_LAYER
    check_ties(model)
    assert similarity(logits_of(model), logits_of(plain)) > 0.99
    for num_beams in (1, 3):
        assert translate(model, num_beams) == translate(plain, num_beams)

    model.save_pretrained(tmp_path)
    files = {path.name for path in tmp_path.iterdir() if path.suffix not in (".json", ".py")}
    assert files == {"model.safetensors"}
    assert (tmp_path / "model.safetensors").stat().st_size < 0.7 * (folder / "model.safetensors").stat().st_size
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_method"] == "torchao"
    again = load(tmp_path)
    check_ties(again)
    assert quantized_layers(again) == EVERY_LAYER
    assert torch.equal(logits_of(again), logits_of(model))


@pytest.mark.parametrize("sharing", SHARING)
def test_torchao_leaves_embeddings_and_the_output_layer_alone(sharing: str, tmp_path: Path) -> None:
    plain = make_model(**SHARING[sharing])
    plain.save_pretrained(tmp_path)
    model = load(tmp_path, quantization_config=TorchAoConfig(torchao.Int8WeightOnlyConfig()))
    assert quantized_layers(model) == EVERY_LAYER
    for name, tensor in plain.state_dict().items():
        if "embed" in name or name.startswith(("model.shared", "lm_head")):
            assert torch.equal(model.state_dict()[name], tensor), name
    tied = SHARING[sharing]["tie_word_embeddings"]
    assert (model.lm_head.weight is model.model.decoder.embed_tokens.weight) == tied


def test_a_quantized_model_translates_in_a_pipeline(folder: Path) -> None:
    model = load(folder, quantization_config=TorchAoConfig(torchao.Int8WeightOnlyConfig()))
    translator: Any = pipelines.pipeline("translation", model=model, tokenizer=TOKENIZER)  # type: ignore[call-overload]
    expected = TOKENIZER.batch_decode(translate(load(folder)), skip_special_tokens=True)
    assert [result["translation_text"] for result in translator(TEXTS)] == expected


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")
def test_an_adapter_trains_on_quantized_weights(folder: Path, tmp_path: Path) -> None:
    base = load(folder, quantization_config=TorchAoConfig(torchao.Int8WeightOnlyConfig()))
    config = LoraConfig(task_type=TaskType.SEQ_2_SEQ_LM, r=8, lora_alpha=32, target_modules=["q_proj", "v_proj"])
    losses = train_on_letters(get_peft_model(base, config), tmp_path, reverse=True, steps=100)
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes, which nothing here needs, is not installed"
)
@pytest.mark.parametrize("bits", [8, 4])
def test_bitsandbytes_quantizes_on_loading(bits: int, wide_folder: Path, tmp_path: Path) -> None:
    kind: dict[str, Any] = {"load_in_8bit": True} if bits == 8 else {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    plain = load(wide_folder)
    model = load(wide_folder, quantization_config=BitsAndBytesConfig(**kind))
    # Saved before it is used: on some CPUs its first call packs four-bit weights in a way that files do not hold.
    model.save_pretrained(tmp_path)
    assert quantized_layers(model) == EVERY_LAYER
    check_ties(model)
    assert similarity(logits_of(model), logits_of(plain)) > 0.98
    assert translate(model) == translate(plain)
    assert {path.name for path in tmp_path.iterdir() if path.suffix not in (".json", ".py")} == {"model.safetensors"}
    again = load(tmp_path)
    check_ties(again)
    assert torch.equal(logits_of(again), logits_of(model))


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, scripts_directory: Path) -> Any:
    monkeypatch.syspath_prepend(str(scripts_directory))
    return importlib.import_module("check_quantization")


def test_the_script_sets_the_schemes_side_by_side(folder: Path, script: Any, tmp_path: Path, capsys: Any) -> None:
    pairs, rows_file = tmp_path / "pairs.tsv", tmp_path / "rows.json"
    pairs.write_text("".join(f"{text}\t{text}\n" for text in TEXTS))
    words = ["--model_name_or_path", folder, "--test_file", pairs, "--device", "cpu", "--output_file", rows_file]
    script.main([*map(str, words), "--schemes", "torchao-int8", "torchao-float8-dynamic", "bnb-nf4"])
    plain, quantized, float8, four_bits = json.loads(rows_file.read_text())
    assert (plain["scheme"], quantized["scheme"]) == ("float32", "torchao-int8")
    assert plain["megabytes"] == (folder / "model.safetensors").stat().st_size / 1e6
    assert 0 < quantized["megabytes"] < 0.7 * plain["megabytes"]
    for row in (plain, quantized):
        assert row["exact_match"] == row["same"] == 100
        assert row["tokens_per_second"] > 0
    assert "CUDA" in float8["obstacle"]
    table = capsys.readouterr().out
    assert f"not here: {float8['obstacle']}" in table
    if importlib.util.find_spec("bitsandbytes") is None:
        assert four_bits["obstacle"] == "bitsandbytes is not installed"
    assert table.count("\n") == 2 + 4


def test_the_script_says_what_is_wrong_before_it_loads_anything(script: Any, capsys: Any) -> None:
    for words, message in (
        (["--schemes", "int3"], "--schemes: int3 is none of bfloat16, torchao-int8"),
        (["--max_samples", "0"], "--max_samples is 0"),
        (["--test_file", "nowhere.tsv"], "nowhere.tsv"),
    ):
        with pytest.raises(SystemExit):
            script.main(["--model_name_or_path", "nowhere", *words])
        assert message in capsys.readouterr().err
