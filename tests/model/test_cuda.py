"""What only a CUDA GPU can show: it finds what the CPU finds, in each kind of attention, compiled, in fewer bits."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from letters import TEXTS, TOKENIZER, make_letters_model, train_on_letters
from test_loss import assert_close as assert_gradients_close
from test_loss import gradients, make_problem, oracle
from tiny_vanilla import assert_close, logits_of, loss_and_gradients, make_model, make_sentences, pad
from torch import nn
from transformers import AutoModelForSeq2SeqLM, BitsAndBytesConfig, TorchAoConfig

from vanilla_transformer.inference.loading import load_model_and_tokenizer
from vanilla_transformer.inference.translate import translate
from vanilla_transformer.model import static_decoding_vanilla_transformer as static_decoding
from vanilla_transformer.model.loss_vanilla_transformer import fused_cross_entropy

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU"),
    # Compilers warn of much, other things in each version; an error of theirs fails all the same.
    pytest.mark.filterwarnings("default"),
]

HAS_FLASH = importlib.util.find_spec("flash_attn") is not None
ATTENTIONS = [
    "eager",
    "sdpa",
    "flex_attention",
    pytest.param("flash_attention_2", marks=pytest.mark.skipif(not HAS_FLASH, reason="flash_attn is not installed")),
]
# What the kernels of flex attention and of flash attention ask for: 16 numbers or more a head.
SIZES: dict[str, Any] = {"d_model": 64, "encoder_ffn_dim": 96, "decoder_ffn_dim": 80, "scale": 0.1}


def make_batch(lengths: list[int], side: str = "right") -> dict[str, torch.Tensor]:
    ids, mask = pad(make_sentences(lengths), side, junk=5)
    return {"input_ids": ids, "attention_mask": mask}


def to_cuda(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in inputs.items()}


def to_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu().float() for name, tensor in tensors.items()}


BATCH = make_batch([7, 3, 5])
LABELS = torch.tensor([[7, 8, 9, 2], [4, 2, -100, -100], [5, 6, 2, -100]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_loss_and_gradients_are_the_cpu_s(attention: str, dtype: torch.dtype) -> None:
    if attention == "flash_attention_2" and dtype is torch.float32:
        pytest.skip("flash attention computes in half precision only")
    model: Any = make_model("eager", **SIZES)
    expected = loss_and_gradients(model, **BATCH, labels=LABELS)
    on_gpu: Any = copy.deepcopy(model).to("cuda", dtype)
    on_gpu.set_attn_implementation(attention)
    found = to_cpu(loss_and_gradients(on_gpu, **to_cuda({**BATCH, "labels": LABELS})))
    assert found.keys() == expected.keys()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.02}[dtype]
    actual, wanted = (torch.cat([each[name].flatten() for name in expected]) for each in (found, expected))
    assert (actual - wanted).norm() <= tolerance * wanted.norm()


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_searches_find_what_the_cpu_finds(attention: str, side: str) -> None:
    model: Any = make_model("eager", **SIZES)
    batch = make_batch([7, 3, 5], side)
    dtype = torch.bfloat16 if attention == "flash_attention_2" else torch.float32
    on_gpu: Any = copy.deepcopy(model).to("cuda", dtype)
    on_gpu.set_attn_implementation(attention)
    searches: list[dict[str, Any]] = [{}, {"num_beams": 3}]
    searches += [] if attention == "flex_attention" else [{"num_beams": 4, "num_return_sequences": 2}]
    for search in searches:
        expected = model.generate(**batch, max_new_tokens=6, **search)
        found = on_gpu.generate(**to_cuda(batch), max_new_tokens=6, **search)
        if dtype is torch.float32:
            assert found.cpu().equal(expected), search
        else:
            assert found.shape[0] == expected.shape[0]


@pytest.fixture
def no_graphs_of_others() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("no_graphs_of_others")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_training_step_compiles_to_one_graph(mode: str | None) -> None:
    model: Any = make_model("sdpa", **SIZES)
    expected = loss_and_gradients(model, **BATCH, labels=LABELS)
    on_gpu: Any = copy.deepcopy(model).cuda()
    compiled: Any = torch.compile(on_gpu, fullgraph=True, mode=mode)
    for _ in range(3):
        found = to_cpu(loss_and_gradients(compiled, **to_cuda({**BATCH, "labels": LABELS})))
        for name, tensor in expected.items():
            assert_close(found[f"_orig_mod.{name}" if name != "loss" else name], tensor)


@pytest.mark.parametrize("num_beams", [1, 4])
def test_static_memory_is_recorded_and_finds_the_same(num_beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[Any] = []

    class Recording(static_decoding.RecordedStep):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            recorded.append(self)

    monkeypatch.setattr(static_decoding, "RecordedStep", Recording)
    model: Any = make_model("sdpa", scale=0.6)
    on_gpu: Any = copy.deepcopy(model).cuda()

    def check(lengths: list[int], **settings: Any) -> None:
        batch = make_batch(lengths)
        settings |= {"num_beams": num_beams, "max_new_tokens": 70, "suppress_tokens": [2]}
        found = on_gpu.generate(**to_cuda(batch), **settings, cache_implementation="static")
        assert found.cpu().equal(model.generate(**batch, **settings))

    for lengths in ([4, 2, 1], [3], [70, 2, 5, 1], [4, 2, 1], [3] * 9):
        check(lengths)
    check([3] * 9)  # again what was recorded before its memory grew
    known = len(recorded)
    assert known > 0
    check([3] * 9)
    assert len(recorded) == known
    with torch.no_grad():
        for each in (model, on_gpu):
            each.model.decoder.layers[0].fc2.weight.mul_(-2)
    check([4, 2, 1])
    on_gpu.to("cpu").to("cuda")
    check([4, 2, 1], no_repeat_ngram_size=2)
    assert len(recorded) > known


def test_threads_record_and_search_at_the_same_time() -> None:
    model: Any = make_model("sdpa", scale=0.6)
    on_gpu: Any = copy.deepcopy(model).cuda()
    batches = [make_batch(lengths) for lengths in ([4, 2, 6], [1, 7], [3, 3, 3, 3, 3])] * 4
    expected = [model.generate(**batch, num_beams=3, max_new_tokens=20) for batch in batches]

    def search(batch: dict[str, torch.Tensor]) -> Any:
        settings = {"num_beams": 3, "max_new_tokens": 20, "cache_implementation": "static"}
        return on_gpu.generate(**to_cuda(batch), **settings).cpu()

    with ThreadPoolExecutor(4) as pool:
        assert all(map(torch.equal, pool.map(search, batches), expected))


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_the_loss_without_logits_is_that_of_the_definition(autocast: torch.dtype | None) -> None:
    layer, hidden_states, labels = make_problem(700, 64, 900, bias=True, ignored=0.2)
    expected = oracle(layer, hidden_states, labels, 0.1, None)
    layer, hidden_states = layer.cuda(), hidden_states.cuda().requires_grad_()
    with torch.autocast("cuda", dtype=autocast, enabled=autocast is not None):
        loss = fused_cross_entropy(layer, hidden_states, labels.cuda(), 0.1)
    assert loss.dtype == torch.float32
    found = {name: tensor.cpu() for name, tensor in gradients(loss, hidden_states, layer).items()}
    tolerance = {None: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.02}[autocast]
    assert_gradients_close(found, expected, tolerance)


def test_a_training_step_never_holds_the_logits() -> None:
    model: Any = make_model("sdpa", **SIZES | {"vocab_size": 20_000})
    model.cuda().train()
    inputs = to_cuda({**make_batch([60] * 100), "labels": torch.randint(4, 13, (100, 60))})
    loss_and_gradients(model, **inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss_and_gradients(model, **inputs)
    assert torch.cuda.max_memory_allocated() - before < 100 * 60 * 20_000 * 4


@pytest.mark.parametrize("precision", [{"bf16": True}, {"fp16": True}, {}], ids=["bf16", "fp16", "float32"])
def test_training_saves_what_the_cpu_translates_with(precision: dict[str, bool], tmp_path: Path) -> None:
    model: Any = make_letters_model()
    losses = train_on_letters(model, tmp_path / "training", use_cpu=False, **precision)
    assert model.device.type == "cuda"
    assert losses[-1] < 0.1 * losses[0]
    model.save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    for device in ("cuda", "cpu", "auto"):
        loaded, tokenizer = load_model_and_tokenizer(str(tmp_path / "model"), device=device)
        assert loaded.device.type == ("cpu" if device == "cpu" else "cuda")
        for num_beams in (1, 3):
            assert translate(loaded, tokenizer, TEXTS, num_beams=num_beams) == TEXTS


def test_a_model_is_spread_over_a_gpu_and_the_cpu(tmp_path: Path) -> None:
    model: Any = make_model(encoder_layers=3, decoder_layers=3)
    model.save_pretrained(tmp_path)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    for where in ({"device_map": "cuda"}, {"device_map": "auto", "max_memory": {0: int(0.6 * size), "cpu": "1GiB"}}):
        loaded: Any = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, **where)
        if where["device_map"] == "auto":
            assert {torch.device(device).type for device in loaded.hf_device_map.values()} == {"cuda", "cpu"}
        for num_beams in (1, 3):
            search = {"max_new_tokens": 6, "min_new_tokens": 6, "num_beams": num_beams}
            assert loaded.generate(**to_cuda(BATCH), **search).cpu().equal(model.generate(**BATCH, **search))
        labels = {**BATCH, "labels": LABELS}
        expected = model.train()(**labels).loss
        torch.testing.assert_close(loaded.train()(**to_cuda(labels)).loss.cpu(), expected)
        model.eval()


def list_schemes() -> dict[str, Any]:
    """Settings of quantized loading that need a GPU, of the libraries that are installed."""
    schemes: dict[str, Any] = {}
    if importlib.util.find_spec("torchao"):
        from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, Int8WeightOnlyConfig

        schemes["torchao, int8"] = TorchAoConfig(Int8WeightOnlyConfig())
        schemes["torchao, float8"] = TorchAoConfig(Float8DynamicActivationFloat8WeightConfig())
    if importlib.util.find_spec("bitsandbytes"):
        schemes["bitsandbytes, 8 bits"] = BitsAndBytesConfig(load_in_8bit=True)
        kind = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
        schemes["bitsandbytes, 4 bits"] = BitsAndBytesConfig(load_in_4bit=True, **kind)
    return schemes


@pytest.mark.parametrize("scheme", ["torchao, int8", "torchao, float8", "bitsandbytes, 8 bits", "bitsandbytes, 4 bits"])
def test_models_in_fewer_bits_translate_the_same(scheme: str, tmp_path: Path) -> None:
    if scheme not in (schemes := list_schemes()):
        pytest.skip(f"{scheme.partition(',')[0]} is not installed: scripts/test --quantization has it")
    model: Any = make_letters_model(d_model=64, encoder_ffn_dim=64, decoder_ffn_dim=64)
    train_on_letters(model, tmp_path / "training", use_cpu=False)
    model.save_pretrained(tmp_path / "model")
    loaded: Any = AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path / "model", quantization_config=schemes[scheme], device_map="cuda", dtype=torch.bfloat16
    )
    layers = [layer for name, layer in loaded.named_modules() if isinstance(layer, nn.Linear) and "fc" in name]
    assert all(type(layer.weight) is not nn.Parameter or not layer.weight.is_floating_point() for layer in layers)
    inputs = to_cuda(dict(TOKENIZER(TEXTS, padding=True, return_tensors="pt")))
    for num_beams in (1, 3):
        found = loaded.generate(**inputs, num_beams=num_beams, max_new_tokens=8)
        assert TOKENIZER.batch_decode(found, skip_special_tokens=True) == TEXTS


def test_logits_and_scores_in_half_precision_are_close() -> None:
    model: Any = make_model("sdpa", **SIZES)
    expected = model.generate(**BATCH, num_beams=3, max_new_tokens=6, output_scores=True, return_dict_in_generate=True)
    for dtype, tolerance in ((torch.bfloat16, 0.1), (torch.float16, 0.02)):
        on_gpu: Any = copy.deepcopy(model).to("cuda", dtype)
        inputs = to_cuda({**BATCH, "decoder_input_ids": expected.sequences})
        cpu_logits = logits_of(model, **{**BATCH, "decoder_input_ids": expected.sequences})
        assert_close(logits_of(on_gpu, **inputs).cpu().float(), cpu_logits, tolerance)
        found = on_gpu.generate(
            **to_cuda(BATCH), num_beams=3, max_new_tokens=6, output_scores=True, return_dict_in_generate=True
        )
        torch.testing.assert_close(
            found.sequences_scores.cpu().float(), expected.sequences_scores, atol=tolerance, rtol=tolerance
        )
