"""How the prelude's output e enters every loop.

An injection runs once per micro-batch and gives the parts of a `Drive`: all that does not depend on
the loop index. `Drive.inject` is what is left for each loop. The parts are a plain tuple, since
ZeRO-3 finds out where a module's backward pass begins from the tensors that it returns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaparcae.config.schema import ModelConfig
from megaparcae.model.precision import as_multiplied

# B rows, S positions, d width

DriveParts = tuple[Tensor, Tensor | None, Tensor | None]
"""Fields of a `Drive`."""


@dataclass(frozen=True)
class Drive:
    """u = decay * h + W h + term, with whichever of the first two the injection has."""

    term: Tensor
    """[B, S, d]: what e contributes, the same in every loop."""
    decay: Tensor | None = None
    """[d]"""
    weight: Tensor | None = None
    """W [d, d]"""

    def inject(self, h: Tensor) -> Tensor:
        """The core's input u for the first len(h) rows."""
        term = self.term[: len(h)]
        if self.decay is not None:
            return torch.addcmul(term, self.decay, h)
        return term + (h if self.weight is None else F.linear(h, self.weight))

    def detached(self) -> Drive:
        """For the loops without gradient."""
        return Drive(
            self.term.detach(),
            None if self.decay is None else self.decay.detach(),
            None if self.weight is None else self.weight.detach(),
        )


class DiagonalInjection(nn.Module):
    """u = decay * h + step * (e B^T);  step = softplus(dt_bias), decay = exp(-step exp(A_log)).

    0 < decay < 1 by construction, so the loop's linear part is stable (paper, section 4).
    """

    def __init__(self, width: int, input_width: int | None = None) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(width))
        self.dt_bias = nn.Parameter(torch.empty(width))
        self.B = nn.Parameter(torch.empty(width, input_width or width))

    def forward(self, e: Tensor) -> DriveParts:
        step = F.softplus(self.dt_bias)
        return step * F.linear(e, self.B), torch.exp(-step * torch.exp(self.A_log)), None


class LinearInjection(nn.Module):
    """u = W [h ; e], state first (Huginn)."""

    def __init__(self, width: int, input_width: int | None = None) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.empty(width, width + (input_width or width)))

    def forward(self, e: Tensor) -> DriveParts:
        of_state, of_input = self.weight.split([self.width, self.weight.shape[1] - self.width], 1)
        # A copy of its own: sharded weights may be gone by the time the loop runs.
        return F.linear(e, of_input), None, as_multiplied(of_state).contiguous()


class AdditiveInjection(nn.Module):
    """u = h + e"""

    def forward(self, e: Tensor) -> DriveParts:
        return e, None, None


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
