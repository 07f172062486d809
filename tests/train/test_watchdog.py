"""A phase that takes far longer than before: the stacks of all threads, and the end."""

from __future__ import annotations

import os
import time

import pytest

from harness import RankError, run_ranks
from megaparcae.log import setup_logging
from megaparcae.train import watchdog
from megaparcae.train.watchdog import NEW, Watchdog


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_the_limit_follows_the_median_of_each_kind_of_work(clock):
    watch = Watchdog(0, 10.0)
    watch.factor = 20.0  # no thread in this test
    monotone = [("step", 1.0), ("step", 3.0), ("validation", 40.0), ("step", 2.0), ("step", 0.0)]
    try:
        for phase, seconds in monotone:
            watch.begin(phase, 0)
            clock[0] += seconds
        assert watch.limit() == 20 * 2.0
        watch.begin("validation", 4)
        assert watch.limit() == 20 * 40.0
        watch.begin("save", 4)
        assert watch.limit() == NEW * 10.0, "never done before"
        clock[0] += 0.1
        watch.begin("save", 4)
        assert watch.limit() == 10.0
    finally:
        watch.close()


def hang(out: str) -> None:
    """Rank 1 sleeps where rank 0 waits for it."""
    import sys

    import torch
    import torch.distributed as dist

    sys.stderr = sys.__stderr__ = open(f"{out}/rank{dist.get_rank()}", "w")  # noqa: SIM115
    setup_logging(dist.get_rank())
    watchdog.GRACE_SECONDS = 1.0
    watch = Watchdog(2.0, 0.3)
    for step in range(3):
        watch.begin("step", step)
        if step == 2 and dist.get_rank() == 1:
            sleep_for_ever()
        dist.all_reduce(torch.zeros(1))


def sleep_for_ever() -> None:
    time.sleep(60)


def test_every_rank_of_a_hung_run_shows_its_stack_and_ends(tmp_path):
    with pytest.raises(RankError, match="died with exit code 1"):
        run_ranks(hang, 2, str(tmp_path), timeout=20)
    time.sleep(0.2)
    waiting, guilty = ((tmp_path / f"rank{r}").read_text() for r in (0, 1))
    assert "no progress for" in guilty and "after step 2 in: step (its median is" in guilty
    assert "all_reduce" in waiting and "sleep_for_ever" not in waiting
    assert "sleep_for_ever" in guilty and "start the same command again" in guilty


def test_it_acts_only_when_it_is_on_and_not_after_the_run(monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(watchdog, "GRACE_SECONDS", 0.01)
    for factor, close in ((0.0, False), (2.0, True), (2.0, False)):
        watch = Watchdog(factor, 0.01)
        watch.begin("step", 0)
        if close:
            watch.close()
        time.sleep(0.3)
        watch.close()
        assert bool(ended) == (factor > 0 and not close)


@pytest.mark.parametrize(
    ("looks", "hung"), [([1.0] * 9, False), ([1.0] * 11, True), ([1.0, 500.0, 1.0], False)]
)
def test_a_process_that_was_halted_from_outside_is_not_hung(clock, monkeypatch, looks, hung):
    """Time in which the watch itself did not run does not count."""

    class Looks:
        def wait(self, seconds: float) -> bool:
            if seconds == watchdog.GRACE_SECONDS:
                return False
            if not looks:
                return True
            clock[0] += looks.pop(0)
            return False

    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    watch = Watchdog(0, 10.0)
    watch.closed = Looks()
    watch.known["step"].append(0.1)
    watch.begin("step", 0)
    watch._watch()
    assert bool(ended) == hung
