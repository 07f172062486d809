"""Leaving a step out after its loss is known, in every layout and at every ZeRO stage."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def decline(loss: Tensor) -> Tensor:
    """The same loss, whose gradients are NaN: every engine skips such a step on all ranks.

    Gradients of earlier micro-batches may have been summed already, so there is nothing better to
    take back than the step itself.
    """
    return _Spoil.apply(loss)  # type: ignore[no-any-return]


class _Spoil(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * torch.nan
