"""Muon + AdamW for every layout, with states and work spread over the data-parallel ranks.

DeepSpeed's client optimizer at ZeRO stage 0: fp32 weights, and DeepSpeed's own reductions and
clipping off. One step: gradients are summed over dp as each goes to its owner, over tp where ranks
hold parts, over the stages of a tied parameter; one global norm; Muon on whole matrices and AdamW
by the owners; weights go back to all. Tied replicas and tensor-parallel copies stay bit-identical.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaparcae.log import logger
from megaparcae.parallel.collectives import all_gather, local_slice
from megaparcae.parallel.flat_buffer import FlatBuffer
from megaparcae.parallel.grad_norm import clip_factor, global_norm, square_sum
from megaparcae.parallel.mesh import Mesh
from megaparcae.parallel.ownership import AVERAGED, SLICED, Item, Piece, plan_ownership
from megaparcae.parallel.parameter_means import ParameterMeans
from megaparcae.parallel.shard import ShardSpec, spec_of
from megaparcae.parallel.ties import gather_stages, make_tie_groups
from megaparcae.parallel.update_rules import Recipe

MATRIX_BATCH = 1 << 26
"""Elements of whole matrices that Muon works on at once (0.25 GiB in fp32, and a few such)."""


@dataclass(frozen=True)
class MatrixGroup:
    """Owned matrices of one shape, side by side in the buffer. b matrices."""

    pieces: tuple[Piece, ...]
    momentum: Tensor
    """[b, rows, columns] of the local slices."""
    second_moment: Tensor
    """[b, rows, 1] or [b, 1, columns] of the whole matrices: a copy on each tp rank."""

    @property
    def spec(self) -> ShardSpec:
        """Record of the first matrix; shape and split are those of all."""
        return self.pieces[0].spec

    @property
    def full_shape(self) -> tuple[int, int]:
        """Shape of the whole matrices."""
        rows, columns = self.spec.full_shape
        return rows, columns


@dataclass(frozen=True)
class VectorStates:
    """AdamW's averages, one tensor per owned piece."""

    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]


class ShardedOptimizer(torch.optim.Optimizer):
    """The true gradient is the sum of the local .grads over dp ranks (the loss is scaled for that).

    A missing .grad is zero. `step` consumes the gradients. A non-finite norm skips the update on
    all ranks together: weights, states and step_count stay as they are.
    """

    _global_grad_norm: float = 0.0
    """Before clipping, of the last step; DeepSpeed reads it under this name."""
    last_step_skipped: bool = False
    skipped_steps: int = 0
    """Skipped updates so far."""
    _use_order: list[str] | None = None
    """All parameters as a forward pass uses them, where weights travel during that."""
    step_count: int = 0
    """Updates made: AdamW's t, one number for all parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter], recipe: Recipe, mesh: Mesh) -> None:
        """All ranks construct together; every trained parameter has a ShardSpec and is fp32."""
        trained = [p for p in parameters if p.requires_grad]
        self._mesh, self._recipe = mesh, recipe
        self._parameters = {spec_of(p).name: p for p in trained}
        _check(trained, self._parameters)
        stages = gather_stages([self._item(p) for p in trained], mesh)
        names = {item.spec.name: item.spec.full_shape for items in stages for item in items}
        logger.info(recipe.describe(names.items()))
        self._plan = plan_ownership(stages, mesh.pp.index, mesh.dp.size)
        self._owned = self._plan.owned_by(mesh.dp.index)
        self._blocks = self._plan.blocks_of(mesh.dp.index)
        self._tie_groups = make_tie_groups(stages, mesh)
        self._buffer = FlatBuffer(self._plan, self._parameters, mesh.dp)
        self._device = self._buffer.full.device
        self._vectors = [piece for piece in self._owned if piece.kind == "adamw"]
        all_vectors = [piece for piece in self._plan.pieces if piece.kind == "adamw"]
        self._means = ParameterMeans(all_vectors, mesh, self._device)
        self._vector_states: VectorStates | None = None
        self._matrix_groups: list[MatrixGroup] = []
        super().__init__(self._param_groups(trained), {})
        self.set_hyperparameters(1.0, 0.95, 0.0)

    def set_hyperparameters(
        self, lr_factor: float, muon_momentum: float, muon_weight_decay: float
    ) -> None:
        """The scheduled values of the next step."""
        self._momentum, self._weight_decay = muon_momentum, muon_weight_decay
        self._adamw_lr = self._recipe.adamw.lr * lr_factor
        self._muon_lr = self._recipe.muon.lr * lr_factor
        for group in self.param_groups:  # for those who read rates there, as DeepSpeed does
            group["lr"] = self._muon_lr if group["kind"] == "muon" else self._adamw_lr

    def overlap_next_backward(self) -> None:
        """The next backward pass is the last before `step`, on all ranks: dp sums start in it."""
        self._buffer.overlap_next_backward()

    def overlap_forward(
        self, model: nn.Module, run_order: Iterable[tuple[nn.Module, nn.Module]]
    ) -> None:
        """From now on a step ends while large weights are on their way to the other dp ranks.

        `run_order` pairs modules with those whose weights they are the first to use, as they run:
        each waits for these when it is called, `model` for all others. Whoever reads weights
        outside of a forward pass calls `finish_weights` before.
        """
        if self._mesh.dp.group is None:
            return
        names: list[str] = []
        for module, holder in run_order:
            own = [spec_of(p).name for p in holder.parameters() if p.requires_grad]
            module.register_forward_pre_hook(partial(self._before_forward, own))
            names += own
        others = [name for name in self._parameters if name not in names]
        model.register_forward_pre_hook(partial(self._before_forward, others))
        self._use_order = list(dict.fromkeys(others + names))  # a head may be named twice

    def finish_weights(self) -> None:
        """Wait for weights that the last step still sends."""
        self._buffer.receive_weights()

    def _before_forward(self, names: list[str], *_: object) -> None:
        self._buffer.receive_weights(names)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update of all parameters, all ranks together."""
        assert closure is None, "the gradients come from the engine's backward passes"
        self.init_states()
        self.finish_weights()  # of a step that no forward pass has followed
        self._buffer.collect()
        self._buffer.gradients_to_owners()
        self._sum_over_tp()
        self._sum_over_stages()
        norm = self._global_grad_norm = self._measure_norm()
        self.last_step_skipped = not math.isfinite(norm)
        if self.last_step_skipped:
            self.skipped_steps += 1
        else:
            factor = clip_factor(norm, self._recipe.grad_clip)
            if factor < 1:
                self._buffer.owned.mul_(factor)
            self._update()
            if self._use_order is None:
                self._buffer.weights_from_owners()
            else:
                self._buffer.send_weights(self._use_order)
        self._buffer.release_gradients()

    def _update(self) -> None:
        """This rank's share of the weights, from its gradients; these are overwritten."""
        self.step_count += 1
        self._update_vectors()
        for group in self._matrix_groups:
            self._update_matrices(group)

    def init_states(self) -> None:
        """Allocate zero states, for the first step or for a load to fill in place."""
        if self._vector_states is not None:
            return
        shapes = [piece.spec.local_shape for piece in self._vectors]
        self._vector_states = VectorStates(*([self._zeros(s) for s in shapes] for _ in range(2)))
        self._matrix_groups = [self._make_group(pieces) for pieces in self._matrix_batches()]

    def named_states(self) -> Iterator[tuple[ShardSpec, str, Tensor]]:
        """(record, key, local tensor) of every state tensor this rank owns.

        A tied parameter's states are on all its stages, a copy's on all tp ranks, equal bit by bit.
        """
        self.init_states()
        assert self._vector_states is not None
        for i, piece in enumerate(self._vectors):
            yield piece.spec, "exp_avg", self._vector_states.exp_avgs[i]
            yield piece.spec, "exp_avg_sq", self._vector_states.exp_avg_sqs[i]
        for group in self._matrix_groups:
            for i, piece in enumerate(group.pieces):
                yield piece.spec, "momentum", group.momentum[i]
                second = group.second_moment[i]
                whole = replace(
                    piece.spec, full_shape=tuple(second.shape), dim=None, index=0, num_slices=1
                )
                yield whole, "second_moment", second

    @torch.no_grad()
    def after_load(self) -> None:
        """Weights and states were written in place: dp ranks take each weight from its owner."""
        self._buffer.weights_from_owners()

    def _sum_over_tp(self) -> None:
        tp = self._mesh.tp
        copies = [block for block in self._blocks if block.tp_role != SLICED]
        if tp.group is None or not copies:
            return
        for block in copies:
            if block.tp_role == AVERAGED:
                self._buffer.owned[block.begin : block.end].div_(tp.size)
        dist.all_reduce(self._buffer.owned[: copies[-1].end], group=tp.group)

    def _sum_over_stages(self) -> None:
        for block in self._blocks:
            if len(block.stages) > 1:
                tied = self._buffer.owned[block.begin : block.end]
                dist.all_reduce(tied, group=self._tie_groups[block.stages])

    def _measure_norm(self) -> float:
        first = self._mesh.tp.index == 0
        counted = [
            self._buffer.owned[block.begin : block.end]
            for block in self._blocks
            if block.stages[0] == self._mesh.pp.index and (first or block.tp_role == SLICED)
        ]
        return global_norm(square_sum(counted, self._device), self._mesh.world_size)

    def _update_vectors(self) -> None:
        assert self._vector_states is not None
        self._recipe.adamw.update(
            [self._buffer.weight(piece) for piece in self._vectors],
            [self._buffer.owned_part(piece) for piece in self._vectors],
            self._vector_states.exp_avgs,
            self._vector_states.exp_avg_sqs,
            lr=self._adamw_lr,
            decayed=[piece.decayed for piece in self._vectors],
            step=self.step_count,
            mean_over_parameters=self._means,
        )

    def _update_matrices(self, group: MatrixGroup) -> None:
        muon, tp = self._recipe.muon, self._mesh.tp
        begin, end = group.pieces[0].begin, group.pieces[-1].end
        gradient = self._buffer.owned[begin:end].view(group.momentum.shape)
        ahead = muon.look_ahead(gradient, group.momentum, self._momentum)
        dim = _batched_split_dim(group.spec)
        if dim is not None:
            ahead = all_gather(ahead, tp.group, dim)
        direction = muon.direction(ahead, group.second_moment)
        if dim is not None:
            direction = local_slice(direction, tp.group, dim)
        muon.apply(
            [self._buffer.weight(piece) for piece in group.pieces],
            direction,
            full_shape=group.full_shape,
            lr=self._muon_lr,
            weight_decay=self._weight_decay,
        )

    def _matrix_batches(self) -> Iterator[tuple[Piece, ...]]:
        """Owned matrices in batches: equal on all stages of a tied parameter, for the order of sums
        in a batched product may depend on the batch."""
        batch: list[Piece] = []
        for piece in (piece for piece in self._owned if piece.kind == "muon"):
            elements = math.prod(piece.spec.full_shape) * (len(batch) + 1)
            if batch and (piece.run != batch[0].run or elements > MATRIX_BATCH):
                yield tuple(batch)
                batch = []
            batch.append(piece)
        if batch:
            yield tuple(batch)

    def _make_group(self, pieces: tuple[Piece, ...]) -> MatrixGroup:
        spec, count = pieces[0].spec, len(pieces)
        rows, columns = spec.full_shape
        second_shape = self._recipe.muon.second_moment_shape((rows, columns))
        momentum = self._zeros((count, *spec.local_shape))
        return MatrixGroup(pieces, momentum, self._zeros((count, *second_shape)))

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, device=self._device)

    def _item(self, parameter: nn.Parameter) -> Item:
        spec = spec_of(parameter)
        rule = self._recipe.rule(spec.name, spec.full_shape)
        return Item(spec, rule.kind, rule.decayed)

    def _param_groups(self, trained: list[nn.Parameter]) -> list[dict[str, Any]]:
        groups = [
            {"kind": kind, "params": [p for p in trained if self._item(p).kind == kind], "lr": 0.0}
            for kind in ("muon", "adamw")
        ]
        return [group for group in groups if group["params"]]


def _batched_split_dim(spec: ShardSpec) -> int | None:
    """Dimension of [b, rows, columns] that tensor parallelism splits."""
    return None if spec.dim is None or spec.num_slices == 1 else spec.dim + 1


def _check(trained: list[nn.Parameter], by_name: dict[str, nn.Parameter]) -> None:
    assert len(trained) == len(by_name), "two parameters have one canonical name"
    for name, parameter in by_name.items():
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"parameter {name} is {parameter.dtype}, the sharded optimizer keeps fp32 weights; "
                "use train.precision bf16 (autocast) instead of casting the model"
            )
        assert tuple(parameter.shape) == spec_of(parameter).local_shape, (name, parameter.shape)
