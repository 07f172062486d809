"""Collectives over a process group, with their gradients; None is one rank: the identity.

Every result is the same on all ranks of the group that hold it, bit by bit: sums are made once and
then distributed (all-reduce, reduce-scatter), never by each rank in its own order.

The pairs are those of Megatron-LM (arXiv 1909.08053; with sequence parallelism arXiv 2205.05198):
a region whose layers are split over the ranks is entered with `copy_to_region` or `gather_sequence`
and left with `reduce_from_region` or `scatter_sequence`.
"""

# B rows, S positions, d width, R ranks of the group
from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed import ProcessGroup

SEQUENCE_DIM = 1
"""Positions in [B, S, d]."""

# torch 2.13 renamed both; older versions have the old names only.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(
    x: Tensor, group: ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """Sum (or `op`) over the ranks, a new tensor; no gradient."""
    if group is None:
        return x
    result = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, op=op, group=group)
    return result


def all_gather(x: Tensor, group: ProcessGroup | None, dim: int) -> Tensor:
    """The ranks' tensors side by side along `dim`, in order of rank; no gradient."""
    if group is None:
        return x
    parts = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    all_gather_single(parts, x.detach().contiguous(), group=group)
    dim = dim % x.ndim
    by_rank: Tensor = parts.unflatten(0, (group.size(), -1))  # [R, ...]
    return by_rank.movedim(0, dim).flatten(dim, dim + 1)


def reduce_scatter(x: Tensor, group: ProcessGroup | None, dim: int) -> Tensor:
    """This rank's slice along `dim` of the sum over the ranks; no gradient."""
    if group is None:
        return x
    _check_divisible(x, group, dim)
    parts = x.detach().unflatten(dim, (group.size(), -1)).movedim(dim, 0).contiguous()
    result = x.new_empty(parts.shape[1:])
    reduce_scatter_single(result, parts.flatten(0, 1), group=group)
    return result


def local_slice(x: Tensor, group: ProcessGroup | None, dim: int) -> Tensor:
    """This rank's slice along `dim`, a view."""
    if group is None:
        return x
    _check_divisible(x, group, dim)
    return x.chunk(group.size(), dim)[group.rank()]


def copy_to_region(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Enter: every rank has x [B, S, d]; forward identity, backward all-reduce."""
    return _collective(x, group, forward=_identity, backward=partial(all_reduce, group=group))


def reduce_from_region(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Leave: x [B, S, d] is a summand; forward all-reduce, backward identity."""
    return _collective(x, group, forward=partial(all_reduce, group=group), backward=_identity)


def gather_sequence(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Enter: [B, S/R, d] -> [B, S, d]; forward all-gather, backward reduce-scatter."""
    return _collective(
        x,
        group,
        forward=partial(all_gather, group=group, dim=SEQUENCE_DIM),
        backward=partial(reduce_scatter, group=group, dim=SEQUENCE_DIM),
    )


def scatter_sequence(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Leave: a summand [B, S, d] -> [B, S/R, d]; forward reduce-scatter, backward all-gather."""
    return _collective(
        x,
        group,
        forward=partial(reduce_scatter, group=group, dim=SEQUENCE_DIM),
        backward=partial(all_gather, group=group, dim=SEQUENCE_DIM),
    )


def gather_features(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """[..., V/R] -> [..., V] on every rank; all use it alike, so backward takes the own slice."""
    return _collective(
        x,
        group,
        forward=partial(all_gather, group=group, dim=-1),
        backward=partial(local_slice, group=group, dim=-1),
    )


Exchange = Callable[[Tensor], Tensor]


class _Collective(Function):
    """One exchange forward, its adjoint backward."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, forward: Exchange, backward: Exchange) -> Tensor:
        ctx.adjoint = backward  # type: ignore[attr-defined]
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.adjoint(grad), None, None  # type: ignore[attr-defined]


def _collective(
    x: Tensor, group: ProcessGroup | None, *, forward: Exchange, backward: Exchange
) -> Tensor:
    if group is None:
        return x
    return _Collective.apply(x, forward, backward)  # type: ignore[no-any-return]


def _identity(x: Tensor) -> Tensor:
    return x


def _check_divisible(x: Tensor, group: ProcessGroup, dim: int) -> None:
    if x.shape[dim] % group.size():
        raise ValueError(
            f"dimension {dim} of a tensor of shape {tuple(x.shape)} can't be split over "
            f"{group.size()} tensor-parallel ranks; use a length that parallel.tp divides, "
            "or parallel.sequence_parallel=false"
        )
