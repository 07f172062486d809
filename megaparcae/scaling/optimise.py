"""L-BFGS on many small problems at once: every restart or bootstrap draw is one row.

numpy float64; a row leaves the batch when it has converged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

# R problems, p parameters, m remembered steps

Objective = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""(theta [R, p], rows [R]) -> (value [R], gradient [R, p]); rows says which problem each is."""

ARMIJO = 1e-4
MAX_HALVINGS = 25


@dataclass
class _Memory:
    """The last m steps and gradient differences of every problem, oldest first."""

    steps: np.ndarray  # [m, R, p]
    changes: np.ndarray  # [m, R, p]
    inverse: np.ndarray  # [m, R] 1 / (s . y), 0 where there is no usable pair

    @classmethod
    def empty(cls, size: int, rows: int, width: int) -> _Memory:
        return cls(
            np.zeros((size, rows, width)), np.zeros((size, rows, width)), np.zeros((size, rows))
        )

    def push(self, rows: np.ndarray, step: np.ndarray, change: np.ndarray) -> None:
        """Append one pair for `rows`, unless its curvature is not positive."""
        product = _dot(step, change)
        good = product > 1e-12 * np.sqrt(_dot(step, step) * _dot(change, change))
        rows, product = rows[good], product[good]
        for store, value in ((self.steps, step), (self.changes, change)):
            store[:-1, rows] = store[1:, rows]
            store[-1, rows] = value[good]
        self.inverse[:-1, rows] = self.inverse[1:, rows]
        self.inverse[-1, rows] = 1 / product

    def direction(self, rows: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        """-H g by the two-loop recursion."""
        steps, changes, inverse = self.steps[:, rows], self.changes[:, rows], self.inverse[:, rows]
        q, alphas = gradient.copy(), []
        for s, y, rho in zip(steps[::-1], changes[::-1], inverse[::-1], strict=True):
            alphas.append(rho * _dot(s, q))
            q -= alphas[-1][:, None] * y
        newest = _dot(changes[-1], changes[-1]) * inverse[-1]
        fallback = 1 / np.maximum(1, np.linalg.norm(gradient, axis=1))
        q *= np.where(newest > 0, 1 / np.where(newest > 0, newest, 1), fallback)[:, None]
        for s, y, rho, alpha in zip(steps, changes, inverse, alphas[::-1], strict=True):
            q += (alpha - rho * _dot(y, q))[:, None] * s
        return -q


def minimise(
    objective: Objective,
    start: np.ndarray,
    max_iterations: int = 200,
    memory_size: int = 10,
    tolerance: float = 1e-10,
) -> tuple[np.ndarray, np.ndarray]:
    """(theta [R, p], value [R]) after L-BFGS from every row of `start`.

    A row stops when a step lowers its value by less than `tolerance` relative, or cannot lower it.
    """
    theta, active = start.copy(), np.arange(len(start))
    value, gradient = objective(theta, active)
    memory = _Memory.empty(memory_size, *theta.shape)
    for _ in range(max_iterations):
        if not len(active):
            break
        direction = memory.direction(active, gradient[active])
        slope = _dot(direction, gradient[active])
        uphill = ~(slope < 0)
        direction[uphill] = -gradient[active][uphill]
        slope[uphill] = -_dot(direction[uphill], direction[uphill])
        new_theta, new_value, new_gradient, moved = _line_search(
            objective, active, theta[active], value[active], direction, slope
        )
        gain = value[active] - new_value
        rows = active[moved]
        memory.push(rows, (new_theta - theta[active])[moved], new_gradient[moved] - gradient[rows])
        theta[rows], value[rows], gradient[rows] = (
            new_theta[moved],
            new_value[moved],
            new_gradient[moved],
        )
        active = active[moved & (gain > tolerance * np.abs(new_value) + 1e-300)]
    return theta, value


def _line_search(
    objective: Objective,
    rows: np.ndarray,
    theta: np.ndarray,
    value: np.ndarray,
    direction: np.ndarray,
    slope: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Halve each row's step until Armijo's rule holds; `moved` [R] tells where it did."""
    step = np.ones(len(rows))
    new_theta, new_value, new_gradient = theta.copy(), value.copy(), np.zeros_like(theta)
    pending = np.arange(len(rows))
    for _ in range(MAX_HALVINGS):
        if not len(pending):
            break
        trial = theta[pending] + step[pending, None] * direction[pending]
        trial_value, trial_gradient = objective(trial, rows[pending])
        accepted = trial_value <= value[pending] + ARMIJO * step[pending] * slope[pending]
        done = pending[accepted]
        new_theta[done], new_value[done] = trial[accepted], trial_value[accepted]
        new_gradient[done] = trial_gradient[accepted]
        pending = pending[~accepted]
        step[pending] /= 2
    moved = np.ones(len(rows), bool)
    moved[pending] = False
    return new_theta, new_value, new_gradient, moved


def _dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Row-wise inner products [R]."""
    return np.einsum("rp,rp->r", a, b)
