"""Everything a table of runs supports, fitted in one go: isoFLOP, training, test-time, unified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from megaparcae.errors import UserError
from megaparcae.log import logger
from megaparcae.scaling.fit import Fit, fit_law
from megaparcae.scaling.isoflop import IsoFlop, fit_isoflop
from megaparcae.scaling.laws import TRAINING, UNIFIED, UNIFIED_FORMS, Law
from megaparcae.scaling.predict import Predictor
from megaparcae.scaling.runs import Runs
from megaparcae.scaling.scale import LoopScale
from megaparcae.scaling.test_time import TestTimeStudy, fit_curves, has_curves

Part = TypeVar("Part")


@dataclass(frozen=True)
class HeldOut:
    """One held-out run against the laws (figure 26)."""

    runs: Runs
    """Rows of the run, by ascending T."""
    predicted: np.ndarray
    """Loss at each row by the unified law (the training law when there is none)."""
    oracle: np.ndarray | None
    """The same with the measured loss at T = mu as the floor; None without it or a decay."""

    @property
    def error(self) -> float:
        """Mean of |predicted / measured - 1|."""
        return float(np.abs(self.predicted / self.runs.loss - 1).mean())

    @property
    def oracle_error(self) -> float | None:
        """The same for the oracle."""
        if self.oracle is None:
            return None
        return float(np.abs(self.oracle / self.runs.loss - 1).mean())


@dataclass(frozen=True)
class Study:
    """The fits of one table; parts that the data don't support are None, with the reason."""

    runs: Runs
    isoflop: IsoFlop
    training: Fit | None
    test_time: TestTimeStudy | None
    unified: dict[str, Fit] | None
    """By form: `unified` (equation 4), `unified_gamma`, `unified_no_mu` (table 14)."""
    held_out: list[HeldOut]
    skipped: dict[str, str] = field(default_factory=dict)
    """Reason by part."""

    @property
    def best_fit(self) -> Fit | None:
        """The law predictions are made with."""
        return self.unified["unified"] if self.unified else self.training

    @property
    def predictor(self) -> Predictor | None:
        """For `predict`; None without a parametric law."""
        fit = self.best_fit
        if fit is None:
            return None
        mus = self.runs.looped().mu
        measured = (int(mus.min()), int(mus.max()))
        return Predictor(fit.law, fit.params, fit.draws, self.isoflop.scale, measured)


def run_study(
    runs: Runs,
    held_out: Runs | None = None,
    *,
    num_restarts: int = 1000,
    num_draws: int = 200,
    seed: int = 0,
) -> Study:
    """Fit all laws to the looped runs of a table and predict the held-out ones.

    UserError when not even the isoFLOP analysis is possible.
    """
    looped = runs.looped()
    if not len(looped):
        raise UserError("the table has no looped runs (mu > 1); train more mean recurrences")
    isoflop = fit_isoflop(runs, LoopScale.from_runs(looped), seed)
    at_depth = looped.at_training_depth()

    def fit(law: Law, rows: Runs, draws: int) -> Fit:
        logger.info("fitting the %s law to %d points", law.name, len(rows))
        return fit_law(
            law, rows.columns(), rows.loss, num_restarts=num_restarts, seed=seed,
            num_draws=draws, groups=rows.run_ids(),
        )  # fmt: skip

    def unified() -> dict[str, Fit]:
        if not has_curves(looped):
            raise UserError("the table has fewer than four T per run; evaluate at more depths")
        return {
            law.name: fit(law, looped, num_draws if law is UNIFIED else 0) for law in UNIFIED_FORMS
        }

    skipped: dict[str, str] = {}
    parts = Study(
        runs=runs,
        isoflop=isoflop,
        training=_try("training", skipped, lambda: fit(TRAINING, at_depth, num_draws)),
        test_time=_try("test_time", skipped, lambda: fit_curves(looped, seed=seed)),
        unified=_try("unified", skipped, unified),
        held_out=[],
        skipped=skipped,
    )
    if held_out is not None:
        if parts.best_fit is None:
            raise UserError(
                f"held-out runs need a parametric law, but: {skipped['training']}; extend the table"
            )
        parts.held_out.extend(_predict_runs(parts.best_fit, isoflop.scale, held_out))
    return parts


def _try(name: str, skipped: dict[str, str], part: Callable[[], Part]) -> Part | None:
    """The part, or None with the reason kept for the report."""
    try:
        return part()
    except UserError as reason:
        logger.warning("%s skipped: %s", name, reason)
        skipped[name] = str(reason)
        return None


def _predict_runs(fit: Fit, scale: LoopScale, runs: Runs) -> list[HeldOut]:
    """Predictions run by run; a missing params column is filled from the table's own line."""
    ids, result = runs.run_ids(), []
    for run in np.unique(ids):
        rows = runs.select(ids == run)
        rows = rows.select(np.argsort(rows.num_loops))
        if fit.law is TRAINING:
            rows = rows.at_training_depth()
        if not len(rows):
            continue
        columns = rows.columns()
        columns["N"] = np.where(np.isnan(rows.params), scale.unrolled_params(rows.mu), rows.params)
        result.append(HeldOut(rows, fit.predict(columns), _oracle(fit, rows)))
    return result


def _oracle(fit: Fit, rows: Runs) -> np.ndarray | None:
    """Measured loss at T = mu plus the law's decay."""
    at_depth = rows.at_training_depth()
    if not len(at_depth) or fit.law is not UNIFIED:
        return None
    decay = fit.params["Z"] * np.exp(-fit.params["z"] * rows.num_loops / rows.mu)
    return float(at_depth.loss[0]) + decay
