"""Means over whole parameters of which every rank holds some pieces."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from megaparcae.parallel.mesh import Mesh
from megaparcae.parallel.ownership import SLICED, Piece


class ParameterMeans:
    """From one sum per owned piece to the mean over each piece's whole parameter.

    Each (piece, tensor-parallel slice) has an entry of its own that one rank fills, so that the
    all-reduces add zeros only and the sum has one order on every rank and pipeline stage.
    """

    def __init__(self, pieces: Sequence[Piece], mesh: Mesh, device: torch.device) -> None:
        """`pieces`: all AdamW pieces of this stage, whoever owns them."""
        self._mesh, self._device = mesh, device
        names = sorted({piece.spec.name for piece in pieces})
        begins: dict[str, list[int]] = {name: [] for name in names}
        for piece in pieces:
            begins[piece.spec.name].append(piece.spec.rows[0] if piece.spec.rows else 0)
        most = max((len(rows) for rows in begins.values()), default=1)
        self._shape = (len(names), most, mesh.tp.size)
        numels = {piece.spec.name: float(prod(piece.spec.full_shape)) for piece in pieces}
        self._numels = torch.tensor([numels[name] for name in names], device=device)
        where = []  # (parameter, piece of it) of this rank's pieces
        for piece in pieces:
            if piece.owner == mesh.dp.index:
                ordered = sorted(begins[piece.spec.name])
                row = piece.spec.rows[0] if piece.spec.rows else 0
                where.append((names.index(piece.spec.name), ordered.index(row), piece.tp_role))
        self._parameter = torch.tensor([w[0] for w in where], dtype=torch.long, device=device)
        self._part = torch.tensor([w[1] for w in where], dtype=torch.long, device=device)
        counted = [role == SLICED or mesh.tp.index == 0 for _, _, role in where]
        self._counted = torch.tensor(counted, dtype=torch.float32, device=device)

    def __call__(self, sums: Tensor) -> Tensor:
        """[owned pieces] -> [owned pieces]; all ranks of a stage call it together."""
        table = torch.zeros(self._shape, device=self._device)
        if len(self._parameter):
            table[self._parameter, self._part, self._mesh.tp.index] = sums * self._counted
        for group in (self._mesh.dp.group, self._mesh.tp.group):
            if group is not None:
                dist.all_reduce(table, group=group)
        total = torch.zeros(self._shape[0], device=self._device)
        for column in table.flatten(1).unbind(1):
            total += column
        return (total / self._numels)[self._parameter]
