"""Activation checkpointing: keep the inputs, run the forward pass again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def checkpointed(enabled: bool, function: Callable[..., Tensor], *inputs: object) -> Tensor:
    """`function(*inputs)`, recomputed in the backward pass when enabled and gradients are on.

    Non-reentrant: a shared core under ZeRO 2 and 3, and inputs without gradient, need it. Nothing
    here draws random numbers, so no generator state is kept.
    """
    if not enabled or not torch.is_grad_enabled():
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
