"""Which samples a step takes, and which rank and micro-batch computes each of them.

Both are functions of the step and of the samples' costs alone, so a run goes on with the same
samples after any interruption and on any layout.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

MAX_SWAPS_PER_BIN = 8
"""The repair after the snake has never needed more than two or three."""

# G samples of a step; D data-parallel ranks, M micro-batches, R rows


def step_sample_ids(step: int, global_batch_size: int) -> np.ndarray:
    """int64 [G]: step s takes the samples s G .. s G + G - 1, whatever the layout."""
    return step * global_batch_size + np.arange(global_batch_size, dtype=np.int64)


def deal(
    costs: np.ndarray,
    *,
    dp: int,
    micro_batches: int,
    rows: int,
    mode: Literal["none", "balanced"] = "balanced",
) -> np.ndarray:
    """Positions in the step, int64 [dp, micro_batches, rows], every position exactly once.

    costs [G] of the samples (n + 3k loops, for example). balanced: every micro-batch and every rank
    gets nearly the same total; rows of a micro-batch come by falling cost. none: in order.
    """
    assert len(costs) == dp * micro_batches * rows, "the batch arithmetic must add up"
    match mode:
        case "none":
            return np.arange(len(costs)).reshape(dp, micro_batches, rows)
        case "balanced":
            return _balanced(np.asarray(costs, np.float64), dp, micro_batches, rows)
        case other:
            raise ValueError(f"parallel.deal={other!r}: choose none or balanced")


def imbalance(costs: np.ndarray, positions: np.ndarray) -> float:
    """How much longer the busiest rank computes than the average one: 0 is perfect."""
    totals = np.asarray(costs, np.float64)[positions].sum(axis=(1, 2))
    return float(totals.max() / totals.mean() - 1) if totals.mean() else 0.0


def _balanced(costs: np.ndarray, dp: int, micro_batches: int, rows: int) -> np.ndarray:
    """First samples to micro-batches, then micro-batches to ranks."""
    bins = _even_groups(costs, dp * micro_batches, rows)  # [D M, R]
    ranks = _even_groups(costs[bins].sum(axis=1), dp, micro_batches)  # [D, M]
    dealt: np.ndarray = bins[ranks]
    return dealt


def _even_groups(costs: np.ndarray, num_groups: int, size: int) -> np.ndarray:
    """Groups of `size` items with nearly equal totals, int64 [num_groups, size].

    Items by falling cost are dealt back and forth; then items are swapped between the groups of the
    largest and the smallest total as long as that brings the two closer.
    """
    order = np.argsort(-costs, kind="stable").reshape(size, num_groups)
    order[1::2] = order[1::2, ::-1]
    groups = np.ascontiguousarray(order.T)
    totals = costs[groups].sum(axis=1)
    for _ in range(MAX_SWAPS_PER_BIN * num_groups):
        high, low = int(totals.argmax()), int(totals.argmin())
        gap = totals[high] - totals[low]
        moved = costs[groups[high]][:, None] - costs[groups[low]][None, :]  # [size, size]
        best = int(np.abs(2 * moved - gap).argmin())
        i, j = divmod(best, size)
        if not 0 < moved[i, j] < gap:
            break
        groups[high, i], groups[low, j] = groups[low, j], groups[high, i]
        totals[high] -= moved[i, j]
        totals[low] += moved[i, j]
    by_cost = np.lexsort((groups, -costs[groups]), axis=1)
    return np.take_along_axis(groups, by_cost, axis=1)
