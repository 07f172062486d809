"""The global gradient norm: every full parameter once, whatever the layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megaparcae.parallel.shard import ShardSpec

CHUNK = 4096
"""Elements summed in fp32: a longer sum on a CPU loses digits (1.4e-3 of a norm at 25 million)."""


def counts_here(spec: ShardSpec, *, stage: int, tp_index: int) -> bool:
    """Whether this rank counts the parameter: slices on every tensor-parallel rank, copies on the
    first; tied replicas on their first stage."""
    sliced = spec.dim is not None and spec.num_slices > 1
    return stage == spec.stages[0] and (sliced or tp_index == 0)


def square_sum(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum of squares of all elements of contiguous tensors, a float64 scalar."""
    parts = []
    for gradient in gradients:
        flat = gradient.reshape(-1)
        whole = flat.numel() // CHUNK * CHUNK
        parts += [flat[:whole].view(-1, CHUNK), flat[whole:].view(1, -1)]
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=device)
    chunks = torch.cat([torch.linalg.vector_norm(part, dim=1) for part in parts])
    return chunks.double().square().sum()


def global_norm(local_square_sum: Tensor, world_size: int) -> float:
    """Root of the sum over all ranks: the same number everywhere; not finite if any gradient is."""
    if world_size > 1:
        dist.all_reduce(local_square_sum)
    return float(local_square_sum.sqrt())


def clip_factor(norm: float, max_norm: float) -> float:
    """What to multiply gradients by so that their norm is at most max_norm; 0 switches it off."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0
