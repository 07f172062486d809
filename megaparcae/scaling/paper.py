"""The paper's own coefficients as data, and what follows from them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megaparcae.errors import UserError
from megaparcae.scaling.fit import percentile_interval
from megaparcae.scaling.laws import TRAINING
from megaparcae.scaling.scale import LoopScale

DATA = Path(__file__).with_name("paper.json")


@dataclass(frozen=True)
class PaperModel:
    """One of the two sizes the paper fits (140M and 370M parameters)."""

    name: str
    training: dict[str, float]
    """E, X, x, Y, y (Table 11)."""
    test_time: dict[str, float] | None
    """Z, z of the unified law: estimated from Table 4 at 140m, unpublished at 370m."""
    held_out_error: float
    """Relative error the paper reports for its prediction of Table 5 (section 5.2)."""
    measured_mu: tuple[int, int]
    """Mean recurrences of the runs behind the fit."""
    scale: LoopScale
    """FLOPs per token by the authors' counter."""
    hardware_scale: LoopScale
    """FLOPs per token with the head and without the look-up tables."""
    held_out_mu: int
    held_out_tokens: float
    held_out_perplexity: float
    """Table 5's Parcae row."""
    optimal_mu: dict[float, int]
    """mu* by budget, as printed in Table 6 (whole, even numbers)."""

    def held_out_prediction(self) -> tuple[float, float]:
        """(predicted, measured) loss of Table 5's model; measured is the log of the perplexity."""
        columns = {
            "N": self.scale.unrolled_params(self.held_out_mu),
            "D": np.asarray(self.held_out_tokens),
        }
        predicted = float(TRAINING.predict(self.training, columns))
        return predicted, math.log(self.held_out_perplexity)


@dataclass(frozen=True)
class PublishedExponents:
    """gamma_mu and gamma_D from Table 6's optima, with 90% intervals from their rounding."""

    mu: float
    mu_interval: tuple[float, float]
    tokens: float
    tokens_interval: tuple[float, float]


def paper_model(name: str) -> PaperModel:
    """The coefficients of `140m` or `370m`; UserError for another name."""
    models = json.loads(DATA.read_text())["models"]
    if name not in models:
        raise UserError(f"the paper has no fit for {name!r}; choose {' or '.join(models)}")
    data = models[name]
    scale = LoopScale(**data["scale"])
    hardware = {**data["scale"], "flops_fixed": data["flops_fixed_hardware"]}
    return PaperModel(
        name=name,
        training=data["training"],
        test_time=data["test_time"],
        held_out_error=data["held_out_error"],
        measured_mu=tuple(data["measured_mu"]),
        scale=scale,
        hardware_scale=LoopScale(**hardware),
        held_out_mu=data["table5"]["mu"],
        held_out_tokens=data["table5"]["tokens"],
        held_out_perplexity=data["table5"]["perplexity"],
        optimal_mu={row["budget"]: row["mu"] for row in data["table6"]},
    )


def published_exponents(
    models: list[PaperModel], hardware_flops: bool, num_draws: int = 4000
) -> PublishedExponents:
    """Common exponents of all models' Table 6 optima, one intercept per model.

    The table prints mu* on the grid of trained mu, so each true minimum may lie up to 1 from it;
    the intervals redraw it uniformly there.
    """
    budget = np.concatenate([list(model.optimal_mu) for model in models])
    mu = np.concatenate([list(model.optimal_mu.values()) for model in models]).astype(float)
    owner = np.concatenate([np.full(len(m.optimal_mu), i) for i, m in enumerate(models)])
    scales = [model.hardware_scale if hardware_flops else model.scale for model in models]
    fixed = np.array([scale.flops_fixed for scale in scales])[owner]
    core = np.array([scale.flops_core for scale in scales])[owner]
    design = np.column_stack([np.log(budget), owner[:, None] == np.arange(len(models))])

    rng = np.random.default_rng(0)
    true_mu = np.vstack([mu, mu + rng.uniform(-1, 1, (num_draws, len(mu)))])
    tokens = budget / (fixed + 2 * core * true_mu)
    mu_slopes = np.linalg.lstsq(design, np.log(true_mu).T, rcond=None)[0][0]
    token_slopes = np.linalg.lstsq(design, np.log(tokens).T, rcond=None)[0][0]
    return PublishedExponents(
        mu=float(mu_slopes[0]),
        mu_interval=percentile_interval(mu_slopes[1:]),
        tokens=float(token_slopes[0]),
        tokens_interval=percentile_interval(token_slopes[1:]),
    )
