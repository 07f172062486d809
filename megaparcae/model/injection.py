"""How the prelude's output e enters every loop.

Each injection splits into `prepare`, which does not depend on the loop index and runs once per
micro-batch, and `forward`, which runs once per loop.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaparcae.config.schema import ModelConfig


class Drive(NamedTuple):
    """The part of u = f(h, e) that is the same in every loop."""

    term: Tensor
    """[B, S, d], added to the state's part."""
    decay: Tensor | None
    """[d], multiplies the state (diagonal only)."""

    def rows(self, count: int) -> Drive:
        """The first `count` rows."""
        return Drive(self.term[:count], self.decay)

    def detached(self) -> Drive:
        """For the loops without gradient."""
        return Drive(self.term.detach(), None if self.decay is None else self.decay.detach())


class DiagonalInjection(nn.Module):
    """u = decay * h + step * (e B^T);  step = softplus(dt_bias), decay = exp(-step exp(A_log)).

    0 < decay < 1 by construction, so the loop's linear part is stable (paper, section 4).
    """

    def __init__(self, width: int, input_width: int | None = None) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(width))
        self.dt_bias = nn.Parameter(torch.empty(width))
        self.B = nn.Parameter(torch.empty(width, input_width or width))

    def prepare(self, e: Tensor) -> Drive:
        step = F.softplus(self.dt_bias)
        return Drive(step * F.linear(e, self.B), torch.exp(-step * torch.exp(self.A_log)))

    def forward(self, h: Tensor, drive: Drive) -> Tensor:
        assert drive.decay is not None
        return torch.addcmul(drive.term, drive.decay, h)


class LinearInjection(nn.Module):
    """u = W [h ; e], state first (Huginn)."""

    def __init__(self, width: int, input_width: int | None = None) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.empty(width, width + (input_width or width)))

    def prepare(self, e: Tensor) -> Drive:
        return Drive(F.linear(e, self.weight[:, self.width :]), None)

    def forward(self, h: Tensor, drive: Drive) -> Tensor:
        return drive.term + F.linear(h, self.weight[:, : self.width])


class AdditiveInjection(nn.Module):
    """u = h + e"""

    def prepare(self, e: Tensor) -> Drive:
        return Drive(e, None)

    def forward(self, h: Tensor, drive: Drive) -> Tensor:
        return h + drive.term


Injection = DiagonalInjection | LinearInjection | AdditiveInjection


def make_injection(config: ModelConfig) -> Injection:
    """The injection that `model.injection` names."""
    match config.injection:
        case "diagonal":
            return DiagonalInjection(config.hidden_size)
        case "linear":
            return LinearInjection(config.hidden_size)
        case "additive":
            return AdditiveInjection()
        case other:
            raise ValueError(f"model.injection={other!r}: choose diagonal, linear or additive")
