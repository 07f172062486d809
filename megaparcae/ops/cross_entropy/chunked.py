"""The same loss a few tokens at a time: memory does not grow with N x V.

Gradients are computed in the forward pass, chunk by chunk, so that no logit is kept or computed
twice; the backward pass multiplies them by the gradient of the (scalar) loss. The vocabulary may be
split over ranks: then each rank holds equal consecutive rows of the weight, and `Vocabulary`
combines what they know. The gradient of `hidden` is then this rank's summand.
"""

# N tokens, n tokens of a chunk, d width, V rows of the vocabulary on this rank
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable

Reduce = Callable[[Tensor], Tensor]


def _one_rank(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The rows of the weight that count, and how the ranks that share them exchange."""

    size: int
    """Rows that are tokens; those after them are padding."""
    index: int = 0
    """Which of the equal slices this rank holds."""
    reduce_max: Reduce = _one_rank
    """Largest over the ranks, elementwise."""
    reduce_sum: Reduce = _one_rank
    """Sum over the ranks, elementwise."""


def chunked_cross_entropy(
    hidden: Tensor,  # [N, d]
    weight: Tensor,  # [V, d]
    labels: Tensor,  # [N]
    *,
    vocabulary: Vocabulary,
    softcap: float | None = None,
    ignore_index: int = -100,
    chunk_size: int = 1024,
) -> tuple[Tensor, Tensor, Tensor]:
    """`naive_cross_entropy`, with the logits of at most chunk_size tokens in memory at a time.

    Also returns the loss of every token [N], fp32 and without gradient. A label outside the
    vocabulary gives an infinite loss.
    """
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device)
    rule = _Rule(
        vocabulary=vocabulary,
        softcap=softcap,
        ignore_index=ignore_index,
        chunk_size=chunk_size,
        product_type=torch.get_autocast_dtype(device) if autocast else weight.dtype,
        needs_grad=torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad),
    )
    loss_sum, losses = _ChunkedCrossEntropy.apply(hidden, weight, labels, rule)
    return loss_sum, (labels != ignore_index).sum(), losses


@dataclass(frozen=True, kw_only=True)
class _Rule:
    vocabulary: Vocabulary
    softcap: float | None
    ignore_index: int
    chunk_size: int
    product_type: torch.dtype
    needs_grad: bool


class _ChunkedCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, weight: Tensor, labels: Tensor, rule: _Rule
    ) -> tuple[Tensor, Tensor]:
        all_losses = torch.empty(len(labels), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if rule.needs_grad else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if rule.needs_grad else None
        with torch.autocast(hidden.device.type, enabled=False):
            rows = weight.to(rule.product_type)
            for start in range(0, hidden.shape[0], rule.chunk_size):
                chunk = slice(start, start + rule.chunk_size)
                tokens = hidden[chunk].to(rule.product_type)  # [n, d]
                losses, logits_grad = _chunk(F.linear(tokens, rows), labels[chunk], rule)
                all_losses[chunk] = losses
                if grad_hidden is not None and grad_weight is not None:
                    logits_grad = logits_grad.to(rule.product_type)
                    grad_hidden[chunk] = logits_grad @ rows
                    grad_weight += logits_grad.t() @ tokens
        ctx.save_for_backward(grad_hidden, grad_weight)  # type: ignore[arg-type]
        ctx.weight_type = weight.dtype  # type: ignore[attr-defined]
        ctx.mark_non_differentiable(all_losses)
        return all_losses.sum(), all_losses

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors  # type: ignore[attr-defined]
        weight_type = ctx.weight_type  # type: ignore[attr-defined]
        return (
            grad_hidden * grad.to(grad_hidden.dtype),
            (grad_weight * grad).to(weight_type),
            None,
            None,
        )


def _chunk(products: Tensor, labels: Tensor, rule: _Rule) -> tuple[Tensor, Tensor]:
    """Losses [n] and the gradient [n, V] of their sum with respect to the products [n, V].

    Without rule.needs_grad the second is meaningless.
    """
    logits, slope = _cap(products.float(), rule)
    counted = labels != rule.ignore_index
    vocabulary, num_rows = rule.vocabulary, logits.shape[1]
    first = vocabulary.index * num_rows
    logits[:, max(vocabulary.size - first, 0) :] = -torch.inf  # padding

    local = labels - first
    here = (local >= 0) & (local < num_rows)
    picked = torch.arange(len(labels), device=labels.device), local.masked_fill(~here, 0)
    target = logits[picked].masked_fill(~here, 0.0)
    peak = vocabulary.reduce_max(logits.amax(dim=1))  # so that exp can't overflow
    weights = logits.sub_(peak[:, None]).exp_()
    total, target = vocabulary.reduce_sum(torch.stack([weights.sum(dim=1), target])).unbind()
    target = target.masked_fill((labels < 0) | (labels >= vocabulary.size), -torch.inf)
    losses = (total.log() + peak - target).masked_fill(~counted, 0.0)
    if not rule.needs_grad:
        return losses, weights

    grad = weights.div_(total[:, None])  # softmax - one-hot
    grad[picked] -= here.float()
    if slope is not None:
        grad *= slope
    return losses, grad.masked_fill_(~counted[:, None], 0.0)


def _cap(logits: Tensor, rule: _Rule) -> tuple[Tensor, Tensor | None]:
    """c tanh(logits / c), in place, and its derivative if that is needed."""
    if rule.softcap is None:
        return logits, None
    logits = logits.div_(rule.softcap).tanh_()
    slope = 1 - logits.square() if rule.needs_grad else None
    return logits.mul_(rule.softcap), slope
