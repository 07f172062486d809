"""The scaling laws of the paper, all of one shape: a floor plus terms that decay.

Every term is A exp(-r f) with an amplitude A, a rate r and a feature f of the run:

    X N^-x                f = ln N          Z exp(-z T)         f = T
    Y D^-y                f = ln D          Z exp(-z T / mu^g)  f = T mu^-g
    Z (1 + T)^-z          f = ln(1 + T)     Z T^-z              f = ln T
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from megaparcae.errors import UserError

Columns = Mapping[str, np.ndarray]
"""N (unrolled parameters), D (tokens), T (loops) and mu, all broadcastable [points]."""
Params = Mapping[str, "float | np.ndarray"]
"""Value by parameter name; arrays [draws, 1] give predictions [draws, points]."""

MAX_RATE = 300.0
"""Largest rate of a feature scaled to 0..1."""
MAX_LOG_AMPLITUDE = 500.0
"""Largest logarithm of X, Y, Z: far beyond any fit, within a double."""


@dataclass(frozen=True)
class Term:
    """A exp(-r f)."""

    amplitude: str
    rate: str
    feature: Callable[[Columns], np.ndarray]
    uses: tuple[str, ...]
    """Columns the feature reads."""
    mu_power: str | None = None
    """Name of the learned g that divides the feature by mu^g; None when there is none."""


@dataclass(frozen=True)
class Law:
    """floor + sum of terms."""

    name: str
    formula: str
    terms: tuple[Term, ...]
    floor: str | None

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names, the floor first, a learned power of mu last."""
        names = [self.floor] if self.floor else []
        for term in self.terms:
            names += [term.amplitude, term.rate]
        return (*names, *(term.mu_power for term in self.terms if term.mu_power))

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns the law is a function of."""
        used = {name for term in self.terms for name in term.uses}
        if any(term.mu_power for term in self.terms):
            used.add("mu")
        return tuple(sorted(used))

    def predict(self, params: Params, columns: Columns) -> np.ndarray:
        """Loss in nats per token."""
        total = np.asarray(params[self.floor] if self.floor else 0.0)
        for term in self.terms:
            feature = term.feature(columns)
            if term.mu_power:
                feature = feature * columns["mu"] ** -np.asarray(params[term.mu_power])
            total = total + params[term.amplitude] * np.exp(
                -np.asarray(params[term.rate]) * feature
            )
        return total


def _log(name: str) -> Callable[[Columns], np.ndarray]:
    return lambda columns: np.log(columns[name])


SIZE = Term("X", "x", _log("N"), ("N",))
DATA = Term("Y", "y", _log("D"), ("D",))
LOOPS = Term("Z", "z", lambda c: c["T"] * 1.0, ("T",))
LOOPS_PER_MU = Term("Z", "z", lambda c: c["T"] / c["mu"], ("T", "mu"))
LOOPS_PER_MU_POWER = Term("Z", "z", lambda c: c["T"] * 1.0, ("T",), mu_power="gamma")

TRAINING = Law("training", "L(mu, D) = E + X N(mu)^-x + Y D^-y", (SIZE, DATA), "E")

TEST_TIME = Law("exponential", "L(T) = L_inf + Z exp(-z T)", (LOOPS,), "L_inf")
SHIFTED_POWER = Law(
    "shifted_power", "L(T) = L_inf + Z (1 + T)^-z",
    (Term("Z", "z", lambda c: np.log1p(c["T"]), ("T",)),), "L_inf",
)  # fmt: skip
POWER = Law("power", "L(T) = L_inf + Z T^-z", (Term("Z", "z", _log("T"), ("T",)),), "L_inf")
POWER_NO_FLOOR = Law("power_no_floor", "L(T) = Z T^-z", POWER.terms, None)
TEST_TIME_FORMS = (TEST_TIME, SHIFTED_POWER, POWER, POWER_NO_FLOOR)
"""Table 12, in its order."""

UNIFIED = Law(
    "unified", "L(T | mu, D) = E + X N(mu)^-x + Y D^-y + Z exp(-z T / mu)",
    (SIZE, DATA, LOOPS_PER_MU), "E",
)  # fmt: skip
UNIFIED_GAMMA = Law(
    "unified_gamma", "L(T | mu, D) = E + X N(mu)^-x + Y D^-y + Z exp(-z T / mu^gamma)",
    (SIZE, DATA, LOOPS_PER_MU_POWER), "E",
)  # fmt: skip
UNIFIED_NO_MU = Law(
    "unified_no_mu", "L(T | mu, D) = E + X N(mu)^-x + Y D^-y + Z exp(-z T)",
    (SIZE, DATA, LOOPS), "E",
)  # fmt: skip
UNIFIED_FORMS = (UNIFIED_GAMMA, UNIFIED, UNIFIED_NO_MU)
"""Table 14, in its order; the paper's equation 4 is `unified`."""


class ScaledLaw:
    """A law on one data set with well-conditioned, unconstrained parameters theta [R, p].

    Features run from 0 to 1 over the data, so amplitudes are the terms' values at the near end;
    theta holds logarithms of the floor, amplitudes and rates, and the learned power of mu itself.
    """

    def __init__(self, law: Law, columns: Columns) -> None:
        self.law = law
        self.features = np.stack([term.feature(columns) for term in law.terms])  # [k, n]
        powered = np.array([term.mu_power is not None for term in law.terms])
        # A learned power multiplies the feature, so that feature keeps its origin.
        self.origin = np.where(powered, 0.0, self.features.min(1))
        self.spread = np.maximum(self.features.max(1) - self.origin, 1e-12)
        self.features = (self.features - self.origin[:, None]) / self.spread[:, None]
        # Beyond its limit a term is gone by the second point, and its amplitude overflows.
        shift = np.maximum(np.abs(self.origin) / self.spread, 1e-12)
        self.max_rate = np.minimum(MAX_RATE, MAX_LOG_AMPLITUDE / shift)  # [k]
        self.powered = np.flatnonzero(powered)
        self.log_mu = np.log(columns["mu"])
        self.mean_log_mu = self.log_mu.mean()
        self.log_mu = self.log_mu - self.mean_log_mu
        self.num_floor = 1 if law.floor else 0
        self.num_theta = len(law.parameters)

    def random_theta(self, losses: np.ndarray, rows: int, rng: np.random.Generator) -> np.ndarray:
        """Starts: floor below the lowest loss, terms of the size of the losses' range."""
        low, spread = losses.min(), max(float(np.ptp(losses)), 1e-3 * losses.min())
        theta = np.empty((rows, self.num_theta))
        if self.num_floor:
            theta[:, 0] = np.log(
                low - np.minimum(spread * 10 ** rng.uniform(-2, 1, rows), 0.9 * low)
            )
        for k in range(len(self.features)):
            size = spread if self.num_floor else low
            theta[:, self.num_floor + 2 * k] = np.log(size) + rng.uniform(-1.5, 1.5, rows)
            theta[:, self.num_floor + 2 * k + 1] = rng.uniform(
                np.log(0.05), np.log(0.1 * self.max_rate[k]), rows
            )
        if len(self.powered):
            theta[:, -1] = rng.uniform(0, 1.5, rows)
        return theta

    def value_and_jacobian(self, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(prediction [R, n], its derivative by theta [R, p, n])."""
        amplitude = theta[:, self.num_floor : self.num_floor + 2 * len(self.features) : 2]
        rate = self._rates(theta)
        jacobian = np.empty((*theta.shape, self.features.shape[1]))
        total: np.ndarray | float = 0.0
        if self.num_floor:
            jacobian[:, 0] = np.exp(theta[:, :1])
            total = jacobian[:, 0]
        for k, feature in enumerate(self.features):
            f = feature[None]
            if k in self.powered:
                f = f * np.exp(-theta[:, -1:] * self.log_mu)
            decay = rate[:, k, None] * f
            term = np.exp(amplitude[:, k, None] - decay)
            jacobian[:, self.num_floor + 2 * k] = term
            free = rate[:, k, None] < self.max_rate[k]
            jacobian[:, self.num_floor + 2 * k + 1] = -decay * term * free
            if k in self.powered:
                jacobian[:, -1] = decay * self.log_mu * term
            total = total + term
        return np.broadcast_to(total, (len(theta), self.features.shape[1])), jacobian

    def _rates(self, theta: np.ndarray) -> np.ndarray:
        """[R, k] rates of the scaled features, held below their limits."""
        last = self.num_floor + 2 * len(self.features)
        return np.minimum(np.exp(theta[:, self.num_floor + 1 : last : 2]), self.max_rate)

    def to_params(self, theta: np.ndarray) -> dict[str, np.ndarray]:
        """theta [R, p] -> the law's parameters by name, each [R]."""
        params, rates = {}, self._rates(theta)
        if self.law.floor:
            params[self.law.floor] = np.exp(theta[:, 0])
        for k, term in enumerate(self.law.terms):
            log_amplitude = theta[:, self.num_floor + 2 * k]
            rate = rates[:, k] / self.spread[k]
            params[term.amplitude] = np.exp(log_amplitude + rate * self.origin[k])
            if term.mu_power:
                rate = rate * np.exp(theta[:, -1] * self.mean_log_mu)
            params[term.rate] = rate
        if len(self.powered):
            params[self.law.parameters[-1]] = theta[:, -1]
        return params


def check_columns(law: Law, columns: Columns, num_points: int) -> None:
    """UserError when the data can't determine the law: too few points or a constant column."""
    needed = len(law.parameters) + 1
    if num_points < needed:
        raise UserError(
            f"the {law.name} law has {len(law.parameters)} parameters but the table has only "
            f"{num_points} points for it; give at least {needed}"
        )
    for name in law.columns:
        values = columns[name]
        if np.isnan(values).any():
            column = {"N": "params", "D": "tokens"}.get(name, name)
            raise UserError(
                f"the {law.name} law needs the column {column} (in every row); add the unrolled "
                "parameter count"
                if name == "N"
                else f"the {law.name} law needs column {column}"
            )
        if len(np.unique(values)) < 2:
            raise UserError(
                f"the {law.name} law needs at least two different values of {name}, but every row "
                f"has {values.flat[0]:g}; add runs"
            )
