"""Which rows of a micro-batch run which loop. No torch, for the planner.

Rows of a micro-batch are sorted by depth, deepest first, so that the rows that still need a loop
are always a prefix.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

GRAD_COST = 3
"""Cost of a core block with gradient, in forward passes of it without."""


@dataclass(frozen=True)
class LoopPlan:
    """Row counts of every loop of a micro-batch, both phases non-increasing."""

    no_grad: tuple[int, ...]
    """no_grad[t]: rows that run loop t of the phase without gradient."""
    grad: tuple[int, ...]
    """grad[t]: rows that run loop t of the phase with gradient; all rows run the first."""
    grad_cost: int = GRAD_COST
    """Cost of a row with gradient, for the cuts; more when it is computed again."""

    @staticmethod
    def from_depths(
        num_no_grad: Sequence[int], num_grad: Sequence[int], grad_cost: int = GRAD_COST
    ) -> LoopPlan:
        """Per-row depths n_i and k_i, both non-increasing along the rows."""
        for depths in (num_no_grad, num_grad):
            assert all(a >= b for a, b in itertools.pairwise(depths)), (
                f"rows must be sorted by depth, deepest first: {list(depths)}"
            )
        return LoopPlan(_rows_per_loop(num_no_grad), _rows_per_loop(num_grad), grad_cost)

    def work(self) -> int:
        """Loop work in row applications of the core without gradient."""
        return sum(self.no_grad) + self.grad_cost * sum(self.grad)

    def cut(self, fraction: float, num_layers: int) -> int:
        """Index into the (loop, layer) sequence where `fraction` of the work is done.

        Every stage of a pipeline derives its borders from this alone; 0 and 1 are exact.
        """
        total = len(self.no_grad) + len(self.grad)
        if fraction == 1.0:
            return total * num_layers
        target = fraction * self.work() * num_layers
        done = 0
        for loop, cost in enumerate(
            (*self.no_grad, *(self.grad_cost * rows for rows in self.grad))
        ):
            if done + cost * num_layers >= target:
                return loop * num_layers + round((target - done) / cost)
            done += cost * num_layers
        return total * num_layers

    def no_grad_units(self, begin: int, end: int, num_layers: int) -> tuple[int, int]:
        """The part of [begin, end) that lies in the phase without gradient."""
        border = len(self.no_grad) * num_layers
        return min(begin, border), min(end, border)

    def grad_units(self, begin: int, end: int, num_layers: int) -> tuple[int, int]:
        """The part of [begin, end) in the phase with gradient, counted from its own start."""
        border = len(self.no_grad) * num_layers
        return max(begin - border, 0), max(end - border, 0)


def _rows_per_loop(depths: Sequence[int]) -> tuple[int, ...]:
    return tuple(sum(depth > t for depth in depths) for t in range(max(depths, default=0)))


def last_rows(rows: tuple[int, ...], loop: int) -> slice:
    """The rows for which `loop` is the last of its phase."""
    return slice(rows[loop + 1] if loop + 1 < len(rows) else 0, rows[loop])


def depth_order(num_no_grad: Sequence[int], num_grad: Sequence[int]) -> list[int]:
    """Row order, deepest first, in which both phases' depths descend.

    Every sampler gives depths for which this order exists: a row with more loops without gradient
    never has fewer with gradient.
    """
    rows = range(len(num_grad))
    return sorted(rows, key=lambda i: (-int(num_no_grad[i]), -int(num_grad[i]), i))
