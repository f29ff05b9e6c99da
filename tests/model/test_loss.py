"""The loss with label smoothing, computed from logits or without ever building them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.big_modeling import cpu_offload
from hypothesis import given
from hypothesis import strategies as st
from tiny_vanilla import ALL_SHARING, largest_allocation, loss_and_gradients, make_model, make_sentences, pad
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode

from vanilla_transformer.model import loss_vanilla_transformer as loss_module
from vanilla_transformer.model.loss_vanilla_transformer import (
    MINIMUM_ROWS,
    compute_logits_and_loss,
    fused_cross_entropy,
    has_plain_weights,
    label_smoothed_cross_entropy,
)


def make_problem(
    rows: int, d_model: int, vocabulary: int, bias: bool = False, ignored: float = 0.0, seed: int = 0
) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    """An output layer, hidden states (2, T, D) and labels (2, T), a share of which is ignored."""
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(d_model, vocabulary, bias=bias)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=d_model**-0.5, generator=generator)
    hidden_states = torch.randn(2, rows, d_model, generator=generator)
    labels = torch.randint(vocabulary, (2, rows), generator=generator)
    return layer, hidden_states, labels.masked_fill(torch.rand(2, rows, generator=generator) < ignored, -100)


def gradients(loss: torch.Tensor, hidden_states: torch.Tensor, layer: nn.Module) -> dict[str, torch.Tensor]:
    """The loss and its gradients by the hidden states and the layer's parameters."""
    names = ["hidden_states", *dict(layer.named_parameters())]
    found = torch.autograd.grad(loss, [hidden_states, *layer.parameters()])
    return {"loss": loss.detach(), **dict(zip(names, found, strict=True))}


def definition(logits: torch.Tensor, labels: torch.Tensor, smoothing: float, count: float | None) -> torch.Tensor:
    """The negative log-likelihood of all labels but -100 under (1 - eps) one-hot + eps uniform, in float64."""
    scores, labels = logits.double()[labels != -100], labels[labels != -100]
    targets = (1 - smoothing) * nn.functional.one_hot(labels, logits.shape[-1]) + smoothing / logits.shape[-1]
    return -(targets * scores.log_softmax(dim=-1)).sum() / (count or len(labels))


def oracle(
    layer: nn.Linear, hidden_states: torch.Tensor, labels: torch.Tensor, smoothing: float, count: float | None
) -> dict[str, torch.Tensor]:
    precise = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, dtype=torch.float64)
    precise.load_state_dict(layer.state_dict())
    hidden_states = hidden_states.detach().double().requires_grad_()
    return gradients(definition(precise(hidden_states), labels, smoothing, count), hidden_states, precise)


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    """Compares losses relative to their value, and gradients relative to the largest number in any of them."""
    assert list(actual) == list(expected)
    largest = max((tensor.abs().max().item() for name, tensor in expected.items() if name != "loss"), default=0.0)
    for name, tensor in expected.items():
        scale = abs(tensor.item()) if name == "loss" else largest
        error = (actual[name].double() - tensor.double()).abs().max().item()
        assert error <= tolerance * scale, f"{name}: {error} of {scale}"


@pytest.mark.parametrize("divisor", [None, 5])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.3])
def test_loss_is_smoothed_in_training_only(smoothing: float, divisor: int | None) -> None:
    model = make_model(label_smoothing=smoothing, lm_head_bias=True)
    inputs: dict[str, Any] = {"input_ids": torch.tensor([[4, 5, 2], [6, 7, 2], [8, 9, 2]])}
    inputs |= {"labels": torch.tensor([[4, 5, 6, 2], [7, 8, 2, -100], [9, 2, -100, -100]])}
    inputs |= {} if divisor is None else {"num_items_in_batch": divisor}
    with torch.no_grad():
        evaluated = model.eval()(**inputs)
        trained = model.train()(**inputs)
        with_logits = model(**inputs, skip_logits=False)
    torch.testing.assert_close(with_logits.logits, evaluated.logits, rtol=0.0, atol=0.0)
    for outputs, used in ((evaluated, 0.0), (trained, smoothing), (with_logits, smoothing)):
        expected = definition(evaluated.logits, inputs["labels"], used, divisor)
        assert outputs.loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("compute", ["plain", "fused"])
@given(
    # From a single row to several chunks of them.
    rows=st.one_of(st.integers(1, 8), st.integers(120, 400)),
    d_model=st.sampled_from([1, 8, 24]),
    # With fewer words and more smoothing gradients cancel out, and float32 itself is less exact than 1e-5.
    vocabulary=st.sampled_from([5, 17, 90]),
    bias=st.booleans(),
    ignored=st.sampled_from([0.0, 0.3, 0.95]),
    smoothing=st.sampled_from([0.0, 0.1, 0.5]),
    count=st.sampled_from([None, 7, 1000, torch.tensor(33)]),
    seed=st.integers(0, 1000),
)
def test_value_and_gradients_are_those_of_the_definition(
    compute: str,
    rows: int,
    d_model: int,
    vocabulary: int,
    bias: bool,
    ignored: float,
    smoothing: float,
    count: int | torch.Tensor | None,
    seed: int,
) -> None:
    layer, hidden_states, labels = make_problem(rows, d_model, vocabulary, bias, ignored, seed)
    labels[0, 0] = 1
    hidden_states.requires_grad_()
    assert has_plain_weights(layer, hidden_states)
    if compute == "fused":
        loss = fused_cross_entropy(layer, hidden_states, labels, smoothing, count)
    else:
        loss = label_smoothed_cross_entropy(layer(hidden_states), labels, smoothing, count)
    divisor = None if count is None else float(count)
    assert loss.dtype == torch.float32
    assert_close(gradients(loss, hidden_states, layer), oracle(layer, hidden_states, labels, smoothing, divisor))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("count", [None, 5])
def test_a_batch_without_labels_that_count(count: int | None, smoothing: float) -> None:
    layer, hidden_states, labels = make_problem(300, 8, 17, bias=True, ignored=1.0)
    hidden_states.requires_grad_()
    fused = gradients(fused_cross_entropy(layer, hidden_states, labels, smoothing, count), hidden_states, layer)
    logits = layer(hidden_states)
    plain = gradients(label_smoothed_cross_entropy(logits, labels, smoothing, count), hidden_states, layer)
    torch.testing.assert_close(fused, plain, rtol=0.0, atol=0.0, equal_nan=True)
    assert not any(tensor.any() for name, tensor in fused.items() if name != "loss")


@pytest.mark.parametrize(
    ("dtype", "autocast", "tolerance"), [("float32", "float16", 1e-5), ("float64", "bfloat16", 1e-7)]
)
def test_autocast_that_costs_no_digit(dtype: str, autocast: str, tolerance: float) -> None:
    layer, hidden_states, labels = make_problem(400, 24, 90, bias=True, ignored=0.2)
    layer, hidden_states = layer.to(getattr(torch, dtype)), hidden_states.to(getattr(torch, dtype)).requires_grad_()
    with torch.autocast("cpu", dtype=getattr(torch, autocast)):
        loss = fused_cross_entropy(layer, hidden_states, labels, 0.1)
    assert loss.dtype == torch.float32
    found = gradients(loss, hidden_states, layer)
    assert_close(found, oracle(layer, hidden_states, labels, 0.1, None), tolerance=tolerance)


@pytest.mark.parametrize("products", ["exact", "short"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights(dtype: torch.dtype, products: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are rounded once; and the losses of products in half precision are added in float32."""
    epsilon = torch.finfo(dtype).eps
    layer, hidden_states, labels = make_problem(400 if products == "exact" else 2000, 24, 90, bias=True, ignored=0.2)
    layer, hidden_states = layer.to(dtype), hidden_states.to(dtype).requires_grad_()
    if products == "short":
        monkeypatch.setattr(loss_module, "_product_dtype", lambda _: dtype)
    loss = fused_cross_entropy(layer, hidden_states, labels, 0.1)
    assert loss.dtype == torch.float32
    found, expected = gradients(loss, hidden_states, layer), oracle(layer, hidden_states, labels, 0.1, None)
    of_loss = 1e-5 if products == "exact" else epsilon / 20
    assert_close({"loss": found["loss"]}, {"loss": expected["loss"]}, tolerance=of_loss)
    assert_close(found, expected, tolerance=(2 if products == "exact" else 4) * epsilon)


def test_autocast_to_bfloat16_costs_no_more_than_where_the_logits_are_built() -> None:
    layer, hidden_states, labels = make_problem(400, 24, 90, bias=True, ignored=0.2)
    hidden_states.requires_grad_()
    exact = oracle(layer, hidden_states, labels, 0.1, None)
    errors = []
    for is_fused in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if is_fused:
                loss = fused_cross_entropy(layer, hidden_states, labels, 0.1)
            else:
                loss = label_smoothed_cross_entropy(layer(hidden_states), labels, 0.1)
        assert loss.dtype == torch.float32
        found = gradients(loss, hidden_states, layer)
        errors.append({name: (found[name].double() - exact[name].double()).norm().item() for name in exact})
    for name, by_torch in errors[1].items():
        assert errors[0][name] <= 1.1 * by_torch, name


def test_autocast_multiplies_with_the_vocabulary_in_bfloat16() -> None:
    """In float32 the products would be as exact, and take twice the time."""
    layer, hidden_states, labels = make_problem(400, 24, 90, bias=True, ignored=0.2)
    kinds: set[torch.dtype] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.mkldnn._linear_pointwise):
                kinds.update(argument.dtype for argument in args if isinstance(argument, torch.Tensor))
            return func(*args, **(kwargs or {}))

    with torch.autocast("cpu", dtype=torch.bfloat16), Watch():
        fused_cross_entropy(layer, hidden_states.requires_grad_(), labels, 0.1)
    assert kinds == {torch.bfloat16}


def make_batch(labels_of: list[int] | None = None) -> dict[str, torch.Tensor]:
    ids, mask = pad(make_sentences([3, 6, 2]))
    labels, counted = pad(make_sentences(labels_of or [4, 2, 5], seed=1))
    return {"input_ids": ids, "attention_mask": mask, "labels": labels.masked_fill(counted == 0, -100)}


@pytest.mark.parametrize("sharing", ALL_SHARING)
@pytest.mark.parametrize("lm_head_bias", [False, True])
def test_skipping_changes_no_gradient_of_the_model(sharing: str, lm_head_bias: bool) -> None:
    model = make_model(label_smoothing=0.1, lm_head_bias=lm_head_bias, **ALL_SHARING[sharing]).train()
    expected = loss_and_gradients(model, **make_batch(), skip_logits=False)
    assert len(expected) == 1 + len(list(model.parameters()))
    assert_close(loss_and_gradients(model, **make_batch()), expected)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("skip_logits", [None, False, True])
def test_when_logits_are_returned(training: bool, skip_logits: bool | None) -> None:
    """Unless told otherwise, they are left out in training mode with labels; tuples close the gap."""
    model = make_model(label_smoothing=0.1).train(training)
    batch = make_batch()
    outputs = model(**batch, skip_logits=skip_logits)
    skipped = training if skip_logits is None else skip_logits
    assert (outputs.logits is None) == skipped
    assert ("logits" in outputs) != skipped
    as_tuple = model(**batch, skip_logits=skip_logits, return_dict=False)
    torch.testing.assert_close(as_tuple, outputs.to_tuple(), rtol=0.0, atol=0.0)
    torch.testing.assert_close(as_tuple[0], outputs.loss)
    assert len(as_tuple) == (2 if skipped else 3)
    labels = batch.pop("labels")
    batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
    if skip_logits:
        with pytest.raises(ValueError, match="skip_logits=True needs labels"):
            model(**batch, skip_logits=skip_logits)
    else:
        assert model(**batch, skip_logits=skip_logits).logits.shape == (3, 5, 17)


def test_no_tensor_as_large_as_the_logits_is_allocated() -> None:
    """A whole training step holds a chunk of rows of them at most; where the logits are asked for, all of them."""
    model = make_model(vocab_size=600, label_smoothing=0.1, lm_head_bias=True, max_position_embeddings=400).train()
    rows, logits = 3 * 300, 3 * 300 * 600 * 4
    batch = make_batch([300, 300, 300])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(**options: Any) -> None:
        model(**batch, **options).loss.backward()
        optimizer.step()

    assert largest_allocation(lambda: step(skip_logits=False)) == logits
    assert largest_allocation(step) == logits * MINIMUM_ROWS // rows


def test_labels_of_another_length_are_named() -> None:
    model = make_model().train()
    inputs = {"input_ids": torch.tensor([[5, 6]]), "decoder_input_ids": torch.tensor([[0, 5, 6]])}
    for skip_logits in (True, False):
        with pytest.raises(ValueError, match=r"labels have the shape \(1, 2\), and the decoder's inputs \(1, 3\)"):
            model(**inputs, labels=torch.tensor([[5, 6]]), skip_logits=skip_logits)


def test_the_second_derivative_needs_the_logits() -> None:
    """Against finite differences of the first one, along a random direction."""
    model = make_model(attention="eager", activation_function="gelu").double().train()
    weight = model.model.decoder.layers[0].fc1.weight
    loss = model(**make_batch()).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward called twice"):
        loss.backward()
    with pytest.raises(RuntimeError, match="skip_logits=False to differentiate its loss twice"):
        torch.autograd.grad(model(**make_batch()).loss, weight, create_graph=True)

    def squared_gradient() -> torch.Tensor:
        loss = model(**make_batch(), skip_logits=False).loss
        return torch.autograd.grad(loss, weight, create_graph=True)[0].square().sum()

    (second,) = torch.autograd.grad(squared_gradient(), weight)
    direction, step, sides = torch.randn_like(weight), 1e-5, []
    for distance in (step, -2 * step):
        weight.data.add_(direction, alpha=distance)
        sides.append(squared_gradient().detach())
    torch.testing.assert_close((second * direction).sum(), (sides[0] - sides[1]) / (2 * step), atol=1e-6, rtol=1e-4)


def test_gradient_checkpointing_and_frozen_tables() -> None:
    model = make_model(label_smoothing=0.1, tie_word_embeddings=False).train()
    expected = loss_and_gradients(model, **make_batch(), skip_logits=False)
    model.gradient_checkpointing_enable()
    assert_close(loss_and_gradients(model, **make_batch()), expected)
    model.lm_head.requires_grad_(False)
    del expected["lm_head.weight"]
    assert_close(loss_and_gradients(model, **make_batch()), expected)


@pytest.fixture
def _process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_process_group")
@pytest.mark.parametrize("tied", [False, True])
def test_fully_sharded_model(tied: bool) -> None:
    """FSDP2 gathers a table that is the root's for the whole step; an output layer sharded by itself is called."""
    model = make_model(label_smoothing=0.1, tie_word_embeddings=tied).train()
    expected = loss_and_gradients(model, **make_batch(), skip_logits=False)
    mesh = init_device_mesh("cpu", (1,))
    for layer in [*model.model.encoder.layers, *model.model.decoder.layers]:
        fully_shard(layer, mesh=mesh)
    if not tied:
        fully_shard(model.lm_head, mesh=mesh)
        assert not has_plain_weights(model.lm_head, torch.zeros(1, 1, 16))
    fully_shard(model, mesh=mesh)
    assert isinstance(model.lm_head.weight, DTensor)
    assert not has_plain_weights(model.lm_head, torch.zeros(1, 1, 16))
    found: dict[str, Any] = loss_and_gradients(model, **make_batch())
    full = {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in found.items()}
    assert_close(full, expected)
    assert model(**make_batch()).logits is None


class OtherLinear(nn.Linear):
    """An output layer of another kind."""


def change(name: str, layer: nn.Linear) -> nn.Module:
    """The same matrix, but more than a plain layer."""
    if name == "wrapped":  # as adapters do it
        return nn.Sequential(layer)
    if name == "parametrized":
        return parametrizations.weight_norm(layer)
    if name == "forward replaced":  # as accelerate's hooks do it
        layer.forward = nn.Linear.forward.__get__(layer)  # type: ignore[method-assign]
        return layer
    if name == "replaced":
        other = OtherLinear(layer.in_features, layer.out_features)
        other.load_state_dict(layer.state_dict())
        return other
    getattr(layer, f"register_{name}_hook")(lambda *_: None)
    return layer


@pytest.mark.parametrize(
    "name",
    [
        *("replaced", "wrapped", "forward replaced", "parametrized"),
        *("forward", "forward_pre", "full_backward", "full_backward_pre"),
    ],
)
def test_an_output_layer_that_is_more_than_its_weights_is_called(name: str) -> None:
    layer, hidden_states, labels = make_problem(300, 8, 17, bias=True, ignored=0.2)
    hidden_states.requires_grad_()
    expected = oracle(layer, hidden_states, labels, 0.1, None)
    changed = change(name, layer)
    assert not has_plain_weights(changed, hidden_states)
    logits, loss = compute_logits_and_loss(changed, hidden_states, labels, 0.1, None, skip_logits=True)
    assert logits is None
    assert loss is not None
    (gradient,) = torch.autograd.grad(loss, [hidden_states])
    found = {"loss": loss.detach(), "hidden_states": gradient}
    assert_close(found, {key: expected[key] for key in found})


def test_offloaded_weights() -> None:
    """Offloading by accelerate brings the weights back only for the layer's own call."""
    layer, hidden_states, labels = make_problem(300, 8, 17)
    expected = oracle(layer, hidden_states, labels, 0.1, None)["loss"]
    cpu_offload(layer, execution_device=torch.device("cpu"))
    assert layer.weight.device.type == "meta"
    assert not has_plain_weights(layer, hidden_states)
    with torch.no_grad():
        _, loss = compute_logits_and_loss(layer, hidden_states, labels, 0.1, None, skip_logits=True)
    assert loss is not None
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_weights_that_are_not_there_or_do_not_fit() -> None:
    """Partitioned (ZeRO-3 leaves an empty tensor), on the meta device, of another type, or with fake tensors."""
    layer, hidden_states, _ = make_problem(3, 8, 17)
    assert not has_plain_weights(layer, hidden_states.double())
    assert not has_plain_weights(layer, hidden_states.to("meta"))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as fake:
        assert not has_plain_weights(layer, fake.from_tensor(hidden_states))
    elsewhere = nn.Linear(8, 17, device="meta")
    assert not has_plain_weights(elsewhere, hidden_states)
    assert not has_plain_weights(elsewhere, hidden_states.to("meta"))
    layer.weight.data = torch.empty(0)
    assert not has_plain_weights(layer, hidden_states)
