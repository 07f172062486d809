"""Prefetching: the order of the steps, errors at their step, resuming, closing."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from megaparcae.data.loader import Prefetcher


def uneven(step: int) -> int:
    """Every third batch takes longer than its successors."""
    time.sleep(0.01 if step % 3 == 0 else 0.0)
    return step


@pytest.mark.parametrize("num_workers", [0, 1, 2, 5])
def test_order_is_that_of_the_steps_whatever_the_workers(num_workers: int) -> None:
    with Prefetcher(uneven, start=4, stop=20, num_workers=num_workers) as loader:
        assert list(loader) == list(range(4, 20))
    assert loader.next_step == 20


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_resuming_at_any_step_continues_the_same_batches(num_workers: int) -> None:
    def batch(step: int) -> list[int]:
        return (step * 4 + np.arange(4)).tolist()

    with Prefetcher(batch, stop=6, num_workers=num_workers) as loader:
        straight = list(loader)
    with Prefetcher(batch, num_workers=num_workers) as loader:
        first = [next(loader) for _ in range(3)]
        step = loader.next_step
    with Prefetcher(batch, start=step, stop=6, num_workers=num_workers) as loader:
        assert first + list(loader) == straight


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_an_error_is_raised_at_its_own_step(num_workers: int) -> None:
    def batch(step: int) -> int:
        if step == 5:
            raise OSError("disk gone")
        return step

    seen = []
    with Prefetcher(batch, num_workers=num_workers) as loader:
        with pytest.raises(OSError, match="disk gone"):
            for number in loader:
                seen.append(number)
        assert loader.next_step == 5
    assert seen == [0, 1, 2, 3, 4]


def test_no_more_batches_are_prepared_than_the_queue_holds() -> None:
    made = []

    def batch(step: int) -> int:
        made.append(step)
        return step

    with Prefetcher(batch, num_workers=2) as loader:
        next(loader)
        time.sleep(0.1)
        assert len(made) <= 5


def test_closing_leaves_no_thread_behind() -> None:
    before = threading.active_count()
    loader = Prefetcher(uneven, num_workers=4)
    next(loader)
    loader.close()
    loader.close()
    assert threading.active_count() == before


def test_batches_are_prepared_while_the_caller_is_busy() -> None:
    def batch(step: int) -> int:
        time.sleep(0.05)
        return step

    with Prefetcher(batch, stop=6, num_workers=2) as loader:
        next(loader)
        time.sleep(0.3)
        start = time.monotonic()
        assert [next(loader), next(loader), next(loader)] == [1, 2, 3]
        assert time.monotonic() - start < 0.05
