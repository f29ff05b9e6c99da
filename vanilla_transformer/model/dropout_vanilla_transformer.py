"""Dropout (5.4), faster on a CPU than torch's."""

import torch
from torch import nn


class Dropout(nn.Dropout):
    """torch's dropout, whose mask takes a quarter of the time on a CPU: torch draws a float64 for each element."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Drops elements, of any shape, with probability p to the nearest 1 / 65,536, and scales the others."""
        is_plain = type(inputs) is torch.Tensor and inputs.device.type == "cpu" and inputs.is_floating_point()
        if not (self.training and 0 < self.p < 1 and is_plain) or _is_transformed():
            return super().forward(inputs)
        limit = round(self.p * 2**16)
        # Four numbers of 16 bits from each one of 64.
        drawn = torch.randint(-(2**63), 2**63 - 1, ((inputs.numel() + 3) // 4,)).view(torch.int16)
        kept = drawn[: inputs.numel()].view(inputs.shape) >= limit - 2**15
        return inputs * kept.to(inputs.dtype).mul_(2**16 / max(2**16 - limit, 1))


def _is_transformed() -> bool:
    """Whether torch compiles, traces or transforms the model, and must see its own operator."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
    )
