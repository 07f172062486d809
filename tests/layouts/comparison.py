"""The model of the table of layouts, and what "the same run" means."""

from __future__ import annotations

from functools import cache
from typing import Any

from tiny import merged, train_tiny

from harness import run_ranks
from megaparcae.train.compare import Difference, compare_series, compare_tensors

TABLE: dict[str, Any] = {
    # Few layers and loops, since collectives between eight processes on two cores are what
    # takes the time; rows of one micro-batch still differ in depth.
    "model": {
        "num_prelude_layers": 1,
        "num_core_layers": 2,
        "num_coda_layers": 1,
        "recurrence": {"mean_recurrence": 2, "backprop_depth": 2},
    },
    "train": {"global_batch_size": 8},
    "validation": {"num_sequences": 6},
}
NUM_STEPS = 10
LOSS, WEIGHTS = 1e-5, 1e-5
"""Largest relative difference in fp32 over ten steps."""


def train_layout(changes: dict[str, Any], num_steps: int = NUM_STEPS) -> dict[str, Any]:
    """`train_tiny` of the table's model, on this rank."""
    return train_tiny(merged(TABLE, changes), num_steps)


def run_layout(
    world: int, changes: dict[str, Any], num_steps: int = NUM_STEPS
) -> list[dict[str, Any]]:
    """All ranks' results."""
    return run_ranks(train_layout, world, changes, num_steps, timeout=240)


@cache
def _one_process(changes: str, num_steps: int) -> dict[str, Any]:
    return run_layout(1, eval(changes), num_steps)[0]


def one_process(changes: dict[str, Any] | None = None, num_steps: int = NUM_STEPS) -> Any:
    """What one process computes; run once per session for the same changes."""
    return _one_process(repr(changes or {}), num_steps)


def differences(got: dict[str, Any], want: dict[str, Any]) -> list[Difference]:
    """Loss, norm and validation first, then every parameter."""
    pairs = [
        compare_series(name, _numbered(got["steps"], i), _numbered(want["steps"], i))
        for i, name in enumerate(("loss", "grad_norm"))
    ]
    pairs.append(compare_series("validation", {0: got["validation"]}, {0: want["validation"]}))
    return pairs + compare_tensors(got["weights"], want["weights"])


def _numbered(steps: list[tuple[float, float]], i: int) -> dict[int, float]:
    return {number: step[i] for number, step in enumerate(steps)}


def assert_same_run(
    ranks: list[dict[str, Any]],
    want: dict[str, Any],
    *,
    loss: float = LOSS,
    weights: float = WEIGHTS,
) -> Difference:
    """All ranks report the losses, norms and validation of `want`, rank 0 has its weights."""
    for rank in ranks:
        assert rank["steps"] == ranks[0]["steps"], "ranks report different figures"
        assert rank["validation"] == ranks[0]["validation"]
    found = differences(ranks[0], want)
    for difference in found:
        limit = loss if difference.name in ("loss", "grad_norm", "validation") else weights
        assert difference.largest <= limit, difference
    return max(found, key=lambda difference: difference.largest)
