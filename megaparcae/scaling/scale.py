"""How one looped model's size and cost grow with the mean recurrence: two straight lines.

N(mu) = params_fixed + params_core * mu            parameters of the unrolled model
C/D   = flops_fixed + flops_core * (mu + 2 * mu_bwd)  training FLOPs per token, mu_bwd = ceil(mu/2)

The second line is the authors' counter exactly (core forward: one unit per loop, backward: two per
loop with gradient) and the hardware count closely.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from megaparcae.errors import UserError
from megaparcae.scaling.runs import Runs

COST_TOLERANCE = 0.05
"""Largest relative difference between a run's budget / tokens and the line through all of them."""


@dataclass(frozen=True)
class LoopScale:
    """One model shape, for any mean recurrence."""

    params_fixed: float
    """Parameters outside the core; NaN when unknown."""
    params_core: float
    """Parameters of the core, counted once per loop by N(mu)."""
    flops_fixed: float
    """Training FLOPs per token outside the core."""
    flops_core: float
    """Forward FLOPs per token of one loop."""

    @classmethod
    def from_functions(
        cls, unrolled_params: Callable[[int], float], flops_per_token: Callable[[int], float]
    ) -> LoopScale:
        """Both lines through the values at mu = 2 and mu = 4."""
        core = unrolled_params(4) / 2 - unrolled_params(2) / 2
        flops_core = (flops_per_token(4) - flops_per_token(2)) / 4
        return cls(
            params_fixed=unrolled_params(2) - 2 * core,
            params_core=core,
            flops_fixed=flops_per_token(2) - 4 * flops_core,
            flops_core=flops_core,
        )

    @classmethod
    def from_runs(cls, runs: Runs) -> LoopScale:
        """Both lines by least squares through budget / tokens and params of a table.

        UserError when budget / tokens is not a function of mu: then it is no isoFLOP table.
        """
        if len(np.unique(runs.mu)) < 2:
            raise UserError(
                f"the table has looped runs (mu > 1) at {len(np.unique(runs.mu))} value(s) of mu; "
                "a study of depth needs at least three: train more mu"
            )
        cost = runs.budget / runs.tokens
        units = loop_units(runs.mu)
        weights = 1 / cost  # relative errors
        flops_core, flops_fixed = np.polyfit(units, cost, 1, w=weights)
        error = np.abs(np.polyval([flops_core, flops_fixed], units) / cost - 1)
        if error.max() > COST_TOLERANCE:
            i = int(error.argmax())
            raise UserError(
                f"budget={runs.budget[i]:g} at mu={runs.mu[i]:g} has tokens={runs.tokens[i]:g}, "
                f"{error[i]:.0%} off the cost per token of the other runs; correct the column, or "
                "fit tables with different cost conventions or models apart"
            )
        params_core, params_fixed = np.nan, np.nan
        if np.isfinite(runs.params).all():
            params_core, params_fixed = np.polyfit(runs.mu, runs.params, 1)
        return cls(*map(float, (params_fixed, params_core, flops_fixed, flops_core)))

    def unrolled_params(self, mu: np.ndarray | float) -> np.ndarray:
        """N(mu)."""
        return self.params_fixed + self.params_core * np.asarray(mu, float)

    def flops_per_token(self, mu: np.ndarray | float) -> np.ndarray:
        """Training FLOPs per token; between whole numbers mu_bwd is mu / 2."""
        return self.flops_fixed + self.flops_core * loop_units(mu)

    def forward_flops_per_token(self, num_loops: np.ndarray | float) -> np.ndarray:
        """Serving FLOPs per token at T loops; a third of the training FLOPs of the fixed part."""
        return self.flops_fixed / 3 + self.flops_core * np.asarray(num_loops, float)

    def as_dict(self) -> dict[str, float]:
        """The four numbers by name."""
        return asdict(self)


def loop_units(mu: np.ndarray | float) -> np.ndarray:
    """mu + 2 mu_bwd: forward-loop equivalents of one training token."""
    mu = np.asarray(mu, float)
    grad_loops = np.where(mu == np.round(mu), np.ceil(mu / 2), mu / 2)
    return mu + 2 * grad_loops
