"""Sequence parallelism: between the split layers each tensor-parallel rank keeps S/tp positions."""

# B rows, S positions, d width
from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megaparcae.parallel.collectives import SEQUENCE_DIM, all_reduce, local_slice
from megaparcae.parallel.mesh import Mesh
from megaparcae.parallel.shard import spec_of


def split_sequence(x: Tensor, mesh: Mesh) -> Tensor:
    """This rank's positions [B, S/tp, ...] of what every rank has whole [B, S, ...], a view."""
    return local_slice(x, mesh.tp.group, SEQUENCE_DIM)


def sum_partial_gradients_as_produced(model: nn.Module, mesh: Mesh) -> list[RemovableHandle]:
    """Sum each partial gradient over tp in the backward pass, before anyone else sees it.

    For optimizers that take gradients as they appear (DeepSpeed's ZeRO); ours sums at the step
    instead, which is one exchange per step and not one per micro-batch. Call it on the materialised
    model, before DeepSpeed adds its own hooks. A parameter's hook runs once per backward pass, on
    the sum over all its uses, so the loop costs one exchange.
    """
    total = partial(all_reduce, group=mesh.tp.group)
    return [p.register_hook(total) for p in model.parameters() if spec_of(p).tp_partial]
