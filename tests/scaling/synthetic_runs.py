"""Run tables drawn from known laws on the paper's 140M grid."""

from __future__ import annotations

import numpy as np

from megaparcae.scaling.laws import Law
from megaparcae.scaling.paper import paper_model
from megaparcae.scaling.runs import Runs, runs_from_rows

BUDGETS = (1e18, 2e18, 4e18, 8e18, 16e18, 64e18)
MUS = (2, 4, 6, 8, 10, 12)
LOOPS = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24)
SCALE = paper_model("140m").scale
TRUE = {"E": 2.6, "X": 3e4, "x": 0.6, "Y": 2.0e5, "y": 0.6, "Z": 0.8, "z": 6.5, "gamma": 0.9}


def law_runs(
    law: Law,
    true: dict[str, float],
    loops: tuple[int, ...] | None = None,
    noise: float = 0.0,
    tokens: float | None = None,
    seed: int = 0,
) -> Runs:
    """Losses of a law over the grid; `loops` None is T = mu; `noise` is relative."""
    rng = np.random.default_rng(seed)
    rows = []
    for budget in BUDGETS if tokens is None else (0.0,):
        for mu in MUS:
            d = tokens or budget / float(SCALE.flops_per_token(mu))
            for t in loops or (mu,):
                columns = {"N": SCALE.unrolled_params(mu), "D": d, "T": t, "mu": mu}
                loss = float(law.predict(true, columns)) * np.exp(noise * rng.standard_normal())
                rows.append(
                    {"budget": budget, "mu": mu, "tokens": d, "T": t, "loss": loss,
                     "params": float(SCALE.unrolled_params(mu))}
                )  # fmt: skip
    return runs_from_rows(rows, "synthetic", require_budget=tokens is None)


def parabola_runs(gamma: float, noise: float = 0.0, seed: int = 0) -> Runs:
    """Exact parabolas in ln mu whose minima follow mu* = 5.5 (C / 8e18)^gamma."""
    rng = np.random.default_rng(seed)
    rows = []
    for budget in BUDGETS:
        best = 5.5 * (budget / 8e18) ** gamma
        for mu in MUS:
            loss = 3.0 * (budget / 8e18) ** -0.05 + 0.03 * np.log(mu / best) ** 2
            rows.append(
                {"budget": budget, "mu": mu, "loss": loss * np.exp(noise * rng.standard_normal()),
                 "tokens": budget / float(SCALE.flops_per_token(mu))}
            )  # fmt: skip
    return runs_from_rows(rows, "synthetic")
