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
        asked = torch.tensor(float(self.signal is not None), device=self.device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        if asked and self.signal is not None:
            logger.info("stopping after this step: received %s", signal.Signals(self.signal).name)
        return bool(asked)


class SkipGuard:
    """Counts steps skipped for a non-finite loss or gradient; too many in a row stop the run."""

    def __init__(self, most_in_a_row: int) -> None:
        self.most_in_a_row = most_in_a_row
        self.in_a_row = 0
        self.total = 0

    def note(self, skipped: bool, step: int) -> None:
        """Report one finished step. Raises TrainingError after too many in a row."""
        if not skipped:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        self.total += 1
        logger.warning(
            "step %d was skipped: loss or gradient is not finite (%d so far)", step, self.total
        )
        if self.in_a_row > self.most_in_a_row:
            raise TrainingError(
                f"{self.in_a_row} steps in a row were skipped for a non-finite loss or gradient, "
                f"more than train.max_skipped_steps={self.most_in_a_row}; lower optimizer.lr or "
                "resume from an earlier checkpoint"
            )
