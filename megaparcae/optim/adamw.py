"""AdamW in two forms, on lists of tensors that may be slices or row ranges of the parameters.

    m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2;  c1 = 1 - b1^t,  c2 = 1 - b2^t

`AdamW`     p <- p (1 - lr wd) - lr (m / c1) / (sqrt(v / c2) + eps): eps outside the root, after
            the bias correction (golden/muon_adamw).
`ClippedAdamW` (RDM; paper, section Q.1): without eps, p <- p (1 - lr wd) - lr (m / c1) /
            sqrt(v / c2) / max(1, rms), with rms^2 = mean over the whole parameter of
            g^2 / (v / c2): Adafactor's update clipping at threshold 1 (arXiv 1804.04235) as
            StableAdamW applies it (arXiv 2304.13013). An element that never had a gradient has
            0/0 here; it does not move and counts as 0 in the mean.

A missing gradient is a zero gradient: the averages decay and the parameter still moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MeanOverParameters = Callable[[Tensor], Tensor]
"""[number of tensors] sums over the local parts -> the means over the whole parameters."""

SMALLEST_ROOT = math.sqrt(torch.finfo(torch.float32).tiny)
"""Root of the least normal v; a denominator below it is rounding, and 0 / this is 0."""


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Plain AdamW by torch's fused kernel, or on CUDA apex's; `adamw_step` is its definition."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    apex: bool = False
    """NVIDIA's apex can be imported."""

    def update(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        *,
        lr: float,
        decayed: Sequence[bool],
        step: int,
        mean_over_parameters: MeanOverParameters,
    ) -> None:
        """One update in place, `step` = t counted from 1; the last argument is not needed here."""
        del mean_over_parameters
        if not parameters:
            return
        decay(parameters, decayed, lr * self.weight_decay)
        if self.apex and parameters[0].is_cuda:
            tensors = [list(t) for t in (gradients, parameters, exp_avgs, exp_avg_sqs)]
            apex_adam(tensors, lr, self.betas, self.eps, step)
            return
        count = torch.tensor(float(step), device=parameters[0].device)
        torch._fused_adamw_(
            list(parameters),
            list(gradients),
            list(exp_avgs),
            list(exp_avg_sqs),
            [],
            [count] * len(parameters),
            lr=lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=0.0,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )


@dataclass(frozen=True, kw_only=True)
class ClippedAdamW:
    """AdamW without epsilon, every parameter's update clipped to rms 1 (RDM's optimizer)."""

    lr: float
    betas: tuple[float, float]
    weight_decay: float

    def update(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        *,
        lr: float,
        decayed: Sequence[bool],
        step: int,
        mean_over_parameters: MeanOverParameters,
    ) -> None:
        """One update in place. Ranks without tensors call it too: the mean may be a collective."""
        b1, b2 = self.betas
        roots: list[Tensor] = []
        squares = torch.zeros(0)
        if parameters:
            decay(parameters, decayed, lr * self.weight_decay)
            update_moments(gradients, exp_avgs, exp_avg_sqs, self.betas)
            roots = list(torch._foreach_sqrt(list(exp_avg_sqs)))
            torch._foreach_clamp_min_(roots, SMALLEST_ROOT)
            ratios = torch._foreach_div(list(gradients), roots)
            torch._foreach_mul_(ratios, ratios)
            squares = torch.stack([ratio.sum() for ratio in ratios])
        means = mean_over_parameters(squares) * (1 - b2**step)
        if not parameters:
            return
        scales = (means.sqrt().clamp(min=1.0) * (1 - b1**step) / math.sqrt(1 - b2**step)).unbind()
        torch._foreach_mul_(roots, list(scales))
        torch._foreach_addcdiv_(list(parameters), list(exp_avgs), roots, value=-lr)


def apex_adam(
    tensors: list[list[Tensor]],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    step: int,
) -> None:
    """The kernel of apex's FusedAdam on [gradients, parameters, exp_avgs, exp_avg_sqs], in place.

    The class itself is an optimizer of its own; here the states are sharded, and decay is done.
    """
    import amp_C
    from apex.multi_tensor_apply import multi_tensor_applier

    unused_overflow = torch.zeros(1, dtype=torch.int, device=tensors[0][0].device)
    decoupled, correct_bias, weight_decay = 1, 1, 0.0
    options = (lr, *betas, eps, step, decoupled, correct_bias, weight_decay)
    multi_tensor_applier(amp_C.multi_tensor_adam, unused_overflow, tensors, *options)


def adamw_step(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    step: int,
) -> None:
    """The definition of AdamW without decay, one operation after the other."""
    update_moments(gradients, exp_avgs, exp_avg_sqs, betas)
    denominators = torch._foreach_sqrt(list(exp_avg_sqs))
    torch._foreach_div_(denominators, math.sqrt(1 - betas[1] ** step))
    torch._foreach_add_(denominators, eps)
    rate = lr / (1 - betas[0] ** step)
    torch._foreach_addcdiv_(list(parameters), list(exp_avgs), denominators, value=-rate)


def update_moments(
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    betas: tuple[float, float],
) -> None:
    """Move both averages towards the gradient and its square."""
    torch._foreach_lerp_(list(exp_avgs), list(gradients), 1 - betas[0])
    torch._foreach_mul_(list(exp_avg_sqs), betas[1])
    torch._foreach_addcmul_(list(exp_avg_sqs), list(gradients), list(gradients), value=1 - betas[1])


def decay(parameters: Sequence[Tensor], decayed: Sequence[bool], amount: float) -> None:
    """p <- p (1 - amount) where `decayed`."""
    chosen = [p for p, yes in zip(parameters, decayed, strict=True) if yes]
    if chosen and amount:
        torch._foreach_mul_(chosen, 1 - amount)
