"""Gradients that leave during the backward pass, weights that come during the forward pass."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from comparison import assert_same_run, one_process, train_layout

from harness import run_ranks
from megaparcae.parallel import flat_buffer
from megaparcae.parallel.flat_buffer import FlatBuffer
from megaparcae.parallel.sharded_optimizer import ShardedOptimizer

NUM_STEPS = 4
TRANSFORMER = {"architecture": "transformer", "num_layers": 4}
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


class LateBroadcast:
    """Sends when it is waited for: who reads a weight without waiting reads the old one."""

    def __init__(self, send: Any) -> None:
        self.wait = send


def train_with_late_weights(changes: dict[str, Any]) -> dict[str, Any]:
    """A run whose large weights are what they were until somebody waits; how many there were."""
    flat_buffer.EARLY_ELEMENTS = 1024
    late, send_weights = [], FlatBuffer.send_weights

    def start_broadcast(self: FlatBuffer, owner: int, whole: Any) -> list[Any]:
        rank, group = self._dp.ranks[owner], self._dp.group
        return [LateBroadcast(partial(dist.broadcast, whole, src=rank, group=group))]

    def counting_send(self: FlatBuffer, order: Any) -> None:
        send_weights(self, order)
        late.append(len(self._coming))

    FlatBuffer._start_broadcast = start_broadcast
    FlatBuffer.send_weights = counting_send
    return {**train_layout(changes, NUM_STEPS), "late": late}


@pytest.mark.parametrize(
    ("world", "changes"),
    [
        (2, {"model": {"tie_embeddings": False}, "optimizer": MUON}),
        (2, {"model": TRANSFORMER, "parallel": {"recompute_prelude": "block"}}),
        (4, {"parallel": {"tp": 2, "sequence_parallel": True}}),
    ],
)
def test_weights_come_when_the_forward_pass_needs_them_and_the_run_is_the_same(world, changes):
    ranks = run_ranks(train_with_late_weights, world, changes, timeout=240)
    for rank in ranks:
        assert len(rank["late"]) == NUM_STEPS + 1
        assert min(rank["late"]) > 10
    alone = {**changes, "parallel": {}}
    assert_same_run(ranks, one_process(alone, NUM_STEPS))
