"""A linear map that uses the faster of the two matrix libraries in torch.

On a CPU, torch multiplies float32 matrices with Intel's MKL, which leaves the AVX-512 units of other makers' processors
idle, while oneDNN, the library that torch uses for bfloat16, does not: on an AMD EPYC of 2024 it takes about half the
time. Torch has no setting for this, but an operator of its own compiler calls oneDNN directly.
"""

import functools
import platform
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

_FEWEST_ROWS = 16  # products with fewer rows read the weights once and wait for them: MKL is as fast or faster


@functools.cache
def onednn_is_faster() -> bool:
    """Says whether this processor has AVX-512 and another maker than MKL."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available():
        return False
    try:
        description = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        description = platform.processor()
    return "Intel" not in description and hasattr(torch.ops.mkldnn, "_linear_pointwise")


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
        ctx.save_for_backward(inputs, weight)
        return _call_onednn(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        (gradient,) = grad_outputs
        wants_inputs, wants_weight, wants_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (
            multiply(gradient, weight.t()) if wants_inputs else None,
            multiply(rows.t(), inputs.reshape(-1, inputs.shape[-1]).t()) if wants_weight else None,
            rows.sum(dim=0) if wants_bias else None,
        )


class Linear(nn.Linear):
    """`torch.nn.Linear` in every respect but the library that multiplies (see the module's text).

    It is plain `torch.nn.Linear` wherever something else takes part: another device or dtype, autocast, compilation,
    export, torch.func, quantised or divided weights, and while `torch.backends.mkldnn` is switched off.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Maps (..., in_features) to (..., out_features)."""
        if self._suits_onednn(input):
            return multiply(input, self.weight, self.bias)
        return super().forward(input)

    def _suits_onednn(self, inputs: torch.Tensor) -> bool:
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return False
        weight = self.weight
        return (
            onednn_is_faster()
            and type(inputs) is torch.Tensor
            and type(weight) is nn.Parameter
            and inputs.dtype == weight.dtype == torch.float32
            and inputs.device.type == weight.device.type == "cpu"
            and inputs.numel() >= _FEWEST_ROWS * inputs.shape[-1]
            and bool(torch.backends.mkldnn.enabled)
            and not torch.is_autocast_enabled("cpu")
            and not torch._C._are_functorch_transforms_active()
        )


__all__ = ["Linear", "multiply", "onednn_is_faster"]
