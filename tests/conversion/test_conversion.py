"""What every converter returns: checked against the original, saved whole or not at all."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_vanilla import largest_allocation, make_loud_model, make_model
from transformers import GenerationConfig

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.conversion.converted import ConvertedModel, build_model, draw_batch
from vanilla_transformer.conversion.errors import ConversionError
from vanilla_transformer.conversion.weights import Rule
from vanilla_transformer.model.tokenization_vanilla_transformer import VanillaTransformerTokenizer

SAME = (Rule(r"(.*)", r"\1"),)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sharing", [{}, {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 9}])
def test_a_model_has_the_weights_type_ties_and_generation_config(dtype: torch.dtype, sharing: dict[str, Any]) -> None:
    original: Any = make_model(lm_head_bias=True, **sharing)
    original.to(dtype)
    weights = {name: tensor for name, tensor in original.state_dict().items() if name != "lm_head.weight"}
    generation = GenerationConfig(num_beams=7)
    model = build_model(original.config, weights, SAME, source="it", generation_config=generation)
    assert not model.training
    assert model.generation_config.num_beams == 7
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model.lm_head.weight is model.model.decoder.embed_tokens.weight
    for name, tensor in original.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    weights["lm_head.bias"].add_(1)  # the model has memory of its own
    assert not torch.equal(model.lm_head.bias, weights["lm_head.bias"])


def test_a_batch_to_compare_has_none_of_several_end_symbols() -> None:
    batch = draw_batch(make_model(eos_token_id=[2, 5, 7]).config)
    for name in ("input_ids", "decoder_input_ids"):
        assert not {2, 5, 7} & set(batch[name].flatten().tolist())


def test_weights_of_several_types_or_of_integers_are_refused() -> None:
    weights = make_model().state_dict()
    name = "model.encoder.layers.0.fc1.bias"
    for dtype in (torch.float16, torch.int8):
        with pytest.raises(ConversionError, match=rf"must be of one floating-point type, not .*{dtype}"):
            build_model(make_model().config, {**weights, name: weights[name].to(dtype)}, SAME, source="it")


def make_converted(error: float, tokenizer: VanillaTransformerTokenizer | None = None) -> tuple[ConvertedModel, Any]:
    model = make_loud_model(VanillaTransformerConfig.from_preset("tiny"))
    ids = torch.tensor([[5, 6, 7, 2]])

    def compare() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            logits = model(input_ids=ids, decoder_input_ids=ids).logits
        return logits, logits + error * logits.abs().max()

    return ConvertedModel(source="the model X", model=model, tokenizer=tokenizer, compare=compare), model


def test_the_check_tells_the_largest_difference_and_refuses_a_large_one() -> None:
    assert make_converted(0.0)[0].check() == 0.0
    difference = make_converted(5e-6)[0].check()
    assert difference == pytest.approx(5e-6, rel=0.2)
    for error in (1e-4, float("nan"), float("inf")):
        with pytest.raises(ConversionError, match=r"computes something else than the model X: logits differ"):
            make_converted(error)[0].check()
    assert ConvertedModel(source="the model X", model=make_converted(0.0)[1]).check() is None


def test_what_cannot_be_saved_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = VanillaTransformerTokenizer()
    monkeypatch.setattr(tokenizer, "save_pretrained", lambda folder: Path(folder, "absent", "file").write_text(""))
    with pytest.raises(FileNotFoundError):
        make_converted(0.0, tokenizer)[0].save(tmp_path / "it")
    assert os.listdir(tmp_path) == []


def test_a_model_in_half_precision_is_never_there_in_float32() -> None:
    original: Any = make_model(vocab_size=2000)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in original.state_dict().items()}
    largest = largest_allocation(lambda: build_model(original.config, weights, SAME, source="it"))
    assert largest == 2 * original.get_input_embeddings().weight.numel()
