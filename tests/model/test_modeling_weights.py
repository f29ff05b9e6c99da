"""How the model's weights are initialised, tied, resized, saved and loaded."""

from __future__ import annotations

import copy
import io
import math
import pickle
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_transformer import position_encoding
from safetensors.torch import load_file, save_file
from test_single_stack import check_ties
from test_single_stack import tables_of as tables_of_stack
from tiny_single_stacks import SINGLE_STACKS, main_output, make_single_stack, run
from tiny_vanilla import (
    ALL_SHARING,
    INPUTS,
    SHARING,
    TWO_VOCABULARIES,
    assert_close,
    logits_of,
    make_config,
    make_model,
)
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.initialization import no_init_weights

from vanilla_transformer import VanillaTransformerForConditionalGeneration

Model = VanillaTransformerForConditionalGeneration


def tables_of(model: Model) -> dict[str, Any]:
    stacks = {"source": model.get_encoder(), "target": model.get_decoder()}
    return {**{name: stack.embed_tokens.weight for name, stack in stacks.items()}, "output": model.lm_head.weight}


def tied_groups(model: Model) -> list[set[str]]:
    groups: dict[int, set[str]] = {}
    for name, weight in tables_of(model).items():
        groups.setdefault(id(weight), set()).add(name)
    return list(groups.values())


def expected_groups(changes: dict[str, Any]) -> list[set[str]]:
    shared, tied = changes["share_encoder_decoder_embeddings"], changes["tie_word_embeddings"]
    if shared:
        return [{"source", "target", "output"}] if tied else [{"source", "target"}, {"output"}]
    return [{"source"}, {"target", "output"}] if tied else [{"source"}, {"target"}, {"output"}]


@pytest.mark.parametrize("sharing", ALL_SHARING)
@pytest.mark.parametrize("name", ["encoder-decoder", *SINGLE_STACKS])
def test_saving_and_loading(name: str, sharing: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"lm_head_bias": True, "position_embedding_type": "learned", **ALL_SHARING[sharing]}
    is_single = name in SINGLE_STACKS
    model: Any = make_single_stack(name, **changes) if is_single else make_model(**changes)
    auto_class = SINGLE_STACKS.get(name, AutoModelForSeq2SeqLM)
    model.save_pretrained(tmp_path / "first")
    loaded, info = auto_class.from_pretrained(tmp_path / "first", output_loading_info=True)
    assert type(loaded) is type(model)
    assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    loaded.save_pretrained(tmp_path / "second")
    files = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "second").iterdir())
    assert [file for file in files if Path(file).suffix not in (".json", ".py")] == ["model.safetensors"]
    for file in files:
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes(), file
    stored, parameters = load_file(tmp_path / "first" / "model.safetensors"), dict(model.named_parameters())
    assert sum(tensor.numel() for tensor in stored.values()) == sum(p.numel() for p in parameters.values())
    assert len(stored) == len(parameters)
    for each in (model, loaded):
        if is_single:
            check_ties(each)
        else:
            assert tied_groups(each) == expected_groups(ALL_SHARING[sharing])
    inputs = {"input_ids": INPUTS["input_ids"]} if is_single else INPUTS
    assert torch.equal(main_output(run(loaded, **inputs)), main_output(run(model, **inputs)))


@pytest.mark.parametrize("kind", ["sinusoidal", "learned"])
def test_copies(kind: str) -> None:
    model = make_model(position_embedding_type=kind)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    restored = make_model(position_embedding_type=kind, seed=5)
    restored.load_state_dict(torch.load(buffer, weights_only=True))
    expected = logits_of(model, **INPUTS)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), restored):
        torch.testing.assert_close(logits_of(other, **INPUTS), expected, atol=0.0, rtol=0.0)
        assert tied_groups(other) == [{"source", "target", "output"}]
        with torch.no_grad():
            other.lm_head.weight.zero_()
    torch.testing.assert_close(logits_of(model, **INPUTS), expected, atol=0.0, rtol=0.0)


RESIZABLE = {**ALL_SHARING, "shared-and-stated": {**SHARING["shared-tied"], "decoder_vocab_size": 17}}
NUMBERS = st.tuples(
    st.sampled_from(["source", "target"]),
    st.integers(min_value=4, max_value=30),
    st.sampled_from([None, 4, 8]),
    st.booleans(),
)


def copy_tables(model: Any) -> dict[str, torch.Tensor]:
    layer = model.get_output_embeddings()
    tables: dict[str, Any] = tables_of(model) if isinstance(model, Model) else tables_of_stack(model)
    tables["bias"] = None if layer is None else layer.bias
    return {name: table.detach().clone() for name, table in tables.items() if table is not None}


@settings(max_examples=30)
@given(
    name=st.sampled_from([*["encoder-decoder"] * len(SINGLE_STACKS), *SINGLE_STACKS]),
    sharing=st.sampled_from(sorted(RESIZABLE)),
    lm_head_bias=st.booleans(),
    resizes=st.lists(NUMBERS, min_size=1, max_size=3),
)
def test_resizing(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    sharing: str,
    lm_head_bias: bool,
    resizes: list[tuple[str, int, int | None, bool]],
) -> None:
    """Up and down, in any order: sizes, old rows, ties and configuration stay in step; the result works and saves."""
    is_single = name in SINGLE_STACKS
    two_vocabularies = sharing in TWO_VOCABULARIES and not is_single
    changes = {**RESIZABLE[sharing], "lm_head_bias": lm_head_bias}
    model: Any = make_single_stack(name, **changes) if is_single else make_model(**changes)
    for side, size, multiple, mean_resizing in resizes:
        before = copy_tables(model)
        arguments: dict[str, Any] = {"pad_to_multiple_of": multiple, "mean_resizing": mean_resizing}
        arguments["new_num_tokens"] = size
        rounded = size if multiple is None else math.ceil(size / multiple) * multiple
        if side == "source" or is_single:
            returned = model.resize_token_embeddings(**arguments)
            resized = {"source"} if two_vocabularies else set(before)
            assert returned is model.get_input_embeddings()
        elif two_vocabularies:
            returned = model.resize_decoder_token_embeddings(**arguments)
            resized = set(before) - {"source"}
            assert returned is model.get_decoder().get_input_embeddings()
        else:
            with pytest.raises(ValueError, match=r"one vocabulary.*use resize_token_embeddings"):
                model.resize_decoder_token_embeddings(**arguments)
            resized = set()
        for key, table in copy_tables(model).items():
            kept = min(len(before[key]), len(table))
            assert len(table) == (rounded if key in resized else len(before[key])), key
            torch.testing.assert_close(table[:kept], before[key][:kept], atol=0.0, rtol=0.0)
        if is_single:
            check_ties(model)
            assert model.config.vocab_size == model.config.target_vocab_size == rounded
            run(model, input_ids=torch.tensor([[4 % rounded, rounded - 1]]))
        else:
            assert tied_groups(model) == expected_groups(changes)
    if not is_single:
        check_sizes_agree(model)
        check_usable(model, tmp_path_factory.mktemp("resized"))


def check_sizes_agree(model: Model) -> None:
    config = model.config
    assert model.get_encoder().embed_tokens.num_embeddings == len(model.get_input_embeddings().weight)
    assert model.get_encoder().embed_tokens.num_embeddings == config.vocab_size
    assert model.get_decoder().embed_tokens.num_embeddings == config.target_vocab_size
    assert model.lm_head.out_features == len(model.lm_head.weight) == config.target_vocab_size
    for embeddings in (model.get_encoder().embed_tokens, model.get_decoder().embed_tokens):
        assert embeddings.padding_idx == config.pad_token_id
    assert all(parameter.requires_grad for parameter in model.parameters())


def check_usable(model: Model, folder: Path) -> None:
    inputs = {
        "input_ids": torch.tensor([[4 % model.config.vocab_size, model.config.vocab_size - 1]]),
        "decoder_input_ids": torch.tensor([[0, model.config.target_vocab_size - 1]]),
    }
    logits = logits_of(model, **inputs)
    assert logits.shape == (1, 2, model.config.target_vocab_size)
    model(input_ids=inputs["input_ids"], labels=inputs["decoder_input_ids"]).loss.backward()
    model.save_pretrained(folder)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(folder)
    torch.testing.assert_close(logits_of(loaded, **inputs), logits, atol=0.0, rtol=0.0)


def test_rounding_up_without_a_new_size() -> None:
    model = make_model()
    model.resize_token_embeddings(pad_to_multiple_of=8)
    assert model.config.vocab_size == model.lm_head.out_features == 24
    check_sizes_agree(model)


def check_initial_values(model: Model) -> None:
    """Xavier's bounds, d_model^-0.5, a padding row of zeros, norms of one and zero, and the sinusoids' formula."""
    config = model.config
    std = config.d_model**-0.5
    for name, module in model.named_modules():
        if isinstance(module, nn.LayerNorm):
            assert (module.weight == 1).all(), name
            assert (module.bias == 0).all(), name
        elif isinstance(module, nn.Embedding) or module is model.lm_head:
            rows = cast(torch.Tensor, module.weight).detach()
            if module.__dict__.get("padding_idx") is not None or (
                module is model.lm_head and config.tie_word_embeddings
            ):
                assert (rows[config.pad_token_id] == 0).all(), name
                rows = torch.cat([rows[: config.pad_token_id], rows[config.pad_token_id + 1 :]])
            assert float(rows.std()) == pytest.approx(std, rel=0.06), name
            assert float(rows.mean()) == pytest.approx(0.0, abs=0.06 * std), name
        elif isinstance(module, nn.Linear):
            bound = config.initializer_gain * math.sqrt(6 / (module.in_features + module.out_features))
            assert 0.95 * bound < float(module.weight.detach().abs().max()) <= bound, name
            assert float(module.weight.detach().std()) == pytest.approx(bound / math.sqrt(3), rel=0.06), name
        if isinstance(module, nn.Linear) and module.bias is not None:
            assert (module.bias == 0).all(), name
    if config.position_embedding_type == "sinusoidal":
        for stack in (model.get_encoder(), model.get_decoder()):
            table = stack.embed_positions.weight
            for position in (0, 1, 7, len(table) - 1):
                expected = position_encoding("sinusoidal", position, config.d_model)
                assert table[position].tolist() == pytest.approx(expected.tolist(), abs=1e-6)


WIDE: dict[str, Any] = {"vocab_size": 200, "d_model": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 96}
WIDE |= {"max_position_embeddings": 100}
WIDE |= dict.fromkeys(("attention_bias", "lm_head_bias", "normalize_embedding", "normalize_before"), True)


@pytest.mark.parametrize("kind", ["sinusoidal", "learned"])
@pytest.mark.parametrize(("sharing", "gain"), [("shared-tied", 1), ("separate-untied", 0.5)])
def test_initial_values(sharing: str, gain: float, kind: str) -> None:
    """The same distribution whether built here, by AutoModel, or on the meta device as `from_pretrained` does."""
    config = make_config(position_embedding_type=kind, initializer_gain=gain, **WIDE, **SHARING[sharing])
    check_initial_values(Model(copy.deepcopy(config)))
    check_initial_values(AutoModelForSeq2SeqLM.from_config(copy.deepcopy(config)))
    # With an empty state dict everything is missing, and nothing but `_init_weights` gives the meta tensors a value.
    check_initial_values(Model.from_pretrained(None, config=copy.deepcopy(config), state_dict={}))


def test_missing_weights_get_initial_values(tmp_path: Path) -> None:
    """What a checkpoint may lack is initialised, what it has is kept: its padding row and its other tables too."""
    config = make_config(**WIDE, **SHARING["separate-untied"])
    model = Model(config)
    with torch.no_grad():
        model.model.decoder.embed_tokens.weight.fill_(5.0)
        model.model.decoder.layers[0].fc1.weight.fill_(6.0)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    encoder = "model.encoder"
    dropped = {f"{encoder}.embed_tokens.weight", f"{encoder}.layers.0.fc1.weight", "lm_head.weight", "lm_head.bias"}
    kept = {name: tensor for name, tensor in weights.items() if name not in dropped}
    save_file(kept, path, metadata={"format": "pt"})
    anew = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    loaded, info = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, **anew)
    assert set(info["missing_keys"]) == dropped
    assert (loaded.model.decoder.embed_tokens.weight == 5.0).all()
    assert (loaded.model.decoder.layers[0].fc1.weight == 6.0).all()
    with torch.no_grad():
        loaded.model.decoder.embed_tokens.weight.copy_(loaded.model.encoder.embed_tokens.weight)
        nn.init.xavier_uniform_(loaded.model.decoder.layers[0].fc1.weight)
    check_initial_values(loaded)


@pytest.mark.parametrize("way", ["no_init_weights", "meta"])
@pytest.mark.parametrize("kind", ["sinusoidal", "sinusoidal_concatenated", "sinusoidal_tensor2tensor"])
def test_sinusoids_are_there_without_initialisation(kind: str, way: str) -> None:
    """No file has them, so that neither a skipped initialisation nor `to_empty` may leave them unset."""
    trained = make_model(position_embedding_type=kind)
    if way == "meta":
        with torch.device("meta"):
            model = VanillaTransformerForConditionalGeneration(make_config(position_embedding_type=kind))
        model.to_empty(device="cpu")
        for name, buffer in model.named_buffers():
            assert buffer.isfinite().all(), name
    else:
        with no_init_weights():
            model = VanillaTransformerForConditionalGeneration(make_config(position_embedding_type=kind))
    model.load_state_dict(trained.state_dict())
    assert logits_of(model.eval(), **INPUTS).equal(logits_of(trained, **INPUTS))


@pytest.mark.parametrize("sharing", ALL_SHARING)
def test_only_tied_weights_are_listed_as_tied(sharing: str) -> None:
    model = make_model(**ALL_SHARING[sharing])
    parameters = dict(model.named_parameters(remove_duplicate=False))
    assert model._tied_weights_keys is not None
    for target, source in model._tied_weights_keys.items():
        assert parameters[target] is parameters[source]
    assert ("lm_head.weight" in model._tied_weights_keys) == model.config.tie_word_embeddings


@pytest.mark.parametrize("position_embedding_type", ["sinusoidal", "learned"])
@pytest.mark.parametrize("single_stack", [False, True])
def test_position_tables_are_resized(position_embedding_type: str, single_stack: bool, tmp_path: Path) -> None:
    """The library's run_summarization.py does so where a source may be longer than the table."""
    model: Any = make_model(position_embedding_type=position_embedding_type, position_offset=2)
    inputs = {key: value for key, value in INPUTS.items() if not single_stack or key == "input_ids"}
    if single_stack:
        model.save_pretrained(tmp_path / "whole")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    expected = logits_of(model, **inputs)
    for rows in (40, 9):
        model.resize_position_embeddings(rows)
        assert model.config.max_position_embeddings == rows
        assert_close(logits_of(model, **inputs), expected)
        model.save_pretrained(tmp_path / str(rows))
        again = type(model).from_pretrained(tmp_path / str(rows))
        assert_close(logits_of(again, **inputs), expected)
        tables = [module.weight for name, module in model.named_modules() if name.endswith("embed_positions")]
        assert len(tables) == (1 if single_stack else 2)
        assert all(table.shape == (rows, 16) for table in tables)
    with pytest.raises(ValueError, match=r"at least 3 \(position_offset=2\), not 2"):
        model.resize_position_embeddings(2)
