"""The linear map by oneDNN against torch.nn.Linear, value and derivatives, and where it steps aside."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from tiny_vanilla import make_model
from torch import nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from vanilla_transformer.model import linear_vanilla_transformer as linear_module
from vanilla_transformer.model.linear_vanilla_transformer import linear, multiply, project

pytestmark = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")),
    reason="this torch has no oneDNN",
)


@pytest.fixture
def always_onednn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Makes every processor one that uses oneDNN, for products of any size, and notes the shapes of their factors."""
    shapes: list[tuple[int, ...]] = []
    call_onednn = linear_module._call_onednn

    def note(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        shapes.append((*inputs.shape, *weight.shape))
        return call_onednn(inputs, weight, bias)

    monkeypatch.setattr(linear_module, "onednn_is_faster", lambda in_training: True)
    monkeypatch.setattr(linear_module, "_FEWEST_MULTIPLICATIONS", 1)
    monkeypatch.setattr(linear_module, "_call_onednn", note)
    return shapes


class Linear(nn.Linear):
    """Calls the function under test where torch.nn.Linear calls its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias)


def twins() -> tuple[Linear, nn.Linear]:
    ours, theirs = Linear(6, 5), nn.Linear(6, 5)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@hypothesis.given(
    shape=st.lists(st.integers(1, 9), min_size=0, max_size=2),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    bias=st.booleans(),
    contiguous=st.booleans(),
    weight_contiguous=st.booleans(),
)
def test_product_and_derivatives(
    shape: list[int], sizes: tuple[int, int], bias: bool, contiguous: bool, weight_contiguous: bool
) -> None:
    generator = torch.Generator().manual_seed(sum(shape) + sum(sizes))
    inputs = torch.randn(*shape, 3, sizes[0], generator=generator)
    if not contiguous:
        inputs = inputs.transpose(0, -2).contiguous().transpose(0, -2)
    weight = torch.randn(sizes[1], sizes[0], generator=generator)
    if not weight_contiguous:
        weight = weight.t().contiguous().t()
    offset = torch.randn(sizes[1], generator=generator) if bias else None
    results = []
    for product in (multiply, nn.functional.linear):
        tensors = [tensor.clone().requires_grad_() for tensor in (inputs, weight, offset) if tensor is not None]
        output = product(*tensors)
        output.cos().sum().backward()
        results.append([output.detach(), *(tensor.grad for tensor in tensors)])
    for ours, theirs in zip(*results, strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("kind", ["every second column", "part of a row", "one row for all", "not aligned"])
def test_views(kind: str) -> None:
    views = {
        "every second column": torch.randn(24, 64)[:, ::2],
        "part of a row": torch.randn(24, 50)[:, 3:35],
        "one row for all": torch.randn(1, 32).expand(24, 32),
        "not aligned": torch.randn(24 * 32 + 1)[1:].view(24, 32),
    }
    view, plain = views[kind], torch.randn(20, 32)
    for inputs, weight in ((view, plain), (plain, view), (view, view)):
        assert_same(multiply(inputs, weight), inputs @ weight.t())


@pytest.mark.parametrize("bias", [torch.randn(128)[::2], torch.randn(1).expand(64), torch.randn(64, 2)[:, 1]])
def test_a_bias_may_have_gaps(bias: torch.Tensor, always_onednn: list[tuple[int, ...]]) -> None:
    inputs, weight = torch.randn(512, 64), torch.randn(64, 64)
    assert_same(linear(inputs, weight, bias), inputs @ weight.t() + bias)
    assert not always_onednn, "oneDNN reads a bias as if its values lay side by side"


def test_second_derivative() -> None:
    inputs, weight = torch.randn(20, 6, requires_grad=True), torch.randn(9, 6, requires_grad=True)
    second = []
    for product in (multiply, nn.functional.linear):
        first = torch.autograd.grad(product(inputs, weight).tanh().sum(), [inputs, weight], create_graph=True)
        second.append(torch.autograd.grad(sum(by.square().sum() for by in first), [inputs, weight]))  # type: ignore[arg-type]
    assert_same(second[0], second[1])


@pytest.mark.parametrize("frozen", ["weight", "bias", "inputs"])
def test_what_needs_no_gradient_gets_none_and_costs_nothing(frozen: str, always_onednn: list[tuple[int, ...]]) -> None:
    layer = Linear(6, 5)
    tensors = {"weight": layer.weight, "bias": layer.bias, "inputs": torch.randn(32, 6, requires_grad=True)}
    tensors[frozen].requires_grad_(False)
    kept: list[tuple[int, ...]] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = layer(tensors["inputs"]).sum()
    loss.backward()
    assert [name for name, tensor in tensors.items() if tensor.grad is None] == [frozen]
    assert kept == [shape for name, shape in (("weight", (32, 6)), ("inputs", (5, 6))) if name != frozen]
    assert len(always_onednn) == 1 + len(kept)


class Tripled(nn.Linear):
    """What a tool may put in the place of a layer."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(input)


def test_layers_are_torch_s_own_and_called_where_somebody_listens(always_onednn: list[tuple[int, ...]]) -> None:
    layer, inputs = nn.Linear(6, 5), torch.randn(32, 6, requires_grad=True)
    expected = layer(inputs).detach()
    assert_same(project(layer, inputs).detach(), expected)
    num_products = len(always_onednn)
    assert num_products == 1
    for register in (
        layer.register_forward_hook,
        layer.register_forward_pre_hook,
        layer.register_full_backward_hook,
        nn.modules.module.register_module_forward_hook,
    ):
        called: list[int] = []
        with register(lambda *_, called=called: called.append(1)):
            project(layer, inputs).sum().backward()
        assert called == [1]
    layer.forward = lambda input: 2 * expected  # type: ignore[method-assign]
    assert project(layer, inputs).equal(2 * expected)
    other = Tripled(6, 5)
    assert project(other, inputs).equal(other(inputs))
    assert len(always_onednn) == num_products


def test_the_models_layers_are_exactly_what_tools_look_for() -> None:
    layers = [module for module in make_model().modules() if isinstance(module, nn.Linear)]
    assert {type(module) for module in layers} == {nn.Linear}


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_elsewhere_it_is_torch_s_own(always_onednn: list[tuple[int, ...]]) -> None:
    ours, theirs = twins()
    inputs = torch.randn(32, 6)
    for few in (inputs[:3], inputs[:0], inputs[0]):
        assert ours(few).equal(theirs(few))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ours(inputs).equal(theirs(inputs))
    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
        assert ours(inputs).equal(theirs(inputs))
    assert torch.jit.trace(ours, inputs, check_trace=False)(inputs).equal(theirs(inputs))
    assert ours.to("meta")(inputs.to("meta")).shape == (32, 5)
    ours, theirs = twins()
    assert ours.double()(inputs.double()).equal(theirs.double()(inputs.double()))
    assert linear(inputs, ours.weight.detach().float().to_sparse_csr()).shape == (32, 5)
    assert always_onednn == []


def test_too_few_multiplications(monkeypatch: pytest.MonkeyPatch, always_onednn: list[tuple[int, ...]]) -> None:
    monkeypatch.setattr(linear_module, "_FEWEST_MULTIPLICATIONS", 32 * 6 * 5)
    layer = Linear(6, 5)
    layer(torch.ones(31, 6))
    assert always_onednn == []
    layer(torch.ones(32, 6))
    assert always_onednn == [(32, 6, 5, 6)]


@pytest.mark.parametrize("bias", [torch.ones(7), torch.ones(5, dtype=torch.float64)])
@pytest.mark.parametrize("inputs", [torch.ones(32, 6), torch.ones(32, 12)])
def test_what_does_not_fit_is_torch_s_error(
    inputs: torch.Tensor, bias: torch.Tensor, always_onednn: list[tuple[int, ...]]
) -> None:
    weight = torch.ones(5, 6)
    with pytest.raises(RuntimeError) as theirs:
        nn.functional.linear(inputs, weight, bias)
    with pytest.raises(RuntimeError) as ours:
        linear(inputs, weight, bias)
    if inputs.shape[1] != 6 or bias.dtype != torch.float32:  # else oneDNN notices it, in its own words
        assert str(ours.value) == str(theirs.value)
        assert always_onednn == []


def test_backward_inside_autocast(always_onednn: list[tuple[int, ...]]) -> None:
    ours, theirs = twins()
    inputs = torch.randn(32, 6)
    loss = ours(inputs).sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss.backward()
    theirs(inputs).sum().backward()
    assert ours.weight.grad is not None
    assert ours.weight.grad.dtype == torch.float32
    assert_same(ours.weight.grad, theirs.weight.grad)
    products = len(always_onednn)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = ours(inputs).sum()
    loss.backward()
    assert len(always_onednn) == products


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_function_transforms_and_forward_derivatives(always_onednn: list[tuple[int, ...]]) -> None:
    ours, theirs = twins()
    inputs, tangent = torch.randn(32, 6), torch.randn(32, 6)
    for transform in (torch.func.vmap, torch.func.jacrev, torch.func.jacfwd):
        assert_same(transform(ours)(inputs[:8]), transform(theirs)(inputs[:8]))
    parameters = dict(theirs.named_parameters())

    def loss_of(layer: nn.Module, values: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(layer, values, inputs).square().sum()

    by_parameters = [
        torch.func.grad(lambda values, layer=layer: loss_of(layer, values))(parameters) for layer in (ours, theirs)
    ]
    assert_same(by_parameters[0], by_parameters[1])
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(inputs, tangent)
        assert_same(forward_ad.unpack_dual(ours(dual)).tangent, tangent @ theirs.weight.t())
    assert always_onednn == []


def test_modes_that_watch_operators(always_onednn: list[tuple[int, ...]]) -> None:
    layer = Linear(6, 5)
    with FlopCounterMode(display=False) as counter:
        layer(torch.ones(32, 6)).sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 32 * 6 * 5
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert isinstance(layer(mode.from_tensor(torch.ones(32, 6))), torch._subclasses.FakeTensor)
    assert always_onednn == []


@pytest.fixture
def operators() -> list[str]:
    """The names of the operators in the graphs that `torch.compile(backend=...)` hands over."""
    torch._dynamo.reset()
    return []


def compile_with(operators: list[str], function: Any, **options: Any) -> Any:
    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        operators.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return torch._dynamo.lookup_backend("aot_eager")(graph, _)

    return torch.compile(function, fullgraph=True, backend=backend, **options)


OURS = linear_module._compiled_linear._qualname.replace("::", ".")


def test_compiled_training_uses_an_operator_of_ours(always_onednn: list[tuple[int, ...]], operators: list[str]) -> None:
    ours, theirs = twins()
    compiled = compile_with(operators, lambda states: ours(states).tanh(), dynamic=True)
    for rows in (32, 20, 12):
        inputs = torch.randn(rows, 2, 6, requires_grad=True)
        found = torch.autograd.grad(compiled(inputs).sum(), [inputs, *ours.parameters()])
        assert_same(found, torch.autograd.grad(theirs(inputs).tanh().sum(), [inputs, *theirs.parameters()]))
    assert [name for name in operators if OURS in name] == [f"{OURS}.default"]
    assert len(always_onednn) == 3 * 3


def test_compiled_inference_and_exported_graphs_are_torch_s(
    always_onednn: list[tuple[int, ...]], operators: list[str]
) -> None:
    ours, theirs = twins()
    inputs = torch.randn(32, 6)
    with torch.no_grad():
        assert compile_with(operators, ours)(inputs).equal(theirs(inputs))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compile_with(operators, ours)(inputs).equal(theirs(inputs))
    operators += [str(node.target) for node in torch.export.export(ours, (inputs,)).graph.nodes]
    assert any("linear" in name for name in operators)
    assert not any(OURS in name for name in operators)
    assert always_onednn == []


# From torch 2.15 on, torch's own check warns of itself.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("outputs", [3, 30])
@pytest.mark.parametrize("bias", [False, True])
def test_the_operator_of_compiled_graphs(outputs: int, bias: bool, always_onednn: list[tuple[int, ...]]) -> None:
    inputs, weight = torch.randn(4, 8, 6, requires_grad=True), torch.randn(outputs, 6, requires_grad=True)
    offset = torch.randn(outputs, requires_grad=True) if bias else None
    torch.library.opcheck(linear_module._compiled_linear, (inputs, weight, offset))
    assert always_onednn


def test_the_operator_is_the_one_we_know() -> None:
    """Torch does not document it; if this fails, it has moved: see `_call_onednn`."""
    schema = str(torch.ops.mkldnn._linear_pointwise.default._schema)
    arguments = "Tensor X, Tensor W, Tensor? B, str attr, Scalar?[] scalars, str? algorithm"
    assert schema == f"mkldnn::_linear_pointwise({arguments}) -> Tensor Y"


@pytest.mark.parametrize(
    ("capability", "maker", "family", "mkl", "faster", "faster_in_training"),
    [
        ("AVX512", "AuthenticAMD", 26, True, True, True),
        ("AVX512", "AuthenticAMD", 25, True, True, False),  # two halves, one after the other
        ("AVX512", "AuthenticAMD", 26, False, False, False),  # OpenBLAS is as fast
        ("AVX512", "GenuineIntel", 6, True, False, False),
        ("AVX2", "AuthenticAMD", 25, True, False, False),
        ("DEFAULT", "", 0, False, False, False),  # ARM
        ("SVE256", "", 0, False, False, False),
    ],
)
@pytest.mark.parametrize("linux", [True, False])
def test_which_processors(
    capability: str,
    maker: str,
    family: int,
    mkl: bool,
    faster: bool,
    faster_in_training: bool,
    linux: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read_text(path: Path, **_: Any) -> str:
        assert str(path) == "/proc/cpuinfo"
        if linux:
            return f"processor\t: 0\nvendor_id\t: {maker}\ncpu family\t: {family}\nmodel\t\t: 2\n"
        raise FileNotFoundError

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr("platform.processor", lambda: f"AMD64 Family {family} Model 2 Stepping 1, {maker}")
    monkeypatch.setattr(linear_module, "_find_family", linear_module._find_family.__wrapped__)
    assert linear_module.onednn_is_faster(in_training=False) == faster
    assert linear_module.onednn_is_faster(in_training=True) == faster_in_training


def test_training_goes_without_onednn_where_it_is_faster_only_for_the_same_shapes(
    always_onednn: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch of a training has a shape of its own, in the layers as in the loss, which makes its own gradients."""
    monkeypatch.setattr(linear_module, "onednn_is_faster", lambda in_training: not in_training)
    model = make_model()
    inputs = {"input_ids": torch.full((2, 6), 5), "labels": torch.full((2, 7), 5), "skip_logits": True}
    model(**inputs).loss.backward()
    assert not always_onednn
    with torch.no_grad():
        model(**inputs)
    assert always_onednn


def test_the_operator_has_a_legal_name_of_its_own_whatever_the_module_is_called() -> None:
    """A folder's own code is imported under the folder's name."""
    names = []
    for folder in ("my-model", "my model", "my+model", "m'o\"del", "my\tmodel", "größe", "模型", ""):
        spec = spec_from_file_location(f"transformers_modules.{folder}.linear", linear_module.__file__)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        inputs, weight = torch.randn(2, 3), torch.randn(4, 3)
        torch.testing.assert_close(module._compiled_linear(inputs, weight, None), inputs @ weight.t())
        names.append(module._compiled_linear._qualname)
    assert len({*names, linear_module._compiled_linear._qualname}) == len(names) + 1
