"""Loss spikes: what is one, and what a resumed run must remember to call the same losses one.

z = (loss - median) / (1.4826 median|loss - median|) over the recent losses; a spike is a finite
loss whose z is above `train.loss_spike_zscore`. Median and median deviation do not care about a few
spikes among the recent losses, so these stay in the window, and after a lasting change of level
they become what is usual.

Every rank keeps the same window, since every rank is told the same losses. With `roll_back` the
weights and states of the last checkpoint return while the count of steps, and with it schedule,
depths and data, goes on: the batches since then are not seen again.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megaparcae.config.schema import TrainConfig
from megaparcae.log import logger, read_records

TO_SIGMA = 1.4826
"""Median deviation -> standard deviation, for normal noise."""
LONGEST = 10_000
"""Losses of a log that are passed to the other ranks."""
LEAST_DEVIATION = 1e-3
"""Of the median: losses that hardly vary are not called spikes for a trifle."""


@dataclass(frozen=True)
class History:
    """What a run's log says about the steps before a resume."""

    losses: list[float]
    """Finite ones, the latest last."""
    skipped_steps: int


class SpikeDetector:
    """Judges each step's loss by those before it."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.recent: deque[float] = deque(maxlen=config.loss_spike_window)
        self.total = 0
        """Spikes so far."""

    def is_spike(self, loss: float) -> bool:
        """By the losses noted so far; a loss that is not finite is another guard's business."""
        if not math.isfinite(loss) or len(self.recent) < self.config.loss_spike_window // 2:
            return False
        return self._zscore(loss) > self.config.loss_spike_zscore

    def accept(self, loss: float) -> bool:
        """For an engine: whether a step of this loss may update the weights."""
        return not self.is_spike(loss)

    def note(self, loss: float, step: int) -> bool:
        """Remember a finished step's loss; whether it was a spike."""
        spike = self.is_spike(loss)
        if spike:
            self.total += 1
            logger.warning(
                "step %d: loss spike, %.4f is %.1f deviations above the recent median %.4f",
                *(step, loss, self._zscore(loss), statistics.median(self.recent)),
            )
        self.remember([loss])
        return spike

    def remember(self, losses: Iterable[float]) -> None:
        """Add to the window without judging."""
        self.recent.extend(loss for loss in losses if math.isfinite(loss))

    def _zscore(self, loss: float) -> float:
        median = statistics.median(self.recent)
        deviation = statistics.median(abs(x - median) for x in self.recent)
        return (loss - median) / max(TO_SIGMA * deviation, LEAST_DEVIATION * abs(median))


def agreed_history(log: Path, step: int) -> History:
    """`read_history` of rank 0, which has the log, on all ranks."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    box = [read_history(log, step) if first else None]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    assert box[0] is not None
    return box[0]


def read_history(log: Path, step: int) -> History:
    """The last losses and the skip count up to `step`; of a step that was made twice, as it was
    the second time."""
    records: dict[int, dict[str, Any]] = {}
    if log.is_file():
        for record in read_records(log):
            if record["kind"] == "step" and record["step"] <= step:
                records[record["step"]] = record
    latest = [records[at] for at in sorted(records)]
    losses = [r["loss"] for r in latest if r["loss"] is not None]
    skipped = int(latest[-1]["skipped_steps"] or 0) if latest else 0
    return History([float(loss) for loss in losses[-LONGEST:]], skipped)
