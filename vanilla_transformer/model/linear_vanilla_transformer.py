"""Linear maps by the faster of the two matrix libraries in torch.

On a CPU, torch multiplies float32 matrices with Intel's MKL, which leaves the AVX-512 units of AMD's processors idle.
oneDNN takes less time there, on Zen 5 about half. Torch has no setting for this, but an operator of its compiler calls
it.
"""

import functools
import hashlib
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module
from transformers.utils import output_capturing

# Smaller products are over before oneDNN has set out. Of two or three rows MKL reads the weights as fast.
_FEWEST_MULTIPLICATIONS = 2**20
_FEWEST_ROWS = 4
_ZEN_4, _ZEN_5 = 25, 26  # families of processors; only some of 25 have AVX-512


@torch.compiler.assume_constant_result
def onednn_is_faster(in_training: bool) -> bool:
    """Says whether torch would multiply with MKL on a processor by AMD that has AVX-512, and that would take longer.

    oneDNN makes a program for each new number of rows, in about 0.5 ms, and keeps the last thousand, 0.4 MB each.
    Batches of a training have ever new numbers: that pays only where units of AVX-512 have its full width.
    """
    return _find_family() >= (_ZEN_5 if in_training else _ZEN_4)


@functools.cache
def _find_family() -> int:
    """The family of an AMD processor with AVX-512 on which torch multiplies with MKL; 0 is any other processor."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkl.is_available():
        return 0
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return 0
    try:
        processor = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        processor = platform.processor()
    family = re.search(r"family\W+(\d+)", processor, re.IGNORECASE)
    return int(family[1]) if family and "AuthenticAMD" in processor else 0


def linear(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, in_training: bool | None = None
) -> torch.Tensor:
    """Returns inputs (..., K) times weight (N, K) plus bias (N,), as torch's `linear` does, by the faster library.

    `in_training` says whether it is part of a training; default: whether gradients are recorded.
    """
    if torch.compiler.is_compiling():
        if _suit_compiled_training(inputs, weight, bias):
            return _compiled_linear(inputs, weight, bias)
    elif _suit(inputs, weight, bias, torch.is_grad_enabled() if in_training is None else in_training):
        return multiply(inputs, weight, bias)
    return nn.functional.linear(inputs, weight, bias)


def _suit(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, in_training: bool) -> bool:
    """Whether oneDNN is faster here, and nothing is at work that knows torch's own operators only."""
    return (
        onednn_is_faster(in_training)
        and torch._C._get_tracing_state() is None
        and inputs.numel() * weight.shape[0] >= _FEWEST_MULTIPLICATIONS
        and _are_plain(inputs, weight, bias)
        and inputs.numel() >= _FEWEST_ROWS * weight.shape[1]
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
        and forward_ad._current_level < 0
        and bool(torch.backends.mkldnn.enabled)
    )


def _suit_compiled_training(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """The same in a graph that `torch.compile` makes for training, whatever its sizes: they may not be known yet."""
    return (
        torch.is_grad_enabled()
        and onednn_is_faster(in_training=True)
        and _are_plain(inputs, weight, bias)
        and not torch.compiler.is_exporting()
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
    )


def _are_plain(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether these are float32 matrices on the CPU that fit together."""
    return (
        inputs.shape[-1:] == weight.shape[1:]
        and _is_plain(inputs)
        and _is_plain(weight)
        # oneDNN reads a bias as if its values lay side by side.
        and (bias is None or (bias.ndim == 1 and bias.is_contiguous() and _is_plain(bias)))
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.dtype is torch.float32
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and type(tensor) in (torch.Tensor, nn.Parameter)
    )


def multiply(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Returns inputs (..., K) times the transpose of weight (N, K), plus bias (N,), by oneDNN: (..., N)."""
    if torch.is_grad_enabled():
        return cast(torch.Tensor, _Multiply.apply(inputs, weight, bias))
    return _call_onednn(inputs, weight, bias)


def _call_onednn(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return cast(torch.Tensor, torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], ""))


class _Multiply(torch.autograd.Function):
    """oneDNN's product with its derivatives, which are such products too and can themselves be differentiated."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        _save_factors(ctx, inputs, weight)
        return _call_onednn(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _differentiate(ctx, grad_outputs[0], multiply)


def _save_factors(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> None:
    # Each is kept for the other's derivative only: next to frozen weights no inputs.
    wants_inputs, wants_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(inputs if wants_weight else None, weight if wants_inputs else None)


def _differentiate(
    ctx: Any, gradient: torch.Tensor, product: Callable[[torch.Tensor, torch.Tensor, None], torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """Returns the gradients by inputs, weight and bias; `product` is the function they are the derivatives of."""
    inputs, weight = ctx.saved_tensors
    wants_inputs, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    rows = gradient.reshape(-1, gradient.shape[-1])
    by_inputs, by_weight = None, None
    if wants_inputs:
        by_inputs = product(gradient, weight.t(), None)
    if wants_weight:
        inputs = inputs.reshape(-1, inputs.shape[-1])
        # oneDNN takes a transposed second factor as it is, but copies the first: that should be the smaller one.
        if rows.shape[1] > inputs.shape[1]:
            by_weight = product(inputs.t(), rows.t(), None).t()
        else:
            by_weight = product(rows.t(), inputs.t(), None)
    return by_inputs, by_weight, rows.sum(dim=0) if wants_bias else None


# In a compiled graph the operator above would be one whose weights never change. The name is the module's, which may be
# loaded twice: from the installed package, and from beside a checkpoint, whose folder may have any name. It is hashed,
# since torch takes ASCII letters, digits and "_" only.
_NAMESPACE = f"vanilla_transformer_{hashlib.sha256(__name__.encode()).hexdigest()[:16]}"


@torch.library.custom_op(f"{_NAMESPACE}::linear", mutates_args=())
def _compiled_linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return linear(inputs, weight, bias).contiguous()


@_compiled_linear.register_fake
def _(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return inputs.new_empty(*inputs.shape[:-1], weight.shape[0])


_compiled_linear.register_autograd(
    lambda ctx, gradient: _differentiate(ctx, gradient, _compiled_linear),
    setup_context=lambda ctx, inputs, output: _save_factors(ctx, *inputs[:2]),
)


def is_watched(module: nn.Module) -> bool:
    """Whether somebody attached code to the module, or to every module, that must see it called."""
    return bool(
        # The library's own stay after the first call with `output_hidden_states=True`, and do nothing in others.
        any(hook.__module__ != output_capturing.__name__ for hook in module._forward_hooks.values())
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in vars(module)
        or torch_module._has_any_global_hook()
    )


def project(layer: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Calls a linear map, (..., K) to (..., N), by the faster library if it is exactly `torch.nn.Linear`."""
    if type(layer) is nn.Linear and not is_watched(layer):
        return linear(inputs, layer.weight, layer.bias)
    return layer(inputs)
