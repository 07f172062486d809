"""Which data-parallel rank updates which parameter, and where it lies in the flat buffer.

Muon's matrices stay whole; large AdamW tables are cut by rows, so that no rank owns much more than
its share. All of it is a pure function of the stages' parameters, equal on every rank: the copies
of a tied parameter have the same owner and the same neighbours on all its stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from math import prod
from typing import Literal

import numpy as np

from megaparcae.parallel.shard import ShardSpec

ALIGNMENT = 32
"""Elements: where a run of pieces begins, for vector loads and collectives."""

TOLERANCE = 1.05
"""Tables are cut no finer than it takes to keep the fullest rank below this much of its share."""

SUMMED, AVERAGED, SLICED = range(3)
"""What tensor parallelism asks of a gradient: the sum of partial copies, one of equal copies (taken
as their mean, so that they stay equal whatever the kernels do), nothing."""


@dataclass(frozen=True)
class Item:
    """One parameter, seen from this rank's tensor-parallel index."""

    spec: ShardSpec
    kind: Literal["muon", "adamw"]
    decayed: bool


@dataclass(frozen=True)
class Piece:
    """A parameter, or some rows of one, and who updates it."""

    spec: ShardSpec
    kind: Literal["muon", "adamw"]
    decayed: bool
    owner: int
    """Index along the dp axis."""
    begin: int
    """First element in the owner's segment."""

    @property
    def numel(self) -> int:
        """Elements on this rank's slice."""
        return prod(self.spec.local_shape)

    @property
    def end(self) -> int:
        """One past the last element in the owner's segment."""
        return self.begin + self.numel

    @property
    def tp_role(self) -> int:
        """SUMMED, AVERAGED or SLICED."""
        return _tp_role(self.spec)

    @property
    def run(self) -> tuple[object, ...]:
        """Pieces with equal runs lie side by side; matrices of one run have one shape."""
        shape = self.spec.local_shape if self.kind == "muon" else ()
        return (self.tp_role, self.spec.stages, self.kind, shape, _split_dim(self.spec))


@dataclass(frozen=True)
class Block:
    """A range of a segment whose gradients travel alike; padding in it is zero."""

    tp_role: int
    stages: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Plan:
    """All pieces of one pipeline stage, in order of owner and place."""

    pieces: tuple[Piece, ...]
    segment: int
    """Elements of the buffer per data-parallel rank, with padding."""

    def owned_by(self, rank: int) -> tuple[Piece, ...]:
        """The pieces that one dp rank updates."""
        return tuple(piece for piece in self.pieces if piece.owner == rank)

    def blocks_of(self, rank: int) -> tuple[Block, ...]:
        """One dp rank's segment; the stages that share a block have it in the same order."""
        groups = groupby(self.owned_by(rank), key=lambda p: (p.tp_role, p.spec.stages))
        blocks = ((key, list(members)) for key, members in groups)
        return tuple(Block(*key, m[0].begin, m[-1].end) for key, m in blocks)


def plan_ownership(stages: Sequence[Sequence[Item]], stage: int, num_ranks: int) -> Plan:
    """Distribute the parameters of all pipeline stages, and lay out those of `stage`."""
    return lay_out_stage(assign_owners(stages, num_ranks), stage, num_ranks)


def assign_owners(stages: Sequence[Sequence[Item]], num_ranks: int) -> list[tuple[Item, int]]:
    """Parameters of all stages, or rows of them, each with its data-parallel owner.

    Matrices are spread by the cost of their orthogonalisation, then rows of tables fill up what
    memory is left. A tied parameter goes where the fullest of its stages has most room.
    """
    items = {item.spec.name: item for stage_items in stages for item in stage_items}
    share = max(_numel_of(stage_items) for stage_items in stages) / num_ranks
    for pieces_per_rank in (0, 1, 2, 4, 8, 16, 32):  # whole tables have their gradients in place
        limit = share / pieces_per_rank if pieces_per_rank else math.inf
        parts = [part for item in items.values() for part in _cut(item, limit=max(1, limit))]
        owners, fullest = _assign(parts, num_stages=len(stages), num_ranks=num_ranks)
        if fullest <= TOLERANCE * share:
            break
    return list(zip(parts, owners, strict=True))


def lay_out_stage(owned: Sequence[tuple[Item, int]], stage: int, num_ranks: int) -> Plan:
    """The pieces of one stage, side by side in their owners' segments."""
    here = [
        Piece(item.spec, item.kind, item.decayed, owner, 0)
        for item, owner in owned
        if stage in item.spec.stages
    ]
    return _lay_out(here, num_ranks)


def _numel_of(items: Sequence[Item]) -> int:
    return sum(prod(item.spec.local_shape) for item in items)


def _cut(item: Item, *, limit: float) -> list[Item]:
    """The item, or its rows in equal parts of about `limit` elements."""
    shape = item.spec.local_shape
    if item.kind == "muon" or prod(shape) <= limit:
        return [item]
    count = min(shape[0], math.ceil(prod(shape) / limit))
    borders = [shape[0] * i // count for i in range(count + 1)]
    return [replace(item, spec=replace(item.spec, rows=rows)) for rows in pairwise(borders)]


def _assign(items: Sequence[Item], *, num_stages: int, num_ranks: int) -> tuple[list[int], int]:
    """The owner of each item, and the elements of the fullest rank of all stages.

    Matrices come first, of equals the tied ones, then the largest.
    """
    loads = np.zeros((num_stages, num_ranks), np.int64)
    owners = [0] * len(items)
    for kind in ("muon", "adamw"):
        indices = [i for i, item in enumerate(items) if item.kind == kind]
        weights = {i: _weight(items[i]) for i in indices}
        costs = np.zeros_like(loads) if kind == "muon" else loads
        for i in sorted(indices, key=lambda i: _order(items[i], weights[i])):
            spec, stages = items[i].spec, list(items[i].spec.stages)
            owner = owners[i] = int(costs[stages].max(axis=0).argmin())
            costs[stages, owner] += weights[i]
            if costs is not loads:
                loads[stages, owner] += prod(spec.local_shape)
    return owners, int(loads.max())


def _weight(item: Item) -> int:
    """Muon: products of the orthogonalisation, in the whole matrix. AdamW: elements."""
    if item.kind == "muon":
        return prod(item.spec.full_shape) * min(item.spec.full_shape)
    return prod(item.spec.local_shape)


def _order(item: Item, weight: int) -> tuple[object, ...]:
    return (len(item.spec.stages) == 1, -weight, item.spec.name, item.spec.rows or (0, 0))


def _lay_out(pieces: list[Piece], num_ranks: int) -> Plan:
    placed: list[Piece] = []
    longest = 0
    by_owner: list[list[Piece]] = [[] for _ in range(num_ranks)]
    for piece in pieces:
        by_owner[piece.owner].append(piece)
    for own in by_owner:
        end, run = 0, None
        for piece in sorted(own, key=lambda p: (_sortable(p), p.spec.name, p.spec.rows or (0, 0))):
            if piece.kind == "adamw" or piece.run != run:
                end = _aligned(end)
            placed.append(replace(piece, begin=end))
            end, run = placed[-1].end, piece.run
        longest = max(longest, end)
    return Plan(tuple(placed), _aligned(longest))


def _sortable(piece: Piece) -> tuple[object, ...]:
    role, stages, kind, shape, dim = piece.run
    return (role, stages, kind, shape, -1 if dim is None else dim)


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def _split_dim(spec: ShardSpec) -> int | None:
    return spec.dim if spec.num_slices > 1 else None


def _tp_role(spec: ShardSpec) -> int:
    if _split_dim(spec) is not None:
        return SLICED
    return SUMMED if spec.tp_partial else AVERAGED
