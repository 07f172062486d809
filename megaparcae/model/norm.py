"""Root-mean-square normalisation, always computed in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaparcae.ops.rms_norm import rms_norm

QK_NORM_EPS = 2.0**-23
"""Epsilon of the weightless query/key norm: fp32's machine epsilon, whatever the input type."""


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension.

    The normalised value is rounded to x's type before the fp32 weight multiplies it, so that the
    result is fp32 when weights are.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype:
            return rms_norm(x, self.weight, self.eps)
        return rms_normalize(x, self.eps) * self.weight


def rms_normalize(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension; in fp32, returned in x's type."""
    return F.rms_norm(x.float(), x.shape[-1:], None, eps).type_as(x)
