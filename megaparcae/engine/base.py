"""What the trainer asks of an engine, with or without a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from megaparcae.parallel.shard import Fragment

MicroBatch = Any
"""Opaque here: whatever the model's forward takes."""


Accept = Callable[[float], bool]
"""Whether a step of this mean loss may update the weights."""


class Engine(Protocol):
    """One optimizer step, or one evaluation, over this rank's micro-batches."""

    module: nn.Module
    """The model's local part."""

    optimizer: Optimizer
    """What holds the parameter groups and the states."""

    def train_batch(
        self, batches: Sequence[MicroBatch], loss_scale: float, accept: Accept | None = None
    ) -> Tensor:
        """Forward, backward and update. `loss_scale` turns each micro-batch's summed loss into its
        share of the step's mean loss; returns the step's mean loss, the same on all ranks.

        `accept` is asked by the ranks that know the mean loss before the last backward pass; when
        it declines, no rank updates anything."""
        ...

    def eval_batch(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Summed loss of these micro-batches over all dp ranks, the same on all ranks."""
        ...

    def grad_norm(self) -> float:
        """Global gradient norm of the last step, before clipping."""
        ...

    def last_step_skipped(self) -> bool:
        """Whether gradients were not finite, so that no rank updated anything."""
        ...

    def finish_step(self) -> None:
        """Weights may be read outside of a forward pass: none is on its way to this rank."""
        ...

    def owned_fragments(self) -> list[Fragment]:
        """Weights and states that this rank writes into a checkpoint."""
        ...

    def local_fragments(self) -> list[Fragment]:
        """Weights and states that this rank needs from one; their storage exists."""
        ...

    def step_count(self) -> int:
        """Updates made, skipped steps not counted."""
        ...

    def finish_load(self, updates: int) -> None:
        """All local fragments have been filled in place."""
        ...
