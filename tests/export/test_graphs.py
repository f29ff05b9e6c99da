"""torch.export of the whole model: one program for every batch and length, that needs nothing but torch."""

import copy
import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from remote_process import RemotePython
from tiny_vanilla import TWO_VOCABULARIES, assert_close, logits_of, make_model, make_sentences, pad

from vanilla_transformer.conversion.errors import ConversionError
from vanilla_transformer.export.graphs import ComputedSinusoids, DecoderGraph, copy_for_tracing, export_program
from vanilla_transformer.model.positions_vanilla_transformer import SINUSOIDS

# The position tables have 24 rows.
TENSOR2TENSOR = {**TWO_VOCABULARIES["two-vocabularies-tied"], "position_offset": 2, "lm_head_bias": True}
LEARNED = {"position_offset": 1, "normalize_before": True, "d_k": 3, "d_v": 5, "attention_bias": True}
MODELS: dict[str, dict[str, Any]] = {"sinusoidal_tensor2tensor": TENSOR2TENSOR, "learned": LEARNED}
LONGEST = {"learned": 23}
# In a process without the package, where others have perhaps imported transformers.
ALONE = """
import sys, torch

known = {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == "transformers"}
sys.modules["transformers"] = None
program = torch.export.load(folder + "/model.pt2").module()
torch.save([program(**each) for each in torch.load(folder + "/inputs.pt")], folder + "/logits.pt")
del sys.modules["transformers"]
sys.modules |= known
"""


def make_inputs(lengths: list[int], target_length: int, side: str = "right") -> dict[str, torch.Tensor]:
    input_ids, attention_mask = pad(make_sentences(lengths), side=side)
    targets = torch.tensor(make_sentences([target_length] * len(lengths), seed=1))
    return {"input_ids": input_ids, "attention_mask": attention_mask, "decoder_input_ids": targets}


@functools.cache
def make_program(positions: str) -> tuple[Any, Any]:
    model = make_model(decoder_layers=1, position_embedding_type=positions, **MODELS[positions])
    return model, export_program(model)


@pytest.mark.parametrize("positions", MODELS)
def test_one_program_does_for_every_batch_and_length(positions: str) -> None:
    model, exported = make_program(positions)
    program = exported.module()
    longest = LONGEST.get(positions, 70)
    sizes: list[Any] = [([1], 1), ([5, 3, 9], 7), ([4, 8], 2, "left"), ([longest, 6], longest)]
    for inputs in itertools.starmap(make_inputs, sizes):
        assert_close(program(**inputs), logits_of(model, **inputs))
    if positions in LONGEST:
        with pytest.raises(AssertionError, match=r"Guard failed: input_ids.*<= 23"):
            program(**make_inputs([24], 1))


def test_a_saved_program_needs_nothing_but_torch(tmp_path: Path, without_the_package: RemotePython) -> None:
    model, program = make_program("sinusoidal_tensor2tensor")
    inputs = [make_inputs([3], 2), make_inputs([5, 3, 9], 7)]
    torch.export.save(program, tmp_path / "model.pt2")
    torch.save(inputs, tmp_path / "inputs.pt")
    without_the_package.run(ALONE, folder=str(tmp_path))
    for each, logits in zip(inputs, torch.load(tmp_path / "logits.pt"), strict=True):
        assert_close(logits, logits_of(model, **each))


@pytest.mark.parametrize("positions", SINUSOIDS)
def test_the_decoder_goes_on_from_any_cache(positions: str) -> None:
    model: Any = make_model(decoder_layers=3, position_embedding_type=positions, d_k=3, d_v=5)
    copied = copy_for_tracing(model)
    decoder = DecoderGraph(copied)
    inputs = make_inputs([5, 3, 9], 40)
    targets, mask = inputs.pop("decoder_input_ids"), inputs["attention_mask"]
    states = copied.model.encoder(**inputs).last_hidden_state
    nothing = {"key": torch.zeros(3, 2, 0, 3), "value": torch.zeros(3, 2, 0, 5)}
    past = {str(number): {"decoder": nothing, "encoder": nothing} for number in range(3)}
    logits = []
    for part in targets.split([1, 30, 1, 8], dim=1):
        outputs = decoder(part, mask, states, past)
        logits.append(outputs["logits"])
        for number, sides in past.items():
            for side in sides:
                sides[side] = {kind: outputs[f"present.{number}.{side}.{kind}"] for kind in ("key", "value")}
    assert_close(torch.cat(logits, dim=1), logits_of(model, **inputs, decoder_input_ids=targets))


@pytest.mark.parametrize("kind", SINUSOIDS)
def test_sinusoids_in_float32_are_right_far_behind_every_table(kind: str) -> None:
    positions: Any = make_model(position_embedding_type=kind, position_offset=2).model.encoder.embed_positions
    indices = torch.arange(0, 2**16 - 2, 13)[None]
    assert_close(ComputedSinusoids(positions)(indices, 1), positions.encode(indices + 2).float(), tolerance=1e-6)


def test_the_copy_is_in_float32_and_the_model_stays_as_it_is() -> None:
    model = make_model(attention="eager").to(torch.bfloat16).train()  # type: ignore[arg-type]
    copied = copy_for_tracing(model)
    assert {parameter.dtype for parameter in copied.parameters()} == {torch.float32}
    assert not copied.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.training
    assert model.config._attn_implementation == "eager"
    table: Any = model.model.encoder.embed_positions
    assert table.weight.shape == (24, 16)


def test_what_is_refused() -> None:
    with pytest.raises(ConversionError, match="it is a Linear"):
        copy_for_tracing(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    model: Any = make_model()
    model.hf_quantizer = object()
    with pytest.raises(ConversionError, match="its weights are quantized"):
        copy_for_tracing(model)

    del model.hf_quantizer
    adapted = copy.deepcopy(model)
    adapted.model.decoder.layers[0].fc1 = torch.nn.utils.parametrizations.weight_norm(
        adapted.model.decoder.layers[0].fc1
    )
    with pytest.raises(ConversionError, match=r"layers\.0\.fc1 is .*ParametrizedLinear, whose weights may be others"):
        copy_for_tracing(adapted)
    with torch.no_grad():
        model.model.decoder.layers[0].fc2.bias[1:3] = torch.inf
    with pytest.raises(ConversionError, match=r"model\.decoder\.layers\.0\.fc2\.bias holds NaN or infinity \(2 of"):
        copy_for_tracing(model)
