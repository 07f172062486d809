"""Who makes the others wait, and why."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megaparcae.train.stragglers import ForwardTimer, StragglerReport, find_straggler

ALL = [range(4)]


@pytest.mark.parametrize(
    ("seconds", "work", "cause"),
    [
        ((1.0, 1.1, 0.9, 1.0), (8, 8, 8, 8), None),
        ((1.0, 1.0, 2.0, 1.0), (8, 8, 8, 8), "machine"),
        ((1.0, 1.0, 2.0, 1.0), (8, 8, 15, 8), "depth"),
        ((1.0, 1.0, 3.0, 1.0), (8, 8, 9, 8), "machine"),
        ((0.5, 0.5, 1.0, 0.5), (8, 16, 16, 8), "depth"),
    ],
)
def test_the_slowest_rank_is_named_with_its_cause(seconds, work, cause):
    slowest = find_straggler(seconds, work, ALL)
    assert slowest.cause == cause
    assert cause is None or slowest.rank == 2


def test_ranks_are_compared_with_those_that_run_the_same_layers():
    seconds, work = (1.0, 1.0, 5.0, 5.1), (8, 8, 8, 8)
    assert find_straggler(seconds, work, [range(2), range(2, 4)]).cause is None
    assert find_straggler((1.0, 9.0), (8, 8), [range(1), range(1, 2)]) is None


class Slow(nn.Module):
    def forward(self, seconds: float) -> torch.Tensor:
        time.sleep(seconds)
        return torch.zeros(())


def test_only_forward_passes_of_training_are_counted():
    module = Slow()
    timer = ForwardTimer(module)
    module(0.05)
    module.eval()(0.05)
    assert 0.05 <= timer.take() < 0.1
    assert timer.take() == 0


def test_a_slow_rank_is_said_once_and_always_recorded(monkeypatch, caplog):
    hosts, pairs = ["node-a", "node-b"], [(1.0, 8.0), (2.0, 8.0)]
    everyone = {str: hosts, tuple: pairs}
    monkeypatch.setattr("megaparcae.train.stragglers.gather", lambda mine: everyone[type(mine)])
    mesh = SimpleNamespace(world_size=2, pp=SimpleNamespace(size=1))
    report = StragglerReport(Slow(), SimpleNamespace(), mesh)
    with caplog.at_level("INFO", "megaparcae"):
        records = [report.record(step) for step in (1, 2, 3)]
    assert records.pop(0) is None, "a first step is slow anywhere"
    assert [r["cause"] for r in records] == ["machine", "machine"]
    assert records[0]["host"] == "node-b" and records[0]["slower"] == 2.0
    said = [r.message for r in caplog.records]
    assert len(said) == 1 and "rank 1 (node-b) is slow, 2.00 times its peers" in said[0]
