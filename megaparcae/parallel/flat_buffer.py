"""One buffer [dp, segment]: gradients travel through it to their owners, and weights back."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaparcae.parallel.collectives import all_gather_single, reduce_scatter_single
from megaparcae.parallel.mesh import Axis
from megaparcae.parallel.ownership import Piece, Plan


class FlatBuffer:
    """A parameter that one rank owns whole has its .grad in the buffer: backward's first gradient
    is moved there when it is made, later micro-batches add to it in place, and no second copy of
    all gradients exists. Whatever else .grad is (None, another tensor), `collect` makes it right.
    """

    def __init__(self, plan: Plan, parameters: Mapping[str, nn.Parameter], dp: Axis) -> None:
        self._plan, self._parameters, self._dp = plan, parameters, dp
        device = next(iter(parameters.values())).device
        self.full = torch.zeros(dp.size, plan.segment, device=device)
        self.owned = self.full[dp.index]
        """This rank's segment: after `gradients_to_owners`, sums over dp."""
        self._places = [self._place(piece) for piece in plan.pieces]
        for piece, place in zip(plan.pieces, self._places, strict=True):
            if piece.spec.rows is None:
                parameter = parameters[piece.spec.name]
                parameter.register_post_accumulate_grad_hook(partial(_move_gradient, place))

    def collect(self) -> None:
        """Bring every .grad into the buffer; a missing one is zero."""
        missing, sources, targets = [], [], []
        for piece, place in zip(self._plan.pieces, self._places, strict=True):
            gradient = self._parameters[piece.spec.name].grad
            if gradient is None:
                missing.append(place)
            elif gradient is not place:
                sources.append(_rows(gradient, piece))
                targets.append(place)
        if missing:
            torch._foreach_zero_(missing)
        if sources:
            torch._foreach_copy_(targets, sources)

    def gradients_to_owners(self) -> None:
        """Sum over dp, in place; of the result each rank uses its own segment only."""
        group = self._dp.group
        if group is None:
            return
        if self.full.is_cuda:
            reduce_scatter_single(self.owned, self.full.view(-1), group=group)
        else:  # gloo's reduce-scatter is an all-reduce of a copy: 1.8 times as long as this
            dist.all_reduce(self.full, group=group)

    def weights_from_owners(self) -> None:
        """Every rank takes each parameter from the rank that owns it."""
        if self._dp.group is None:
            return
        mine, others = self._plan.owned_by(self._dp.index), []
        torch._foreach_copy_([self.owned_part(p) for p in mine], [self.weight(p) for p in mine])
        if self.full.is_cuda:
            all_gather_single(self.full.view(-1), self.owned, group=self._dp.group)
        else:  # six times as fast as gloo's all-gather
            for row, rank in zip(self.full, self._dp.ranks, strict=True):
                dist.broadcast(row, src=rank, group=self._dp.group)
        for piece, place in zip(self._plan.pieces, self._places, strict=True):
            if piece.owner != self._dp.index:
                others.append((self.weight(piece), place))
        torch._foreach_copy_([weight for weight, _ in others], [place for _, place in others])

    def release_gradients(self) -> None:
        """Gradients have been used, and their place in the buffer too."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def owned_part(self, piece: Piece) -> Tensor:
        """The place of one of this rank's pieces in `owned`, in the piece's shape."""
        return self.owned[piece.begin : piece.end].view(piece.spec.local_shape)

    def weight(self, piece: Piece) -> Tensor:
        """The piece of the parameter itself."""
        return _rows(self._parameters[piece.spec.name].detach(), piece)

    def _place(self, piece: Piece) -> Tensor:
        segment = self.full[piece.owner]
        return segment[piece.begin : piece.end].view(piece.spec.local_shape)


def _rows(tensor: Tensor, piece: Piece) -> Tensor:
    return tensor if piece.spec.rows is None else tensor[slice(*piece.spec.rows)]


def _move_gradient(place: Tensor, parameter: Tensor) -> None:
    if parameter.grad is not None and parameter.grad is not place:
        place.copy_(parameter.grad)
        parameter.grad = place
