"""Test-time curves L(T): four forms per curve, inside the data and beyond mu (tables 12 and 13)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megaparcae.errors import UserError
from megaparcae.scaling.fit import Fit, fit_law, huber
from megaparcae.scaling.laws import TEST_TIME_FORMS
from megaparcae.scaling.runs import Runs

MIN_POINTS = 4
"""Fewest T of a curve: the forms have three parameters."""


@dataclass(frozen=True)
class CurveFits:
    """One model evaluated at many T, and each form's fit to it."""

    runs: Runs
    """Rows of the one model, by ascending T."""
    fits: dict[str, Fit]
    """By the form's name, over all T."""
    extrapolated: dict[str, float]
    """Mean Huber loss at T > mu of each form fitted at T <= mu; empty when either side is short."""

    @property
    def mu(self) -> float:
        """Mean recurrence of the model."""
        return float(self.runs.mu[0])

    @property
    def floor_error(self) -> float | None:
        """|L_inf / L(T = mu) - 1| of the exponential form (table 13)."""
        at_mu = self.runs.loss[self.runs.num_loops == self.runs.mu]
        floor = self.fits["exponential"].params["L_inf"]
        return abs(floor / float(at_mu[0]) - 1) if len(at_mu) else None


@dataclass(frozen=True)
class TestTimeStudy:
    """All curves, and Table 12's averages over them."""

    __test__ = False  # pytest: not a test class

    curves: list[CurveFits]

    def mean_huber(self, form: str) -> float:
        """Huber loss per point, averaged over curves, all T."""
        return float(np.mean([c.fits[form].huber / c.fits[form].num_points for c in self.curves]))

    def mean_extrapolated(self, form: str) -> float | None:
        """The same for T > mu after fitting T <= mu; None when no curve allows it."""
        values = [c.extrapolated[form] for c in self.curves if c.extrapolated]
        return float(np.mean(values)) if values else None


def fit_curves(runs: Runs, num_restarts: int = 40, seed: int = 0) -> TestTimeStudy:
    """Fit every curve that has at least four T; UserError when there is none."""
    ids = runs.run_ids()
    curves = []
    for run in np.unique(ids):
        curve = runs.select(ids == run)
        curve = curve.select(np.argsort(curve.num_loops))
        if len(np.unique(curve.num_loops)) >= MIN_POINTS:
            curves.append(fit_curve(curve, num_restarts, seed))
    if not curves:
        raise UserError(
            f"no run has losses at {MIN_POINTS} or more T; evaluate the models at more depths "
            "(column T) to fit test-time curves"
        )
    return TestTimeStudy(curves)


def has_curves(runs: Runs) -> bool:
    """Whether any run has enough T for a curve."""
    return bool(np.bincount(runs.run_ids()).max() >= MIN_POINTS)


def fit_curve(curve: Runs, num_restarts: int = 40, seed: int = 0) -> CurveFits:
    """Fit one model's losses at four or more T, given by ascending T."""
    near = curve.select(curve.num_loops <= curve.mu)
    far = curve.select(curve.num_loops > curve.mu)
    fits, extrapolated = {}, {}
    for form in TEST_TIME_FORMS:
        fits[form.name] = fit_law(
            form, curve.columns(), curve.loss, num_restarts=num_restarts, seed=seed
        )
        if len(near) >= MIN_POINTS and len(far):
            fit = fit_law(form, near.columns(), near.loss, num_restarts=num_restarts, seed=seed)
            error = np.log(fit.predict(far.columns()) / far.loss)
            extrapolated[form.name] = float(huber(error).mean())
    return CurveFits(curve, fits, extrapolated)
