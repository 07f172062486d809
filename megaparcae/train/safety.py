"""How a run ends: finished, asked to stop, or stopped because it went wrong."""

from __future__ import annotations

import os
import signal
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from megaparcae.errors import UserError
from megaparcae.log import logger

STOPPED_EXIT_CODE = 75
"""A run that was asked to stop has saved and can go on: start it again."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SPARE_SECONDS = 60.0
"""Left to the end of a Slurm job, beside what the last step and saves take."""


class TrainingError(RuntimeError):
    """The run went wrong in a way that a restart from the last checkpoint may not cure."""


class StopRequest:
    """Whether this rank has a reason to stop: a signal; on the first rank also the time limit, the
    end of the Slurm job, and the file `stop` in the run's folder."""

    def __init__(self, run_dir: Path, *, is_first: bool, exit_after: float | None = None) -> None:
        """`exit_after` in minutes since this process began."""
        self.file = run_dir / "stop"
        self.is_first = is_first
        self.limits: list[tuple[float, str]] = []
        """Unix time, and why then."""
        if exit_after is not None:
            began = psutil.Process().create_time()
            self.limits.append(
                (began + 60 * exit_after, f"train.exit_after={exit_after:g} is over")
            )
        self.job_end = slurm_end(os.environ)
        self.save_seconds = 0.0
        """What the longest save so far took."""
        self.signal: int | None = None
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: types.FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:  # a second Ctrl-C means it
            os._exit(128 + number)
        self.signal = number

    def refuse_to_start(self) -> None:
        """A run that was stopped by its file does not start again by itself. Raises UserError."""
        if self.file.exists():
            raise UserError(f"{self.file} asks this run to stop; delete it to let the run go on")

    def reason(self, step_seconds: float) -> str | None:
        """Why this rank wants to stop after the step that took `step_seconds`, or None."""
        if self.signal is not None:
            return f"received {signal.Signals(self.signal).name}"
        if not self.is_first:
            return None
        now = time.time()
        for limit, why in self.limits:
            if now >= limit:
                return why
        if self.job_end is not None and now + self._needed(step_seconds) >= self.job_end:
            return f"the Slurm job ends in {max(0.0, self.job_end - now):.0f} s"
        return f"{self.file} is there" if self.file.exists() else None

    def _needed(self, step_seconds: float) -> float:
        """Seconds for one more step and two saves: one may be on its way, one is to come."""
        return SPARE_SECONDS + 2 * step_seconds + 3 * self.save_seconds


def slurm_end(environ: Mapping[str, str]) -> float | None:
    """Unix time at which Slurm ends this job; None outside of one."""
    end = environ.get("SLURM_JOB_END_TIME", "")
    return float(end) if end.isdigit() else None


def on_any_rank(here: Sequence[bool], device: torch.device) -> list[bool]:
    """Which of these are so on this rank or another; all ranks call it together."""
    flags = torch.tensor([float(flag) for flag in here], device=device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return [bool(flag) for flag in flags.tolist()]


class SkipGuard:
    """Counts skipped steps (a non-finite loss or gradient, or a declined spike of the loss); too
    many in a row stop the run."""

    def __init__(self, most_in_a_row: int) -> None:
        self.most_in_a_row = most_in_a_row
        self.in_a_row = 0
        self.total = 0

    def note(self, skipped: bool, step: int, *, spike: bool = False) -> None:
        """Report one finished step. Raises TrainingError after too many in a row."""
        if not skipped:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        self.total += 1
        reason = "its loss is a spike" if spike else "loss or gradient is not finite"
        logger.warning("step %d was skipped: %s (%d so far)", step, reason, self.total)
        if self.in_a_row > self.most_in_a_row:
            raise TrainingError(
                f"{self.in_a_row} steps in a row were skipped, the last because {reason}: more "
                f"than train.max_skipped_steps={self.most_in_a_row}; lower optimizer.lr or resume "
                "from an earlier checkpoint"
            )


class RollBackGuard:
    """Stops a run that comes back to one checkpoint again and again."""

    MOST = 3

    def __init__(self) -> None:
        self.step = self.count = 0

    def note(self, step: int) -> None:
        """About to return to the checkpoint of `step`. Raises TrainingError after three times."""
        self.count = self.count + 1 if step == self.step else 1
        self.step = step
        if self.count > self.MOST:
            raise TrainingError(
                f"the loss spiked again after {self.MOST} returns to the checkpoint of step "
                f"{step}; lower optimizer.lr or resume from an earlier checkpoint"
            )
