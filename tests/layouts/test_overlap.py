"""Sums over data-parallel ranks that start during the backward pass."""

from __future__ import annotations

from typing import Any

import pytest
from comparison import assert_same_run, one_process, train_layout

from harness import run_ranks
from megaparcae.parallel import flat_buffer
from megaparcae.parallel.sharded_optimizer import ShardedOptimizer

NUM_STEPS = 4
MUON = {"name": "muon_adamw", "muon_dtype": "fp32", "muon_lr": 2e-3}


def train_overlapping(changes: dict[str, Any]) -> dict[str, Any]:
    """A run in which every parameter counts as large, and how many sums had begun at each step."""
    flat_buffer.EARLY_ELEMENTS = 1
    begun, step = [], ShardedOptimizer.step

    def counting_step(self: ShardedOptimizer) -> None:
        begun.append((self._buffer._num_sent, len(self._buffer._early)))
        step(self)

    ShardedOptimizer.step = counting_step
    return {**train_layout(changes, NUM_STEPS), "begun": begun}


@pytest.mark.parametrize(
    ("world", "changes"),
    [
        (2, {"parallel": {"recompute_core": "loop"}}),  # two micro-batches a step
        (3, {"train": {"global_batch_size": 12}, "optimizer": MUON}),
        (4, {"parallel": {"tp": 2, "sequence_parallel": True}}),
    ],
)
def test_gradients_leave_during_the_last_backward_pass_and_the_run_is_the_same(world, changes):
    ranks = run_ranks(train_overlapping, world, changes, timeout=240)
    for rank in ranks:
        assert rank["begun"]
        for begun, early in rank["begun"]:
            assert begun == early > 30
    alone = {**changes, "parallel": {}}
    assert_same_run(ranks, one_process(alone, NUM_STEPS))
