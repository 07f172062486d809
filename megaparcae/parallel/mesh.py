"""Ranks as a grid: pp (outermost), dp, tp (innermost, so that it stays on one node)."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One direction of the grid, seen from this rank."""

    size: int
    index: int
    group: ProcessGroup | None
    """None when size is 1: collectives over one rank are the identity and need no group."""
    ranks: tuple[int, ...]
    """Global ranks along the axis, in order of index."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """This rank's place among pp x dp x tp processes."""

    pp: Axis
    dp: Axis
    tp: Axis
    rank: int
    world_size: int


def make_mesh(*, pp: int, tp: int) -> Mesh:
    """Lay the initialised world out; dp is what remains. All ranks call it together.

    Raises ValueError when pp x tp does not divide the world size. Without an initialised process
    group the world is one rank.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    if world % (pp * tp):
        raise ValueError(
            f"{world} processes can't be divided into parallel.pp={pp} x parallel.tp={tp}; "
            f"start a multiple of {pp * tp} processes or change the layout"
        )
    dp = world // (pp * tp)

    def axis(lines: list[tuple[int, ...]]) -> Axis:
        mine: Axis | None = None
        for ranks in lines:  # every rank creates every group, in the same order
            group = dist.new_group(list(ranks)) if len(ranks) > 1 else None
            if rank in ranks:
                mine = Axis(size=len(ranks), index=ranks.index(rank), group=group, ranks=ranks)
        assert mine is not None
        return mine

    def at(p: int, d: int, t: int) -> int:
        return (p * dp + d) * tp + t

    return Mesh(
        tp=axis([tuple(at(p, d, t) for t in range(tp)) for p in range(pp) for d in range(dp)]),
        dp=axis([tuple(at(p, d, t) for d in range(dp)) for p in range(pp) for t in range(tp)]),
        pp=axis([tuple(at(p, d, t) for p in range(pp)) for d in range(dp) for t in range(tp)]),
        rank=rank,
        world_size=world,
    )
