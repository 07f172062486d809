"""What a local parameter is a part of: the one record that optimizer, norm and checkpoint read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the planner does without torch
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """Where a local tensor lies in the full tensor of its canonical name."""

    name: str
    """Canonical name, the same under every layout."""
    full_shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dim: int | None = None
    """Dimension that is split over the tensor-parallel ranks; None is a full copy on each."""
    index: int = 0
    """Which of the equal slices along `dim`."""
    stages: tuple[int, ...] = (0,)
    """Pipeline stages that hold this parameter, ascending; more than one is a tied replica."""

    num_slices: int = 1
    """Equal slices along `dim` (tp, or 1 when dim is None)."""
    tp_partial: bool = False
    """Each tensor-parallel rank computes a part of this full copy's gradient (sequence
    parallelism): sum over tp before use."""

    rows: tuple[int, int] | None = None
    """Begin and end along dimension 0 of the slice above; None is all of it. Optimizer states only:
    a data-parallel rank may own some rows of a large table."""

    @property
    def offset(self) -> tuple[int, ...]:
        """Index of the first local element in the full tensor."""
        first = [0] * len(self.full_shape)
        if self.dim is not None:
            first[self.dim] = self.index * (self.full_shape[self.dim] // self.num_slices)
        if self.rows is not None:
            first[0] += self.rows[0]
        return tuple(first)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape on this rank."""
        shape = list(self.full_shape)
        if self.dim is not None:
            shape[self.dim] //= self.num_slices
        if self.rows is not None:
            shape[0] = self.rows[1] - self.rows[0]
        return tuple(shape)

    def take(self, full: Tensor) -> Tensor:
        """The local slice (a view) of the full tensor."""
        assert tuple(full.shape) == self.full_shape, (self.name, tuple(full.shape), self.full_shape)
        local = full if self.dim is None else full.chunk(self.num_slices, self.dim)[self.index]
        return local if self.rows is None else local[slice(*self.rows)]


def set_spec(parameter: nn.Parameter, spec: ShardSpec) -> None:
    """Attach the record; done once, when the model is laid out."""
    parameter.shard_spec = spec  # type: ignore[attr-defined]


def spec_of(parameter: Tensor) -> ShardSpec:
    """The record of a parameter that has been laid out."""
    return parameter.shard_spec  # type: ignore[attr-defined,no-any-return]


@dataclass(frozen=True)
class Fragment:
    """A rectangle of a full tensor that lives on this rank: what checkpoints are made of."""

    name: str
    """`model.` or `optimizer.<state>.` and the canonical name."""
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]
    """Index of its first element in the full tensor."""
    tensor: Tensor
    """A view of live storage."""


def flat_fragments(name: str, spec: ShardSpec, start: int, flat: Tensor) -> list[Fragment]:
    """Elements [start, start + len(flat)) of a parameter's local slice, in row-major order.

    A flat range is at most three rectangles: the rest of a row, whole rows, the begin of a row.
    """
    shape = spec.local_shape
    width = 1
    for size in shape[1:]:
        width *= size
    fragments, done = [], 0
    while done < flat.numel():
        row, column = divmod(start + done, width)
        left = flat.numel() - done
        count = min(width - column, left) if column or left < width else left // width * width
        rectangle = (1, count) if column or count < width else (count // width, width)
        piece = flat.narrow(0, done, count).view(rectangle)
        assert len(shape) <= 2, f"{name} has {len(shape)} dimensions"
        at = (row, column)[: len(shape)]
        if len(shape) == 1:
            piece = piece.view(-1)
        offset = tuple(a + b for a, b in zip(spec.offset, at, strict=True))
        fragments.append(Fragment(name, spec.full_shape, offset, piece))
        done += count
    return fragments
