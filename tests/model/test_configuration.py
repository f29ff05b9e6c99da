"""The configuration: defaults, presets against Table 3, refusal of illegal values, and survival of a round trip."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from vanilla_transformer import PRESETS, VanillaTransformerConfig, VanillaTransformerForConditionalGeneration

# The library's strict dataclasses wrap a ValueError in an exception of their own.
REFUSED = (ValueError, StrictDataclassError)

DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(["encoder_layers", "decoder_layers"], 6),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 8),
    **dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim"], 2048),
    **dict.fromkeys(["decoder_vocab_size", "d_k", "d_v", "add_final_layer_norm"]),
    **dict.fromkeys(["attention_dropout", "activation_dropout", "label_smoothing"], 0.0),
    **dict.fromkeys(["ffn_bias", "scale_embedding", "share_encoder_decoder_embeddings", "tie_word_embeddings"], True),
    **dict.fromkeys(["attention_bias", "lm_head_bias", "normalize_before", "normalize_embedding"], False),
}
DEFAULTS |= {"vocab_size": 37000, "d_model": 512, "dropout": 0.1, "activation_function": "relu", "layer_norm_eps": 1e-5}
DEFAULTS |= {"initializer_gain": 1.0}
DEFAULTS |= {"is_encoder_decoder": True, "is_decoder": False, "use_cache": True}
DEFAULTS |= {"position_embedding_type": "sinusoidal", "position_offset": 0, "max_position_embeddings": 1024}
DEFAULTS |= {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}

# Table 3: what a row changes of "base" (layers, width, inner width, heads, d_k, d_v, dropout, label smoothing).
BASE = {"N": 6, "d_model": 512, "d_ff": 2048, "h": 8, "d_k": 64, "d_v": 64, "dropout": 0.1, "smoothing": 0.1}
TABLE_3: dict[str, dict[str, Any]] = {
    "base": {},
    "A-h1": {"h": 1, "d_k": 512, "d_v": 512},
    "A-h4": {"h": 4, "d_k": 128, "d_v": 128},
    "A-h16": {"h": 16, "d_k": 32, "d_v": 32},
    "A-h32": {"h": 32, "d_k": 16, "d_v": 16},
    "B-dk16": {"d_k": 16},
    "B-dk32": {"d_k": 32},
    "C-N2": {"N": 2},
    "C-N4": {"N": 4},
    "C-N8": {"N": 8},
    "C-d256": {"d_model": 256, "d_k": 32, "d_v": 32},
    "C-d1024": {"d_model": 1024, "d_k": 128, "d_v": 128},
    "C-ff1024": {"d_ff": 1024},
    "C-ff4096": {"d_ff": 4096},
    "D-drop0": {"dropout": 0.0},
    "D-drop0.2": {"dropout": 0.2},
    "D-ls0": {"smoothing": 0.0},
    "D-ls0.2": {"smoothing": 0.2},
    "E-learned": {},
    "big": {"d_model": 1024, "d_ff": 4096, "h": 16, "dropout": 0.3},
}
# The table's last column: millions of parameters.
MILLIONS = {"base": 65, "B-dk16": 58, "B-dk32": 60, "C-N2": 36, "C-N4": 50, "C-N8": 80}
MILLIONS |= {"C-d256": 28, "C-d1024": 168, "C-ff1024": 53, "C-ff4096": 90, "big": 213}


def test_defaults_and_their_documentation() -> None:
    config, documented = VanillaTransformerConfig(), VanillaTransformerConfig.__doc__ or ""
    for field, value in DEFAULTS.items():
        assert (field, getattr(config, field), type(getattr(config, field))) == (field, value, type(value))
        assert field in documented or field == "use_cache"


def test_presets_are_the_documented_ones() -> None:
    assert set(PRESETS) == set(TABLE_3) | {"tiny", "small", "iwslt", "student"}


@pytest.mark.parametrize("name", sorted(TABLE_3))
def test_preset_is_its_row_of_table_3(name: str) -> None:
    row = BASE | TABLE_3[name]
    config = VanillaTransformerConfig.from_preset(name)
    for stack in ("encoder", "decoder"):
        layers, width, heads = (getattr(config, f"{stack}_{size}") for size in ("layers", "ffn_dim", "attention_heads"))
        sizes = {"N": layers, "d_model": config.d_model, "d_ff": width, "h": heads}
        sizes |= {"d_k": config.d_k or config.d_model // heads, "d_v": config.d_v or config.d_model // heads}
        assert {**sizes, "dropout": config.dropout, "smoothing": config.label_smoothing} == row
    assert config.position_embedding_type == ("learned" if name == "E-learned" else "sinusoidal")
    of_the_table = {"d_model", "d_k", "d_v", "dropout", "label_smoothing", "position_embedding_type"}
    others = [field for field in DEFAULTS if not field.endswith(("coder_layers", "heads", "ffn_dim"))]
    for field in set(others) - of_the_table:
        assert getattr(config, field) == DEFAULTS[field], field


def expected_parameters(vocab_size: int, row: dict[str, Any]) -> int:
    """Count by hand: one embedding matrix, projections without biases, feed-forward layers with, norms of 2 d_model."""
    d_model, d_ff, heads = row["d_model"], row["d_ff"], row["h"]
    attention = 2 * d_model * heads * row["d_k"] + 2 * d_model * heads * row["d_v"]
    feed_forward = (d_model * d_ff + d_ff) + (d_ff * d_model + d_model)
    norm = 2 * d_model
    encoder_layer = attention + feed_forward + 2 * norm
    decoder_layer = 2 * attention + feed_forward + 3 * norm
    layers = row["N"] * encoder_layer + row.get("decoder N", row["N"]) * decoder_layer
    return int(vocab_size * d_model + layers)


def count_parameters(config: VanillaTransformerConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in VanillaTransformerForConditionalGeneration(config).parameters())


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_parameter_count_of_preset(name: str) -> None:
    config = VanillaTransformerConfig.from_preset(name)
    width = config.d_model // config.encoder_attention_heads
    own = {"N": config.encoder_layers, "d_model": config.d_model, "d_ff": config.encoder_ffn_dim}
    own |= {"h": config.encoder_attention_heads, "d_k": width, "d_v": width, "decoder N": config.decoder_layers}
    assert config.encoder_layers == config.decoder_layers or name == "student"
    row = BASE | TABLE_3[name] if name in TABLE_3 else own
    # Row E learns one table for each stack.
    positions = 2 * config.max_position_embeddings * config.d_model if name == "E-learned" else 0
    assert count_parameters(config) == expected_parameters(config.vocab_size, row) + positions


@pytest.mark.parametrize(("name", "millions"), MILLIONS.items())
def test_parameter_count_of_table_3(name: str, millions: int) -> None:
    """The paper does not state its vocabulary: 41,100 tokens give every row but "big", which 37,000 nearly give."""
    if name == "big":
        assert count_parameters(VanillaTransformerConfig.from_preset(name)) == pytest.approx(millions * 1e6, abs=1.5e6)
    else:
        assert round(count_parameters(VanillaTransformerConfig.from_preset(name, vocab_size=41100)) / 1e6) == millions


def test_preset_overrides() -> None:
    before = json.dumps(PRESETS)
    config = VanillaTransformerConfig.from_preset("big", vocab_size=32000, dropout=0.2, normalize_before=True)
    assert (config.vocab_size, config.dropout, config.normalize_before) == (32000, 0.2, True)
    assert (config.d_model, config.encoder_attention_heads, config.label_smoothing) == (1024, 16, 0.1)
    assert json.dumps(PRESETS) == before


@pytest.mark.parametrize("name", ["Base", "bas", "", "base "])
def test_unknown_preset_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=repr(name)) as error:
        VanillaTransformerConfig.from_preset(name)
    assert all(legal in str(error.value) for legal in PRESETS)


def test_unknown_override_is_refused() -> None:
    with pytest.raises(ValueError, match=r"droput") as error:
        VanillaTransformerConfig.from_preset("base", droput=0.1)
    assert all(field in str(error.value) for field in DEFAULTS)


ILLEGAL: list[tuple[dict[str, Any], list[str]]] = [
    # The fields, and what the message must name: the field, its value, what is legal.
    *(
        ({field: value}, [field, str(value), "[0, 1)"])
        for field in ("dropout", "attention_dropout", "activation_dropout", "label_smoothing")
        for value in (-0.1, 1.0, float("nan"))
    ),
    *(
        ({field: value}, [field, str(value), "at least 1"])
        for field in (
            *("vocab_size", "decoder_vocab_size", "d_model", "d_k", "d_v", "max_position_embeddings"),
            *(f"{side}_{size}" for side in ("encoder", "decoder") for size in ("layers", "attention_heads", "ffn_dim")),
        )
        for value in (0, -4)
    ),
    ({"position_offset": -1}, ["position_offset", "-1", "at least 0"]),
    ({"layer_norm_eps": -1e-6}, ["layer_norm_eps", "-1e-06", "positive"]),
    ({"initializer_gain": 0}, ["initializer_gain", "0", "positive"]),
    ({"activation_function": "rleu"}, ["activation_function", "'rleu'", "relu", "gelu", "silu"]),
    (
        {"position_embedding_type": "rotary"},
        ["position_embedding_type", "'rotary'", "sinusoidal_concatenated", "sinusoidal_tensor2tensor", "learned"],
    ),
    ({"encoder_attention_heads": 7}, ["encoder_attention_heads", "7", "d_model", "512"]),
    ({"decoder_attention_heads": 7}, ["decoder_attention_heads", "7", "d_model", "512"]),
    ({"encoder_attention_heads": 7, "d_k": 64}, ["encoder_attention_heads", "7", "d_v"]),
    ({"encoder_attention_heads": 7, "d_v": 64}, ["encoder_attention_heads", "7", "d_k"]),
    *(
        ({"d_model": 9, "d_k": 4, "d_v": 4, "position_embedding_type": kind}, ["d_model", "9", "even", kind])
        for kind in ("sinusoidal", "sinusoidal_concatenated", "sinusoidal_tensor2tensor")
    ),
    (
        {"d_model": 2, "d_k": 4, "d_v": 4, "position_embedding_type": "sinusoidal_tensor2tensor"},
        ["d_model", "2", "sinusoidal_tensor2tensor", "4"],
    ),
    (
        {"position_embedding_type": "learned", "position_offset": 16, "max_position_embeddings": 16},
        ["position_offset", "16", "max_position_embeddings"],
    ),
    ({"decoder_vocab_size": 500}, ["share_encoder_decoder_embeddings", "37000", "500"]),
    *(
        ({"vocab_size": 20, field: value}, [field, str(value), "20"])
        for field in ("bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id")
        for value in (-1, 20)
    ),
    ({"vocab_size": 20, "eos_token_id": [2, 20]}, ["eos_token_id", "20"]),
    (
        {"vocab_size": 20, "decoder_vocab_size": 10, "share_encoder_decoder_embeddings": False, "eos_token_id": 15},
        ["eos_token_id", "15", "10"],
    ),
    ({"d_model": "512"}, ["d_model", "512", "int"]),
    ({"encoder_layers": 2.0}, ["encoder_layers", "2.0", "int"]),
    ({"normalize_before": "yes"}, ["normalize_before", "yes", "bool"]),
    ({"add_final_layer_norm": 1}, ["add_final_layer_norm", "1", "bool"]),
    ({"dropout": None}, ["dropout", "None", "float"]),
]


@pytest.mark.parametrize(
    ("values", "message"), ILLEGAL, ids=[",".join(f"{k}={v}" for k, v in values.items()) for values, _ in ILLEGAL]
)
def test_illegal_value_is_refused(values: dict[str, Any], message: list[str]) -> None:
    with pytest.raises(REFUSED) as error:
        VanillaTransformerConfig(**values)
    missing = [part for part in message if part not in str(error.value)]
    assert not missing, f"{missing} not in {error.value}"


@pytest.mark.parametrize(
    "values",
    [
        {"dropout": 0, "attention_dropout": 0.999},
        {"encoder_attention_heads": 7, "d_k": 64, "d_v": 32},
        {"d_model": 9, "d_k": 4, "d_v": 4, "position_embedding_type": "learned"},
        {"d_model": 2, "d_k": 1, "d_v": 1},
        {"decoder_vocab_size": 37000},
        {"decoder_vocab_size": 500, "share_encoder_decoder_embeddings": False},
        {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": True},
        {"share_encoder_decoder_embeddings": True, "tie_word_embeddings": False},
        {"position_offset": 5000},
        {"eos_token_id": [2, 3]},
        {"bos_token_id": None},
        {"activation_function": "gelu_new"},
    ],
    ids=str,
)
def test_unusual_but_legal_value_is_taken(values: dict[str, Any]) -> None:
    config = VanillaTransformerConfig(**values)
    assert {name: getattr(config, name) for name in values} == values


def test_illegal_assignment_is_refused_on_saving(tmp_path: Path) -> None:
    config = VanillaTransformerConfig()
    config.dropout = 7
    with pytest.raises(REFUSED, match="dropout"):
        config.save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()


@st.composite
def legal_configs(draw: st.DrawFn) -> VanillaTransformerConfig:
    size = st.integers(min_value=1, max_value=4096)
    probability = st.floats(min_value=0.0, max_value=1.0, exclude_max=True, allow_subnormal=False)
    heads = (draw(st.integers(1, 16)), draw(st.integers(1, 16)))
    vocab_size = draw(st.integers(min_value=5, max_value=60000))
    shared = draw(st.booleans())
    kind = draw(st.sampled_from(["learned", "sinusoidal", "sinusoidal_concatenated", "sinusoidal_tensor2tensor"]))
    max_position_embeddings = draw(size)
    values: dict[str, Any] = {
        "vocab_size": vocab_size,
        "decoder_vocab_size": draw(st.none() | (st.just(vocab_size) if shared else st.integers(5, 60000))),
        "share_encoder_decoder_embeddings": shared,
        "d_model": 2 * heads[0] * heads[1] * draw(st.integers(2, 8)),
        "encoder_attention_heads": heads[0],
        "decoder_attention_heads": heads[1],
        "d_k": draw(st.none() | size),
        "d_v": draw(st.none() | size),
        "activation_function": draw(st.sampled_from(["relu", "gelu", "silu", "gelu_new"])),
        "layer_norm_eps": draw(st.floats(min_value=1e-12, max_value=1e-1)),
        "initializer_gain": draw(st.floats(min_value=1e-3, max_value=2.0)),
        "position_embedding_type": kind,
        "max_position_embeddings": max_position_embeddings,
        "position_offset": draw(st.integers(0, max_position_embeddings - 1 if kind == "learned" else 5000)),
        "eos_token_id": draw(st.just(2) | st.just([2, 3])),
        "add_final_layer_norm": draw(st.none() | st.booleans()),
    }
    values |= {f"{stack}_{name}": draw(size) for stack in ("encoder", "decoder") for name in ("layers", "ffn_dim")}
    for name, default in DEFAULTS.items():
        if name not in values and isinstance(default, bool) and name != "is_encoder_decoder":
            values[name] = draw(st.booleans())
        elif name not in values and isinstance(default, float):
            values[name] = draw(probability)
    return VanillaTransformerConfig(**values)


@given(config=legal_configs())
def test_json_round_trip(config: VanillaTransformerConfig) -> None:
    for use_diff in (True, False):
        again = VanillaTransformerConfig.from_dict(json.loads(config.to_json_string(use_diff=use_diff)))
        assert {name: getattr(again, name) for name in DEFAULTS} == {name: getattr(config, name) for name in DEFAULTS}
        assert again.to_dict() == config.to_dict()


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_auto_config_round_trip(name: str, tmp_path: Path) -> None:
    config = VanillaTransformerConfig.from_preset(name)
    config.save_pretrained(tmp_path / "first")
    again = AutoConfig.from_pretrained(tmp_path / "first")
    assert type(again) is VanillaTransformerConfig
    assert {field: getattr(again, field) for field in DEFAULTS} == {field: getattr(config, field) for field in DEFAULTS}
    again.save_pretrained(tmp_path / "second")
    saved = [(tmp_path / folder / "config.json").read_bytes() for folder in ("first", "second")]
    assert saved[0] == saved[1]
    assert json.loads(saved[0])["model_type"] == "vanilla_transformer"


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("hidden_size", "d_model"),
        ("num_attention_heads", "encoder_attention_heads"),
        ("num_hidden_layers", "encoder_layers"),
    ],
)
def test_alias(alias: str, name: str, tmp_path: Path) -> None:
    values: dict[str, Any] = {alias: 16}
    for config in (
        VanillaTransformerConfig(**values),
        AutoConfig.for_model("vanilla_transformer", **values),
        VanillaTransformerConfig.from_preset("tiny", **values),
    ):
        assert getattr(config, alias) == getattr(config, name) == 16
    setattr(config, alias, 32)
    assert getattr(config, alias) == getattr(config, name) == config.to_dict()[name] == 32
    assert alias not in config.to_dict()
    config.save_pretrained(tmp_path)
    assert getattr(AutoConfig.from_pretrained(tmp_path, **values), name) == 16


def test_target_vocabulary() -> None:
    config = VanillaTransformerConfig(vocab_size=50)
    assert config.target_vocab_size == 50
    config.vocab_size = 60
    assert config.target_vocab_size == 60
    separate = VanillaTransformerConfig(vocab_size=50, decoder_vocab_size=40, share_encoder_decoder_embeddings=False)
    assert separate.target_vocab_size == 40
    # Beam search and the like ask for the decoder's side under the plain name.
    assert separate.get_text_config(decoder=True).vocab_size == 40
    assert VanillaTransformerConfig(vocab_size=50).get_text_config(decoder=True).vocab_size == 50


class TestFilesOfOthers:
    """A config.json holds what its writer liked: misspelt fields, other tools' fields, those of newer versions."""

    @pytest.fixture
    def load(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Callable[..., Any]:
        """Loads a file with these entries; the messages are in `caplog.messages`."""

        def load_file(**entries: Any) -> Any:
            VanillaTransformerConfig(d_model=64).save_pretrained(tmp_path)
            saved = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
            (tmp_path / "config.json").write_text(json.dumps({**saved, **entries}), encoding="utf-8")
            caplog.clear()
            return AutoConfig.from_pretrained(tmp_path)

        return load_file

    def test_misspelt_fields_are_named(self, load: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
        config = load(d_modle=3, encoder_layer=2, num_hidden_layer=4, note="mine")
        (message,) = caplog.messages
        for name, near in (("d_modle", "d_model"), ("encoder_layer", "encoder_layers")):
            assert f"{name} (did you mean {near}?)" in message
        assert "num_hidden_layer (did you mean num_hidden_layers?)" in message
        assert message.endswith(", note.")
        # Once per load: not when the configuration is copied, looked into, or saved.
        copy.deepcopy(config).get_text_config(decoder=True).to_json_string()
        assert len(caplog.messages) == 1
        caplog.clear()
        misspelt: dict[str, Any] = {"dropuot": 0.5}
        VanillaTransformerConfig(**misspelt)
        assert "dropuot (did you mean dropout?)" in caplog.text

    def test_what_the_library_writes_or_once_wrote_is_silent(self, load: Callable[..., Any], caplog: Any) -> None:
        nothing = ["_name_or_path", "_private", "dtype", "transformers_version", "transformers.js_config"]
        current: dict[str, Any] = {**dict.fromkeys(nothing), "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        current |= {"num_labels": 1, "architectures": ["Any"], "attn_implementation": "eager"}
        current |= {"output_attentions": False, "quantization_config": {"quant_method": "torchao"}}
        empty = "bad_words_ids cross_attention_hidden_size finetuning_task prefix sep_token_id task_specific_params"
        numbers = "chunk_size_feed_forward diversity_penalty encoder_no_repeat_ngram_size length_penalty max_length"
        flags = "add_cross_attention do_sample early_stopping is_decoder tf_legacy_loss torchscript use_bfloat16"
        older: dict[str, Any] = {**dict.fromkeys(empty.split()), **dict.fromkeys(numbers.split(), 0)}
        older |= {**dict.fromkeys(flags.split(), False), "forced_eos_token_id": 2, "num_beams": 4, "pruned_heads": {}}
        older["torch_dtype"] = "float32"
        for entries in (current, older, {"hidden_size": 32}):
            load(**entries)
            assert caplog.messages == []
        assert "config_version" not in load(config_version=2).to_dict()
        for name in PRESETS:
            VanillaTransformerConfig(**VanillaTransformerConfig.from_preset(name).to_dict())
        assert caplog.messages == []
