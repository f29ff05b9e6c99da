"""The values of the explainer beside what the model's own modules compute, seen through forward hooks."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from letters import TOKENIZER, make_letters_model
from watched_modules import watch

from vanilla_transformer.conversion.errors import ConversionError
from vanilla_transformer.export import onnx as exporting
from vanilla_transformer.export.explainer import folder as explaining
from vanilla_transformer.export.explainer.recording import OPERATIONS, RecordingDecoder, RecordingEncoder
from vanilla_transformer.export.graphs import copy_for_tracing

pytest.importorskip("transformers", minversion=exporting.OLDEST_TRANSFORMERS)
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

MODELS: list[dict[str, Any]] = [
    {"normalize_before": False},
    {"d_k": 8, "d_v": 12, "attention_bias": True, "lm_head_bias": True, "normalize_embedding": True},
    {"position_embedding_type": "learned", "max_position_embeddings": 64, "position_offset": 2, "ffn_bias": False},
    {"position_embedding_type": "sinusoidal_tensor2tensor", "activation_function": "gelu", "scale_embedding": False},
    {"normalize_before": False, "share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
]


@pytest.mark.parametrize("changes", MODELS, ids=str)
def test_each_value_is_what_the_modules_compute(changes: dict[str, Any]) -> None:
    model = make_letters_model(**changes).eval()
    ids, targets = torch.tensor([TOKENIZER("gab'c").input_ids]), torch.tensor([[0, 70, 71, 80], [0, 90, 6, 71]])
    mask = torch.ones_like(ids)
    mask[0, 1] = 0
    copied = copy_for_tracing(model)
    with torch.no_grad():
        encoder = RecordingEncoder(copied)
        read = encoder(ids, mask)
        decoder = RecordingDecoder(copied, encoder.output)
        written = decoder(targets, mask, read[encoder.output])
    rows = {"input_ids": ids.expand(2, -1), "attention_mask": mask.expand(2, -1), "decoder_input_ids": targets}
    seen = watch(model, **rows)
    for name, value in (read | written).items():
        if name in seen:
            expected = seen[name].expand(len(rows["input_ids"]), *seen[name].shape[1:])[: len(value)]
            torch.testing.assert_close(value, expected, atol=1e-5, rtol=1e-5, msg=name)
    missing = (read | written).keys() - seen.keys()
    assert seen.keys() <= (read | written).keys()
    assert all(name.endswith(".sum") for name in missing)
    assert not missing or model.config.normalize_before
    steps = encoder.steps | decoder.steps
    assert steps.keys() == (read | written).keys()
    assert {step["operation"] for step in steps.values()} <= set(OPERATIONS)
    # In pre-LN, sums go to no module that gives them.
    for name, step in steps.items():
        values = read | written
        if step["operation"] == "sum":
            torch.testing.assert_close(values[name], values[step["of"][0]] + values[step["of"][1]])
        assert set(step["of"]) <= values.keys()


def test_one_file_has_the_weights_of_both_graphs(tmp_path: Path) -> None:
    model = make_letters_model(normalize_before=False)
    copied = copy_for_tracing(model)
    notes = explaining.write_recording(copied, tmp_path)
    weights = (tmp_path / explaining.WEIGHTS_FILE).read_bytes()
    assert len(weights) < 4 * 1.05 * model.num_parameters()
    for name, tensor in copied.state_dict().items():
        place = notes["weights"][name]
        shape = place["shape"][::-1] if place["turned"] else place["shape"]
        found = np.frombuffer(weights, np.float32, tensor.numel(), place["offset"]).reshape(shape)
        np.testing.assert_array_equal(found.T if place["turned"] else found, tensor.numpy())
    assert not any((tmp_path / f"{name}.onnx").stat().st_size > 200_000 for name in ("encoder", "decoder"))
    session = onnxruntime.InferenceSession(tmp_path / "encoder.onnx")
    ids = np.array([[70, 71, 72, 2]])
    outputs = session.run(["encoder.0.self.weights"], {"input_ids": ids, "attention_mask": np.array([[1, 0, 1, 1]])})
    np.testing.assert_allclose(outputs[0].sum(axis=-1), 1, atol=1e-6)
    assert not outputs[0][..., 1].any()


def test_graphs_that_compute_something_else_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordingEncoder, "side", "decoder")
    with pytest.raises(ConversionError, match="What was exported computes other logits than the model: "):
        explaining._compute(copy_for_tracing(make_letters_model(share_encoder_decoder_embeddings=False)))
