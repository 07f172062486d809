"""Expected loops of a depth sampler, for costs: E[n] without gradient and E[k] with."""

from __future__ import annotations

import numpy as np

from megaparcae.config.schema import RecurrenceConfig

_NODES = 200
"""Gauss-Hermite nodes over Huginn's log-normal rate; 200 give twelve digits."""


def expected_loops(config: RecurrenceConfig) -> tuple[float, float]:
    """(E[n], E[k]) of one sequence at full depth, that is after the curriculum."""
    mu, most = config.mean_recurrence, config.num_grad_loops
    match config.sampler:
        case "fixed" | "poisson_fill":
            return float(mu - most), float(most)
        case "poisson":
            return _truncated(mean=mu + np.exp(-mu), at_most=1 + _tail_sum(mu, 2, most))
        case "poisson_full":
            return 0.0, float(mu + np.exp(-mu))
        case "lognormal_poisson":  # T = 1 + Poisson(rate), log rate ~ N(log mu - 1/8, 1/2)
            nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
            rates = mu * np.exp(0.5 * nodes - 0.125)
            capped = [1 + _tail_sum(rate, 1, most - 1) for rate in rates]
            return _truncated(mean=1.0 + mu, at_most=float(weights @ capped / weights.sum()))
        case other:
            raise ValueError(f"model.recurrence.sampler={other!r} is not a sampler")


def _truncated(mean: float, at_most: float) -> tuple[float, float]:
    return float(mean - at_most), float(at_most)


def _tail_sum(rate: float, first: int, last: int) -> float:
    """sum over x in [first, last] of P(X >= x), X ~ Poisson(rate); from 1 it is E[min(X, last)]."""
    mass, below, total = np.exp(-rate), 0.0, 0.0
    for x in range(1, last + 1):
        below += mass  # P(X < x)
        total += (1 - below) if x >= first else 0.0
        mass *= rate / x
    return float(total)
