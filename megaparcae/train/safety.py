"""How a run ends: finished, asked to stop, or stopped because it went wrong."""

from __future__ import annotations

import os
import signal
import types

import torch
import torch.distributed as dist

from megaparcae.log import logger

STOPPED_EXIT_CODE = 75
"""A run that was asked to stop has saved and can go on: start it again."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class TrainingError(RuntimeError):
    """The run went wrong in a way that a restart from the last checkpoint may not cure."""


class StopRequest:
    """Notes a signal; all ranks agree on the step at which they stop."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.signal: int | None = None
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: types.FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:  # a second Ctrl-C means it
            os._exit(128 + number)
        self.signal = number

    def agreed(self) -> bool:
        """Whether any rank has been asked to stop; all ranks call it at the same step."""
        asked = on_any_rank(self.signal is not None, self.device)
        if asked and self.signal is not None:
            logger.info("stopping after this step: received %s", signal.Signals(self.signal).name)
        return asked


def on_any_rank(here: bool, device: torch.device) -> bool:
    """Whether it is so on this rank or another; all ranks call it together."""
    flag = torch.tensor(float(here), device=device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


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
