"""Models loaded in another type and spread over devices: the same outputs and ties as without."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_vanilla import SHARING, logits_of, make_model, make_sentences, pad
from transformers import AutoModelForSeq2SeqLM

IDS, MASK = pad(make_sentences([4, 2]))
SOURCES = {"input_ids": IDS, "attention_mask": MASK}
INPUTS = {**SOURCES, "decoder_input_ids": torch.tensor([[0, 7, 8], [0, 4, 9]])}


def is_tied(model: Any) -> bool:
    return model.lm_head.weight is model.model.decoder.embed_tokens.weight


@pytest.mark.parametrize("kind", ["sinusoidal", "learned"])
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_loading_in_a_type_is_casting_to_it(name: str, kind: str, tmp_path: Path) -> None:
    dtype = getattr(torch, name)
    model: Any = make_model(position_embedding_type=kind)
    model.save_pretrained(tmp_path)
    expected = logits_of(model.to(dtype=dtype), **INPUTS)
    assert expected.dtype == dtype
    for settings in ({"dtype": dtype}, {"dtype": name}, {"dtype": dtype, "device_map": "auto"}):
        loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, **settings)
        assert loaded.dtype == dtype
        assert is_tied(loaded)
        inputs = {key: tensor.to(loaded.device) for key, tensor in INPUTS.items()}
        torch.testing.assert_close(logits_of(loaded, **inputs).cpu(), expected)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, device_map="auto", dtype="auto")
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules:UserWarning")
@pytest.mark.parametrize(("sharing", "share"), [*zip(SHARING, (0.3, 0.8, 0.8, 0.3), strict=True), ("shared-tied", 0.8)])
def test_what_does_not_fit_into_memory_is_read_from_disk(sharing: str, share: float, tmp_path: Path) -> None:
    model: Any = make_model(encoder_layers=3, decoder_layers=3, **SHARING[sharing])
    model.save_pretrained(tmp_path / "saved")
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    where = {"max_memory": {"cpu": int(share * size)}, "offload_folder": tmp_path / "offloaded"}
    loaded: Any = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "saved", device_map="auto", **where)
    assert {"cpu", "disk"} == set(loaded.hf_device_map.values())
    layers = [name for name in loaded.hf_device_map if re.search(r"\.layers\.\d+", name)]
    assert all(re.fullmatch(r"model\.(en|de)coder\.layers\.\d+", name) for name in layers)

    for num_beams in (1, 3):
        search = {"max_new_tokens": 6, "min_new_tokens": 6, "num_beams": num_beams}
        assert torch.equal(loaded.generate(**SOURCES, **search), model.generate(**SOURCES, **search))
    # The loss without logits needs weights that are at hand, which an offloaded output layer's are not.
    labels = {**SOURCES, "labels": torch.tensor([[7, 8, 2], [4, 2, -100]])}
    torch.testing.assert_close(loaded.train()(**labels).loss, model.train()(**labels).loss)

    loaded.eval().save_pretrained(tmp_path / "again")
    again: Any = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "again")
    assert torch.equal(logits_of(again, **INPUTS), logits_of(model.eval(), **INPUTS))
    assert is_tied(again) == SHARING[sharing]["tie_word_embeddings"]
