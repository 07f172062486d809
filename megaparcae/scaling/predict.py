"""Which mu, tokens and T for a budget and a serving cost, from a fit (yours or the paper's)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megaparcae.errors import UserError
from megaparcae.scaling.fit import percentile_interval
from megaparcae.scaling.laws import TRAINING, UNIFIED, Law, Params
from megaparcae.scaling.paper import paper_model
from megaparcae.scaling.scale import LoopScale

LOSS_TOLERANCE = 1e-3
"""Free loops are not worth asking for: T is the least within this relative loss of T = mu."""


@dataclass(frozen=True)
class Predictor:
    """A fitted law of one model shape."""

    law: Law
    """`unified`, or `training` when the fit knows nothing about T (then T = mu)."""
    params: dict[str, float]
    draws: dict[str, np.ndarray]
    """Bootstrap draws [draws] of every parameter; empty when there are none."""
    scale: LoopScale
    measured_mu: tuple[int, int]
    """Range of the trained mean recurrences."""
    held_out_error: float | None = None
    """Relative error on held-out runs: the interval of the loss when there are no draws."""

    @classmethod
    def load(cls, source: str) -> Predictor:
        """From `paper:140m`, `paper:370m`, or the fit.json that `fit` wrote."""
        if source.startswith("paper:"):
            return cls.from_paper(source.removeprefix("paper:"))
        path = Path(source)
        if path.is_dir():
            path = path / "fit.json"
        try:
            data = json.loads(path.read_text())["predictor"]
            return cls(
                law=UNIFIED if data["law"] == "unified" else TRAINING,
                params=data["params"],
                draws={name: np.array(values) for name, values in data["draws"].items()},
                scale=LoopScale(**data["scale"]),
                measured_mu=tuple(data["measured_mu"]),
            )
        except (json.JSONDecodeError, KeyError, TypeError):
            raise UserError(
                f"{path} is not a fit with a parametric law; give the fit.json of `fit`, or "
                "paper:140m or paper:370m"
            ) from None

    @classmethod
    def from_paper(cls, name: str) -> Predictor:
        """The published coefficients, with FLOPs by the authors' counter."""
        model = paper_model(name)
        return cls(
            law=UNIFIED if model.test_time else TRAINING,
            params={**model.training, **(model.test_time or {})},
            draws={},
            scale=model.scale,
            measured_mu=model.measured_mu,
            held_out_error=model.held_out_error,
        )

    def as_dict(self) -> dict[str, object]:
        """What `load` reads back."""
        return {
            "law": self.law.name,
            "params": self.params,
            "draws": {name: [float(f"{v:.7g}") for v in d] for name, d in self.draws.items()},
            "scale": self.scale.as_dict(),
            "measured_mu": list(self.measured_mu),
        }


@dataclass(frozen=True)
class Question:
    """What is given."""

    budget: float
    """FLOPs for training, and for serving when served_tokens is given."""
    served_tokens: float = 0.0
    """Tokens that will be served; their forward FLOPs are paid from the budget."""
    serving_flops: float | None = None
    """Most forward FLOPs per served token; bounds T."""
    max_mu: int | None = None
    """Largest mean recurrence to consider; None is the largest that was measured."""


@dataclass(frozen=True)
class Answer:
    """What to train and how to serve it; intervals are 90% over the bootstrap draws."""

    mu: int
    tokens: float
    num_loops: int
    loss: float
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of mu, tokens, num_loops and loss; only the loss when the fit has no draws."""
    notes: list[str] = field(default_factory=list)


def answer(predictor: Predictor, question: Question) -> Answer:
    """Lowest predicted loss over whole mu and T <= mu within budget and serving limit.

    UserError when no choice fits the budget or the limit.
    """
    grid = _candidates(predictor, question)
    best = _choose(predictor, question, grid, predictor.params)
    mu, loops, tokens = (int(grid["mu"][best]), int(grid["T"][best]), float(grid["D"][best]))
    columns = {name: column[best] for name, column in grid.items()}
    loss = float(predictor.law.predict(predictor.params, columns))
    return Answer(
        mu=mu,
        tokens=tokens,
        num_loops=loops,
        loss=loss,
        intervals=_intervals(predictor, question, grid, loss),
        notes=_notes(predictor, question, mu),
    )


def _candidates(predictor: Predictor, question: Question) -> dict[str, np.ndarray]:
    """Columns mu, T, N, D of every affordable choice [choices]."""
    if not question.budget > 0:
        raise UserError(f"--budget {question.budget:g} must be a positive number of FLOPs")
    max_mu = question.max_mu or predictor.measured_mu[1]
    pairs = [
        (mu, loops)
        for mu in range(1, max_mu + 1)
        for loops in (range(1, mu + 1) if predictor.law is UNIFIED else [mu])
    ]
    mu, loops = np.array(pairs, float).T
    scale = predictor.scale
    serving = scale.forward_flops_per_token(loops)
    tokens = (question.budget - question.served_tokens * serving) / scale.flops_per_token(mu)
    within_limit = serving <= (question.serving_flops or np.inf)
    if not within_limit.any():
        raise UserError(
            f"--serving-flops {question.serving_flops:g} is below the {serving.min():.3g} forward "
            "FLOPs of one loop; raise it or use a smaller model"
        )
    if not (tokens[within_limit] > 0).any():
        raise UserError(
            f"--budget {question.budget:g} can't pay for serving {question.served_tokens:g} tokens "
            f"at {serving.min():.3g} FLOPs each; raise it or serve fewer"
        )
    keep = within_limit & (tokens > 0)
    columns = {"mu": mu, "T": loops, "N": scale.unrolled_params(mu), "D": tokens}
    return {name: column[keep] for name, column in columns.items()}


def _choose(
    predictor: Predictor, question: Question, grid: dict[str, np.ndarray], params: Params
) -> int:
    """Index of the best choice; loops that cost nothing must be worth LOSS_TOLERANCE."""
    loss = predictor.law.predict(params, grid)
    best = int(np.argmin(loss))
    if question.served_tokens:
        return best
    good = (grid["mu"] == grid["mu"][best]) & (loss <= loss[best] * (1 + LOSS_TOLERANCE))
    return int(np.flatnonzero(good)[np.argmin(grid["T"][good])])


def _intervals(
    predictor: Predictor, question: Question, grid: dict[str, np.ndarray], loss: float
) -> dict[str, tuple[float, float]]:
    if not predictor.draws:
        if predictor.held_out_error is None:
            return {}
        error = predictor.held_out_error
        return {"loss": (loss * (1 - error), loss * (1 + error))}
    num_draws = len(next(iter(predictor.draws.values())))
    chosen: dict[str, list[float]] = {"mu": [], "tokens": [], "num_loops": [], "loss": []}
    for i in range(num_draws):
        params = {name: float(values[i]) for name, values in predictor.draws.items()}
        best = _choose(predictor, question, grid, params)
        at_best = {name: column[best] for name, column in grid.items()}
        chosen["mu"].append(at_best["mu"])
        chosen["tokens"].append(at_best["D"])
        chosen["num_loops"].append(at_best["T"])
        chosen["loss"].append(float(predictor.law.predict(params, at_best)))
    return {name: percentile_interval(np.array(values)) for name, values in chosen.items()}


def _notes(predictor: Predictor, question: Question, mu: int) -> list[str]:
    low, high = predictor.measured_mu
    notes = []
    if mu == (question.max_mu or high):
        notes.append(
            f"mu = {mu} is the largest that was considered; the law may prefer more (--max-mu)"
        )
    if not low <= mu <= high:
        notes.append(f"mu = {mu} lies outside the measured {low} to {high}: an extrapolation")
    if predictor.law is TRAINING:
        notes.append("the fit has no test-time part, so T = mu")
    return notes


def describe(predictor: Predictor, question: Question) -> str:
    """The answer as lines of text, with intervals and notes."""
    result = answer(predictor, question)
    shown = {
        "mu": f"{result.mu}",
        "tokens": f"{result.tokens:.4g}",
        "num_loops": f"{result.num_loops}",
        "loss": f"{result.loss:.4f}",
    }
    lines = []
    for name, value in shown.items():
        interval = result.intervals.get(name)
        span = f"   [{interval[0]:.4g} to {interval[1]:.4g}]" if interval else ""
        lines.append(f"{'T' if name == 'num_loops' else name:8s}{value}{span}")
    return "\n".join([*lines, *(f"note: {note}" for note in result.notes)])
