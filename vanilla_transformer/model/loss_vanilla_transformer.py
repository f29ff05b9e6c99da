"""What training needs besides the model: decoder inputs made from labels, and section 5.4's loss with label smoothing.

The logits are the largest tensor of a training step: with 37,000 words, 72 times the hidden states they come from. The
loss is therefore computed from the hidden states, a few rows of logits at a time.

Shapes: B batch, T target length, N number of labels that count, D d_model, V vocabulary.
"""

from functools import partial
from typing import Any, TypeGuard

import torch
from torch import nn

from .linear_vanilla_transformer import is_watched, linear, project

IGNORED_LABEL = -100
MINIMUM_ROWS = 256
_LOGITS_ON_A_GPU = 2**25  # of a chunk; a GPU does smaller ones faster than Python starts them


def shift_tokens_right(labels: torch.Tensor, pad_token_id: int, decoder_start_token_id: int) -> torch.Tensor:
    """Shifts the target (B, T) right by one position (3.1), behind the start symbol; -100 becomes padding."""
    start = torch.full_like(labels[:, :1], decoder_start_token_id)
    shifted = torch.cat([start, labels[:, :-1]], dim=1)
    return shifted.masked_fill(shifted == IGNORED_LABEL, pad_token_id)


def should_skip_logits(skip_logits: bool | None, labels: torch.Tensor | None, training: bool) -> bool:
    """Says whether to return no logits: `None` means in training mode with labels, where only the loss is of use."""
    if skip_logits and labels is None:
        raise ValueError("skip_logits=True needs labels: without logits the loss is all there is to return.")
    return training and labels is not None if skip_logits is None else skip_logits


def compute_logits_and_loss(
    output_layer: nn.Module,
    hidden_states: torch.Tensor,
    labels: torch.Tensor | None,
    label_smoothing: float,
    num_items_in_batch: torch.Tensor | int | None,
    skip_logits: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Projects (B, T, D) to logits (B, T, V), or `None` with `skip_logits`, and compares them with labels (B, T)."""
    if labels is not None and not torch.compiler.is_compiling() and labels.shape != hidden_states.shape[:2]:
        shapes = f"{tuple(labels.shape)}, and the decoder's inputs {tuple(hidden_states.shape[:2])}"
        raise ValueError(f"labels have the shape {shapes}: they must have the same.")
    if skip_logits and labels is not None and has_plain_weights(output_layer, hidden_states):
        loss = fused_cross_entropy(output_layer, hidden_states, labels, label_smoothing, num_items_in_batch)
        return None, loss
    logits = project(output_layer, hidden_states)
    if labels is None:
        return logits, None
    loss = label_smoothed_cross_entropy(logits, labels, label_smoothing, num_items_in_batch)
    return None if skip_logits else logits, loss


def label_smoothed_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    label_smoothing: float,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """Cross-entropy with the target smoothed towards the uniform distribution (5.4), in nats per token: a scalar.

    Logits are (B, T, V), labels (B, T), of which those with -100 do not count; `label_smoothing` is the paper's
    epsilon_ls. `num_items_in_batch` is the number of tokens to divide by, where a batch is processed in parts (gradient
    accumulation, several processes); `None`: the number of labels that count.
    """
    loss = nn.functional.cross_entropy(
        logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32)),
        labels.flatten().to(logits.device),
        ignore_index=IGNORED_LABEL,
        label_smoothing=label_smoothing,
        reduction="mean" if num_items_in_batch is None else "sum",
    )
    return loss if num_items_in_batch is None else _divide(loss, num_items_in_batch)


def _divide(total: torch.Tensor, count: torch.Tensor | int) -> torch.Tensor:
    return total / (count.to(total.device) if isinstance(count, torch.Tensor) else count)


def has_plain_weights(output_layer: nn.Module, hidden_states: torch.Tensor) -> TypeGuard[nn.Linear]:
    """Whether the loss may be computed from the output layer's weights, or the layer itself has to be called.

    That is so where torch compiles or transforms the loss (torch.func), where it is not just `nn.Linear` (PEFT,
    quantized, offloaded, hooked), and where its weights are not at hand (another device, ZeRO-3, DTensor).
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if type(output_layer) is not nn.Linear or is_watched(output_layer):
        return False
    weight, bias, device = output_layer.weight, output_layer.bias, hidden_states.device
    tensors = [hidden_states, weight] if bias is None else [hidden_states, weight, bias]
    return (
        device.type != "meta"
        and all(type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device == device for tensor in tensors)
        and weight.shape == (output_layer.out_features, output_layer.in_features)
        and (hidden_states.dtype == weight.dtype or torch.is_autocast_enabled(device.type))
    )


def _product_dtype(hidden_states: torch.Tensor) -> torch.dtype:
    """The type in which the output layer is multiplied; outside of CUDA nobody scales gradients for float16's range."""
    kind = hidden_states.device.type
    asked = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    if kind == "cuda" or (kind == "cpu" and asked is torch.bfloat16 and hidden_states.dtype is not torch.float64):
        return asked or hidden_states.dtype
    return torch.promote_types(hidden_states.dtype, torch.float32)


def fused_cross_entropy(
    output_layer: nn.Linear,
    hidden_states: torch.Tensor,
    labels: torch.Tensor,
    label_smoothing: float,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """The value and gradients of [`label_smoothed_cross_entropy`] without the logits (B, T, V).

    At most max(D, 256) rows of logits exist at a time, on a GPU also as many as make 2^25 logits. Their gradients are
    made on the way, so that `backward` can run once and not be differentiated. The output layer [`has_plain_weights`];
    hidden states are (B, T, D).
    """
    labels = labels.flatten().to(hidden_states.device)
    counted = labels != IGNORED_LABEL
    # On a GPU this waits for the decoder, once per step; in return, padding is not multiplied with the vocabulary.
    rows, targets = hidden_states.flatten(0, 1)[counted], labels[counted]
    if targets.numel() == 0:
        return label_smoothed_cross_entropy(
            output_layer(hidden_states[:1, :1]), labels[None, :1], label_smoothing, num_items_in_batch
        )
    dtype, is_training = _product_dtype(hidden_states), torch.is_grad_enabled()
    # That is the type which autocast asks for; from here on it does nothing.
    with torch.autocast(hidden_states.device.type, enabled=False):
        total: torch.Tensor = _LossInChunks.apply(
            rows, output_layer.weight, output_layer.bias, targets, label_smoothing, dtype, is_training
        )
        return _divide(total.float(), targets.numel() if num_items_in_batch is None else num_items_in_batch)


class _LossInChunks(torch.autograd.Function):
    """The sum of the smoothed losses and its gradients: matrices are multiplied in `dtype`, and summed in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        label_smoothing: float,
        dtype: torch.dtype,
        with_gradients: bool,
    ) -> torch.Tensor:
        wants_rows, wants_weight, wants_bias = (with_gradients and wanted for wanted in ctx.needs_input_grad[:3])
        rows, weight, bias = rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        summed_in = torch.promote_types(dtype, torch.float32)
        by_rows = torch.empty_like(rows, dtype=summed_in) if wants_rows else None
        by_weight: torch.Tensor | None = None
        by_bias = torch.zeros_like(bias, dtype=summed_in) if wants_bias and bias is not None else None
        # MPS has no float64.
        total = rows.new_zeros((), dtype=torch.float32 if rows.device.type == "mps" else torch.float64)
        size = max(MINIMUM_ROWS, weight.shape[1], _LOGITS_ON_A_GPU // weight.shape[0] if weight.is_cuda else 0)
        product = partial(linear, in_training=with_gradients)
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            logits = product(rows[part], weight, bias).to(summed_in)
            labels, largest = targets[part, None], logits.amax(dim=-1)
            # The loss is log Z minus (1 - eps) z_y + eps mean_v z_v.
            scores = (1 - label_smoothing) * logits.gather(1, labels)[:, 0]
            if label_smoothing:
                scores += label_smoothing * logits.mean(dim=-1)
            # In place. Of torch's exponentials the one in softmax is the fastest by far.
            probabilities = torch.softmax(logits, dim=-1, out=logits)
            # The largest probability is exp(largest logit) / Z.
            total += (largest - probabilities.amax(dim=-1).log() - scores).sum(dtype=total.dtype)
            gradient = _differentiate_chunk(probabilities, labels, label_smoothing)
            if by_bias is not None:
                by_bias += gradient.sum(dim=0)
            gradient = gradient.to(dtype)
            if by_rows is not None:
                by_rows[part] = product(gradient, weight.t())
            if wants_weight:
                of_chunk = product(rows[part].t(), gradient.t())  # (D, V): oneDNN copies a transposed first factor
                by_weight = of_chunk.to(summed_in) if by_weight is None else by_weight.add_(of_chunk)
        ctx.gradients = (by_rows, None if by_weight is None else by_weight.t(), by_bias)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # only with create_graph=True
            raise RuntimeError(
                "Second derivatives of this loss would be wrong, since its gradients are made with it. "
                "Call the model with skip_logits=False to differentiate its loss twice."
            )
        if ctx.gradients is None:
            raise RuntimeError(
                "backward called twice: the gradients of this loss are made with it and used up. "
                "Call the model with skip_logits=False to differentiate its loss again."
            )
        (factor,) = grad_outputs
        gradients = [None if gradient is None else gradient.mul_(factor).contiguous() for gradient in ctx.gradients]
        ctx.gradients = None
        return (*gradients, None, None, None, None)


def _differentiate_chunk(probabilities: torch.Tensor, labels: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """Makes, in place, the gradients by the logits of probabilities p: p - (1 - eps) at the label (N, 1) - eps / V."""
    if label_smoothing:
        probabilities -= label_smoothing / probabilities.shape[1]
    return probabilities.scatter_add_(1, labels, probabilities.new_full(labels.shape, label_smoothing - 1))
