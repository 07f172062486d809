"""IsoFLOP analysis: a parabola per budget, then power laws of the optimal mu and tokens (figure 5).

At each budget the loss is a quadratic in ln mu; its minimum is mu*, and D* = budget / (FLOPs per
token at mu*). mu* = a C^gamma_mu and D* = b C^gamma_D by least squares in logarithms.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from megaparcae.errors import UserError
from megaparcae.log import logger
from megaparcae.scaling.fit import percentile_interval
from megaparcae.scaling.runs import Runs
from megaparcae.scaling.scale import LoopScale

NUM_DRAWS = 2000


@dataclass(frozen=True)
class Parabola:
    """Loss at one budget as c0 + c1 u + c2 u^2, u = ln mu."""

    budget: float
    mu: np.ndarray
    loss: np.ndarray
    coefficients: np.ndarray
    """Highest power first: c2, c1, c0."""

    @property
    def status(self) -> Literal["inside", "outside", "no minimum"]:
        """Where the minimum lies: within the measured mu, beyond them, or nowhere."""
        if self.coefficients[0] <= 0:
            return "no minimum"
        return "inside" if self.mu.min() <= self.best_mu <= self.mu.max() else "outside"

    @property
    def best_mu(self) -> float:
        """mu*; NaN when the parabola opens downwards."""
        return float(_vertex(self.coefficients[:, None])[0])

    def predict(self, mu: np.ndarray | float) -> np.ndarray:
        """Loss at mu."""
        return np.polyval(self.coefficients, np.log(mu))


@dataclass(frozen=True)
class PowerLaw:
    """y = coefficient * C^exponent."""

    coefficient: float
    exponent: float
    interval: tuple[float, float] | None
    """90% interval of the exponent from the scatter of the losses about the parabolas."""

    def predict(self, budget: np.ndarray | float) -> np.ndarray:
        """y at a budget."""
        return self.coefficient * np.asarray(budget, float) ** self.exponent


@dataclass(frozen=True)
class IsoFlop:
    """What the parabolic procedure says about a table."""

    parabolas: list[Parabola]
    scale: LoopScale
    mu_law: PowerLaw | None = None
    """mu*(C); None when fewer than two budgets have a usable minimum."""
    tokens_law: PowerLaw | None = None
    """D*(C)."""
    notes: list[str] = field(default_factory=list)
    """Budgets that were left out, and why."""

    @property
    def usable(self) -> list[Parabola]:
        """Parabolas whose minimum lies inside the measured mu."""
        return [p for p in self.parabolas if p.status == "inside"]

    def best_tokens(self, parabola: Parabola) -> float:
        """D* of one budget."""
        return float(parabola.budget / _smooth_cost(self.scale, parabola.best_mu))


def fit_isoflop(runs: Runs, scale: LoopScale, seed: int = 0) -> IsoFlop:
    """Parabolas and power laws of the looped runs (mu > 1), each at T = mu.

    UserError with fewer than two budgets or fewer than three mu at one of them.
    """
    runs = runs.looped().at_training_depth()
    budgets = np.unique(runs.budget)
    if len(budgets) < 2:
        raise UserError(
            f"the table has {len(budgets)} budget(s) with looped runs at T = mu; a power law needs "
            "at least two, better five: train more budgets"
        )
    parabolas = [_fit_parabola(runs.select(runs.budget == budget)) for budget in budgets]
    result = IsoFlop(parabolas, scale)
    notes = [
        f"budget {p.budget:g}: {_STATUS[p.status]}; left out of the power laws"
        for p in parabolas
        if p.status != "inside"
    ]
    for note in notes:
        logger.warning(note)
    if len(result.usable) < 2:
        return IsoFlop(parabolas, scale, notes=notes)
    draws = _noisy_minima(result.usable, seed)
    log_budget = np.log([p.budget for p in result.usable])
    minima = np.array([p.best_mu for p in result.usable])
    tokens = np.exp(log_budget) / _smooth_cost(scale, minima)
    token_draws = None if draws is None else np.exp(log_budget) / _smooth_cost(scale, draws)
    return IsoFlop(
        parabolas,
        scale,
        mu_law=_power_law(log_budget, minima, draws),
        tokens_law=_power_law(log_budget, tokens, token_draws),
        notes=notes,
    )


_STATUS = {
    "outside": "the parabola's minimum lies outside the measured mu",
    "no minimum": "the losses have no minimum in mu",
}


def _fit_parabola(runs: Runs) -> Parabola:
    if len(np.unique(runs.mu)) < 3:
        raise UserError(
            f"budget={runs.budget[0]:g} has losses at {len(np.unique(runs.mu))} values of mu > 1; "
            "a parabola needs at least three: train more mu at this budget or drop it"
        )
    order = np.argsort(runs.mu)
    mu, loss = runs.mu[order], runs.loss[order]
    return Parabola(float(runs.budget[0]), mu, loss, np.polyfit(np.log(mu), loss, 2))


def _noisy_minima(parabolas: list[Parabola], seed: int) -> np.ndarray | None:
    """[draws, budgets] minima after redrawing the losses with the scatter about all parabolas.

    None when every budget has just three mu, which leaves no scatter to measure.
    """
    residual = [p.loss - p.predict(p.mu) for p in parabolas]
    freedom = sum(len(r) - 3 for r in residual)
    if freedom <= 0:
        return None
    sigma = np.sqrt(sum(float(r @ r) for r in residual) / freedom)
    rng = np.random.default_rng(seed)
    minima = []
    for p in parabolas:
        losses = p.predict(p.mu)[:, None] + sigma * rng.standard_normal((len(p.mu), NUM_DRAWS))
        minima.append(_vertex(np.polyfit(np.log(p.mu), losses, 2)))
    return np.stack(minima, axis=1)


def _vertex(coefficients: np.ndarray) -> np.ndarray:
    """[n] minima of [3, n] parabolas in ln mu; NaN where there is none."""
    opens_up = coefficients[0] > 0
    curvature = np.where(opens_up, coefficients[0], 1.0)
    log_mu = np.clip(-coefficients[1] / (2 * curvature), -20, 20)
    return np.where(opens_up, np.exp(log_mu), np.nan)


def _smooth_cost(scale: LoopScale, mu: np.ndarray | float) -> np.ndarray:
    """FLOPs per token with mu_bwd = mu / 2 for every mu, so that D* has no steps."""
    return scale.flops_fixed + 2 * scale.flops_core * np.asarray(mu, float)


def _power_law(log_budget: np.ndarray, y: np.ndarray, draws: np.ndarray | None) -> PowerLaw:
    exponent, intercept = np.polyfit(log_budget, np.log(y), 1)
    interval = None
    if draws is not None:
        complete = draws[np.isfinite(draws).all(1)]
        if len(complete) >= NUM_DRAWS // 2:
            interval = percentile_interval(np.polyfit(log_budget, np.log(complete.T), 1)[0])
    return PowerLaw(float(np.exp(intercept)), float(exponent), interval)
