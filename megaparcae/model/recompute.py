"""Activation checkpointing: keep the inputs, run the forward pass again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass
class WorkCounter:
    """Block applications run so far, counted in rows; recomputation counts again."""

    no_grad: int = 0
    grad: int = 0

    def add(self, rows: int) -> None:
        """Count one block applied to `rows` rows, under the current grad mode."""
        if torch.is_grad_enabled():
            self.grad += rows
        else:
            self.no_grad += rows


def checkpointed(enabled: bool, function: Callable[..., Tensor], *inputs: object) -> Tensor:
    """`function(*inputs)`, recomputed in the backward pass when enabled and gradients are on.

    Non-reentrant: a shared core under ZeRO 2 and 3, and inputs without gradient, need it. Nothing
    here draws random numbers, so no generator state is kept.
    """
    if not enabled or not torch.is_grad_enabled():
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


def run_block(
    block: nn.Module,
    x: Tensor,  # [B, S, d]
    context: object,
    value_rows: Tensor | None,
    recompute: str,
    work: WorkCounter,
    input_weight: Tensor | None = None,
) -> Tensor:
    """One Transformer block with the activation checkpointing its section asks for."""

    def run(x: Tensor) -> Tensor:
        work.add(len(x))
        return block(x, context, value_rows, input_weight, recompute == "selective")

    return checkpointed(recompute == "block", run, x)
