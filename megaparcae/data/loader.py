"""Batches ahead of time: threads prepare the next steps, the order is that of the steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

Batch = TypeVar("Batch")

AHEAD_PER_WORKER = 2
"""Batches in preparation or waiting, per thread."""


class Prefetcher(Generic[Batch]):
    """Iterates over make_batch(start), make_batch(start + 1), ... up to stop (None: without end).

    make_batch must be a pure function of the step that threads may call at the same time. With 0
    workers it runs in the caller's thread, with the same result. What it raises is raised at its
    own step, after the batches before it. The state of a loader is the number of the next step.
    """

    def __init__(
        self,
        make_batch: Callable[[int], Batch],
        *,
        start: int = 0,
        stop: int | None = None,
        num_workers: int = 1,
    ) -> None:
        self.next_step = start
        self._make_batch = make_batch
        self._stop = stop
        self._pending: deque[Future[Batch]] = deque()
        self._depth = AHEAD_PER_WORKER * num_workers
        self._pool = ThreadPoolExecutor(num_workers, "loader") if num_workers else None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._stop is not None and self.next_step >= self._stop:
            raise StopIteration
        if self._pool is None:
            batch = self._make_batch(self.next_step)
        else:
            self._fill(self._pool)
            batch = self._pending[0].result()
            self._pending.popleft()
        self.next_step += 1
        if self._pool is not None:
            self._fill(self._pool)
        return batch

    def _fill(self, pool: ThreadPoolExecutor) -> None:
        while len(self._pending) < self._depth:
            step = self.next_step + len(self._pending)
            if self._stop is not None and step >= self._stop:
                return
            self._pending.append(pool.submit(self._make_batch, step))

    def close(self) -> None:
        """Stop the threads; batches that were being prepared are thrown away."""
        for future in self._pending:
            future.cancel()
        self._pending.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Prefetcher[Batch]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
