"""Fit a law: Huber loss on log losses, L-BFGS from many random starts, bootstrap intervals."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from megaparcae.scaling.laws import Columns, Law, ScaledLaw, check_columns
from megaparcae.scaling.optimise import minimise

DELTA = 1e-3
"""Where Huber's loss turns from square to linear (Hoffmann et al.), in nats of log loss."""
SCOUT_ITERATIONS = 40
"""Every start gets this many L-BFGS iterations; the best tenth is then run to convergence."""
FINAL_ITERATIONS = 600
CHUNK = 64
"""Problems evaluated together: keeps the work arrays in the processor's cache."""


@dataclass(frozen=True)
class Fit:
    """One law and what the data say about it."""

    law: Law
    params: dict[str, float]
    huber: float
    """Sum over points of Huber's loss on log loss (Tables 11 and 14)."""
    mean_error: float
    """Mean of |predicted / measured - 1|."""
    num_points: int
    num_agreeing: int
    """Starts among those run to convergence that end within 1% of the best Huber loss."""
    draws: dict[str, np.ndarray] = field(default_factory=dict)
    """Bootstrap draws of every parameter [draws]; empty when none were made."""

    def predict(self, columns: Columns) -> np.ndarray:
        """Loss at each point."""
        return self.law.predict(self.params, columns)

    def predict_draws(self, columns: Columns) -> np.ndarray:
        """[draws, points]; the fit itself as the only draw when there is no bootstrap."""
        if not self.draws:
            return self.predict(columns)[None]
        return self.law.predict({k: v[:, None] for k, v in self.draws.items()}, columns)

    def interval(self, name: str) -> tuple[float, float] | None:
        """90% bootstrap interval of a parameter."""
        return percentile_interval(self.draws[name]) if self.draws else None


def fit_law(
    law: Law,
    columns: Columns,
    losses: np.ndarray,
    *,
    num_restarts: int = 1000,
    seed: int = 0,
    num_draws: int = 0,
    groups: np.ndarray | None = None,
) -> Fit:
    """The best of `num_restarts` L-BFGS runs, and `num_draws` bootstrap refits started from it.

    The bootstrap draws whole `groups` [points] (the points of one run) with replacement.
    UserError when the data can't determine the law.
    """
    check_columns(law, columns, len(losses))
    rng = np.random.default_rng(seed)
    scaled = ScaledLaw(law, columns)
    log_losses = np.log(losses)
    start = scaled.random_theta(losses, num_restarts, rng)
    weights = np.ones((1, len(losses)))
    theta, value = _minimise(scaled, log_losses, weights, start, SCOUT_ITERATIONS)
    best = np.argsort(value)[: max(1, min(num_restarts, 10 + num_restarts // 10))]
    theta, value = _minimise(scaled, log_losses, weights, theta[best], FINAL_ITERATIONS)
    order = np.argsort(value)
    winner = theta[order[:1]]
    params = {name: float(v[0]) for name, v in scaled.to_params(winner).items()}
    error = law.predict(params, columns) / losses - 1
    return Fit(
        law=law,
        params=params,
        huber=float(huber(np.log1p(error)).sum()),
        mean_error=float(np.abs(error).mean()),
        num_points=len(losses),
        num_agreeing=int((value <= value.min() * 1.01 + 1e-12).sum()),
        draws=_bootstrap(scaled, log_losses, theta[order[:3]], num_draws, groups, rng),
    )


def huber(error: np.ndarray) -> np.ndarray:
    """Huber's loss of errors in log loss."""
    size = np.abs(error)
    return np.where(size <= DELTA, 0.5 * size**2, DELTA * (size - 0.5 * DELTA))


def percentile_interval(draws: np.ndarray) -> tuple[float, float]:
    """The middle 90% of the finite draws."""
    low, high = np.percentile(draws[np.isfinite(draws)], [5, 95])
    return float(low), float(high)


def _bootstrap(
    scaled: ScaledLaw,
    log_losses: np.ndarray,
    starts: np.ndarray,
    num_draws: int,
    groups: np.ndarray | None,
    rng: np.random.Generator,
) -> dict[str, np.ndarray]:
    """Refit with every group drawn a random number of times."""
    if not num_draws:
        return {}
    groups = np.arange(len(log_losses)) if groups is None else groups
    ids, index = np.unique(groups, return_inverse=True)
    counts = rng.multinomial(len(ids), np.full(len(ids), 1 / len(ids)), size=num_draws)
    weights = counts[:, index].astype(float)  # [draws, points]
    fits = [
        _minimise(scaled, log_losses, weights, np.tile(start, (num_draws, 1)), FINAL_ITERATIONS)
        for start in starts
    ]
    best = np.argmin([value for _, value in fits], axis=0)
    theta = np.stack([theta for theta, _ in fits])[best, np.arange(num_draws)]
    return scaled.to_params(theta)


def _minimise(
    scaled: ScaledLaw,
    log_losses: np.ndarray,
    weights: np.ndarray,
    start: np.ndarray,
    max_iterations: int,
) -> tuple[np.ndarray, np.ndarray]:
    """L-BFGS on mean Huber loss in units of delta^2, chunk by chunk; `weights` is [1 or R, n]."""

    def objective(theta: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        w = weights if len(weights) == 1 else weights[offset + rows]
        value, jacobian = scaled.value_and_jacobian(theta)
        error = (np.log(value) - log_losses) / DELTA
        size = np.abs(error)
        loss = w * np.where(size <= 1, 0.5 * error**2, size - 0.5)
        slope = w * np.clip(error, -1, 1) / (DELTA * value)
        scale = len(log_losses)
        return loss.sum(1) / scale, np.einsum("rn,rpn->rp", slope, jacobian) / scale

    results = []
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        for offset in range(0, len(start), CHUNK):
            results.append(minimise(objective, start[offset : offset + CHUNK], max_iterations))
    theta, value = (np.concatenate(part) for part in zip(*results, strict=True))
    return theta, np.where(np.isfinite(value), value, np.inf)
