"""A progress line on stderr: rewritten in place on a terminal, one line now and then elsewhere."""

from __future__ import annotations

import sys
import time


class Progress:
    """Bytes of input done, out of a total that may be unknown (0)."""

    def __init__(self, what: str, total: int, quiet: bool = False) -> None:
        self.what, self.total, self.done = what, total, 0
        self._terminal = sys.stderr.isatty()
        self._every = 0.3 if self._terminal else 10.0
        self._start = self._last = time.monotonic()
        self._quiet = quiet

    def advance(self, num_bytes: int, note: str = "") -> None:
        """Count bytes, and show a line when it is time."""
        self.done += num_bytes
        now = time.monotonic()
        if now - self._last >= self._every:
            self._last = now
            self._show(now, note)

    def end(self) -> None:
        """Leave the terminal's line."""
        if self._terminal and not self._quiet and self._last != self._start:
            sys.stderr.write("\n")

    def _show(self, now: float, note: str) -> None:
        if self._quiet:
            return
        rate = self.done / (now - self._start)
        line = f"{self.what}: {self.done / 1e6:,.1f} MB, {rate / 1e6:.1f} MB/s"
        if self.total and rate:
            left = max(self.total - self.done, 0) / rate
            line += f", {min(self.done / self.total, 1):.0%}, {left:.0f} s left"
        line += f"  {note}"
        sys.stderr.write(f"\r{line:<78}" if self._terminal else f"{line}\n")
        sys.stderr.flush()
