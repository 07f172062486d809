"""A run that stands still: every rank shows what it is doing, and ends."""

from __future__ import annotations

import os
import socket
import statistics
import sys
import threading
import time
import traceback
from collections import defaultdict, deque

from megaparcae.log import logger

NEW = 6
"""What was never done before is given this many times the least limit."""
GRACE_SECONDS = 10.0
"""Between a rank's stacks and its end, which ends the others: they have theirs to show."""
PAUSE = 10
"""A look that comes this many periods late was not late by itself."""
REMEMBERED = 50
"""Durations of a phase that its median is taken of."""


class Watchdog:
    """Watches one phase of the training thread at a time: a step, a validation, a save.

    A rank that waits for a hung one hangs too, so all ranks come to their limit together, and the
    stacks tell which of them was not waiting.
    """

    def __init__(self, factor: float, min_seconds: float) -> None:
        """A phase may last `factor` times its median and at least `min_seconds`; 0 is off."""
        self.factor, self.min_seconds = factor, min_seconds
        self.known: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self.phase: str | None = None
        self.step = 0
        self.since = 0.0
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        if factor:
            self.thread.start()

    def begin(self, phase: str, step: int) -> None:
        """The phase before has ended, and this one begins; `step` is the last finished one."""
        now = time.monotonic()
        if self.phase is not None:
            self.known[self.phase].append(now - self.since)
        self.phase, self.step, self.since = phase, step, now

    def limit(self) -> float:
        """Seconds after which the present phase is a hang."""
        past = self.known.get(self.phase or "")
        if not past:
            return NEW * self.min_seconds
        return max(self.min_seconds, self.factor * statistics.median(past))

    def close(self) -> None:
        """Stop watching: nothing is ended any more when this returns."""
        self.phase = None
        self.closed.set()
        if self.thread.is_alive():
            self.thread.join()

    def _watch(self) -> None:
        period, before = min(1.0, self.min_seconds / 4), time.monotonic()
        while not self.closed.wait(period):
            now = time.monotonic()
            if now - before > PAUSE * period:  # the whole process was halted, as Slurm may do
                self.since += now - before
            before = now
            phase, seconds = self.phase, now - self.since
            if phase is not None and seconds > self.limit():
                logger.error(self._report(phase, seconds))
                if not self.closed.wait(GRACE_SECONDS):
                    os._exit(1)

    def _report(self, phase: str, seconds: float) -> str:
        past = self.known.get(phase)
        usual = f"its median is {statistics.median(past):.1f} s" if past else "it is the first"
        return (
            f"error: {socket.gethostname()}: no progress for {seconds:.0f} s after step "
            f"{self.step} in: {phase} ({usual}); the run ends, start the same command again to "
            f"resume. What each thread is doing:\n{stacks()}"
        )


def stacks() -> str:
    """The stack of every other thread of this process, the training's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = dict(sys._current_frames())
    frames.pop(threading.get_ident(), None)
    main = threading.main_thread().ident
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in sorted(frames.items(), key=lambda item: item[0] != main)
    )
