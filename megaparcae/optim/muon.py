"""Muon as the paper uses it (section Q.2), batched over matrices of one shape.

    m <- m + (1 - mu)(g - m)                      an average, not a sum
    u  = g + mu (m - g)                           look-ahead
    X  = five Polar Express iterations on u       singular values to about 1 (arXiv 2505.16932)
    v <- average of X^2 per row (rows >= cols) or column, no bias correction
    Y  = X / sqrt(v), rescaled to the Frobenius norm of X
    p <- p - a Y - a wd p [Y p >= 0]              a = lr sqrt(max(1, rows / cols)), cautious decay

u, X, Y and v always belong to the whole matrix; momentum and p may be slices of it.
"""

# b matrices of one shape, r rows, c columns (of the whole matrix)
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
"""Coefficients (a, b, c) of X <- a X + (b A + c A^2) X with A = X X^T, one line per iteration."""

NORM_MARGIN = 1.02
"""The start is u / (1.02 |u|_F + 1e-6): its largest singular value must stay below 1."""


@dataclass(frozen=True, kw_only=True)
class Muon:
    """The update of a batch of matrices; only the orthogonalisation runs in `dtype`."""

    lr: float
    dtype: Literal["bf16", "fp32"]
    beta2: float = 0.95
    """Decay rate of the second moment."""

    def look_ahead(self, gradient: Tensor, momentum: Tensor, mu: float) -> Tensor:
        """Update the momentum [b, ...] in place and return u = g + mu (m - g)."""
        momentum.lerp_(gradient, 1 - mu)
        return gradient.lerp(momentum, mu)

    def second_moment_shape(self, full_shape: tuple[int, int]) -> tuple[int, int]:
        """One value per row if rows >= columns, else one per column."""
        rows, columns = full_shape
        return (rows, 1) if rows >= columns else (1, columns)

    def direction(self, look_ahead: Tensor, second_moment: Tensor) -> Tensor:
        """Y [b, r, c] fp32 of whole matrices; `second_moment` is updated in place."""
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[self.dtype]
        return self.equalize(orthogonalize(look_ahead, dtype).float(), second_moment)

    def equalize(self, x: Tensor, second_moment: Tensor) -> Tensor:
        """X [b, r, c] with its rows (or columns) brought to equal long-run size, norm kept.

        `second_moment` [b, r, 1] or [b, 1, c] is updated in place.
        """
        over = -1 if second_moment.shape[-1] == 1 else -2
        squares = x.square().mean(over, keepdim=True)
        second_moment.lerp_(squares, 1 - self.beta2)
        scale = second_moment.clamp(min=1e-10).rsqrt()
        # |X|^2 and |Y|^2 without another pass: a row of Y is a row of X times its scale.
        before = squares.sum((-2, -1), keepdim=True)
        after = (squares * scale.square()).sum((-2, -1), keepdim=True)
        return x * (scale * (before / after.clamp(min=1e-20)).sqrt())

    def apply(
        self,
        parameters: Sequence[Tensor],
        direction: Tensor,
        *,
        full_shape: tuple[int, int],
        lr: float,
        weight_decay: float,
    ) -> None:
        """Move b parameters, slices of matrices of `full_shape`, by their `direction` [b, ...]."""
        rate = lr * math.sqrt(max(1.0, full_shape[0] / full_shape[1]))
        change = direction * rate
        if weight_decay:
            values = torch.stack(list(parameters))
            values *= direction * values >= 0
            change.add_(values, alpha=rate * weight_decay)
        torch._foreach_sub_(list(parameters), list(change.unbind()))


def orthogonalize(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Five Polar Express iterations on [b, r, c], in `dtype`; the smaller side is squared."""
    norms = matrices.square().sum(-1, keepdim=True).sum(-2, keepdim=True).sqrt()
    x = (matrices / (NORM_MARGIN * norms + 1e-6)).to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    for a, b, c in POLAR_EXPRESS:
        square = x.mT @ x if tall else x @ x.mT
        polynomial = torch.baddbmm(square, square, square, beta=b, alpha=c)
        # A tall X is multiplied from the right, not transposed: its layout in memory stays.
        factors = (x, polynomial) if tall else (polynomial, x)
        x = torch.baddbmm(x, *factors, beta=a)
    return x
