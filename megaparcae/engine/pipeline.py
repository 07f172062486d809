"""Training on a pipeline: DeepSpeed's 1F1B schedule over one module per stage.

Only one packed float tensor crosses a border. Micro-batches do not travel: the data is a pure
function of the step, so every stage reads its own and takes the next one at each forward pass.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from megaparcae.config.layout import Part
from megaparcae.engine.base import Accept, MicroBatch
from megaparcae.engine.decline import decline
from megaparcae.engine.fragments import (
    finish_load,
    finish_weights,
    last_step_skipped,
    local_fragments,
    owned_fragments,
    refresh_master,
    step_count,
    watch_gradients,
)
from megaparcae.parallel.mesh import Mesh
from megaparcae.parallel.sequence import sum_partial_gradients_as_produced
from megaparcae.parallel.shard import Fragment, spec_of


class StageModule(nn.Module):
    """This rank's stage: takes the next queued micro-batch and the activations that came in."""

    def __init__(self, model: nn.Module, part: Part, zero_missing: bool) -> None:
        super().__init__()
        self.model = model
        self.part = part
        self.zero_missing = zero_missing
        self.queue: deque[MicroBatch] = deque()
        self.loss_scale = 1.0
        self.judge: Callable[[Tensor], Tensor] | None = None
        """Sees every training loss of the head, and may decline the step at the last."""

    def forward(self, carry: Tensor) -> Tensor:
        """Activations for the next stage, or on the last one the scaled loss."""
        output = self.model(self.queue.popleft(), self.part, carry)
        if self.zero_missing and torch.is_grad_enabled():
            output = _touch_all.apply(output, *self.model.parameters())
        if not self.part.head:
            return output
        loss = output * self.loss_scale
        return loss if self.judge is None or not torch.is_grad_enabled() else self.judge(loss)


class _touch_all(torch.autograd.Function):
    """Identity on x whose backward pass gives every parameter at least a gradient of zeros.

    A stage whose loops all run without gradient would otherwise leave the tied core without one,
    and DeepSpeed's sum over the tied stages would wait for it for ever.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return (grad, *(torch.zeros_like(p) for p in ctx.saved_tensors))


class _Pipeline(PipelineModule):
    """One layer per stage; ours is the local one, and our tied weights are told to DeepSpeed."""

    def __init__(self, stage: StageModule, mesh: Mesh, tied: list[tuple[Tensor, ProcessGroup]]):
        layers: list[nn.Module] = [nn.Identity() for _ in range(mesh.pp.size)]
        layers[mesh.pp.index] = stage
        topology = PipeModelDataParallelTopology(
            num_pp=mesh.pp.size, num_mp=mesh.tp.size, num_dp=mesh.dp.size
        )
        super().__init__(layers, topology=topology, partition_method="uniform")
        self.tied = tied
        for parameter in stage.parameters():  # counted once in DeepSpeed's gradient norm
            parameter.ds_pipe_replicated = spec_of(parameter).stages[0] != mesh.pp.index  # type: ignore[attr-defined]

    def adopt_placeholders(self, optimizer: Optimizer) -> None:
        """DeepSpeed wants a name for everything the optimizer holds, the model's or not."""
        mine = set(self.parameters())
        held = [p for group in optimizer.param_groups for p in group["params"] if p not in mine]
        for number, placeholder in enumerate(held):
            self.register_parameter(f"placeholder_{number}", placeholder)

    def get_tied_weights_and_groups(self) -> list[tuple[Tensor, ProcessGroup]]:
        return self.tied


class PipelineEngine:
    """An `Engine` over DeepSpeed's PipelineEngine, ZeRO 0 (our optimizer) or 1."""

    def __init__(
        self,
        model: nn.Module,
        part: Part,
        optimizer: Optimizer,
        options: dict[str, Any],
        mesh: Mesh,
    ) -> None:
        self.mesh = mesh
        zero_stage = options["zero_optimization"]["stage"]
        tied = _tied_groups(model, mesh)
        if zero_stage:
            sum_partial_gradients_as_produced(model, mesh)
        self.stage = StageModule(model, part, zero_missing=bool(zero_stage))
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints its layer list
            pipeline = _Pipeline(self.stage, mesh, tied if zero_stage else [])
            pipeline.adopt_placeholders(optimizer)
            self.deepspeed, *_ = deepspeed.initialize(
                model=pipeline,
                optimizer=optimizer,
                config={**options, "zero_allow_untested_optimizer": True, "steps_per_print": 2**62},
            )
        if not zero_stage:  # our optimizer moves each gradient once, itself
            self.deepspeed.pipeline_enable_backward_allreduce = False
        self.module = model
        self.optimizer: Optimizer = self.deepspeed.optimizer
        watch_gradients(self.optimizer)
        # With three or more summands the order of DeepSpeed's sum over dp may depend on where a
        # gradient lies in its buffer, which differs from stage to stage: copies would drift apart.
        self.drifting = tied if zero_stage and mesh.dp.size > 2 else []
        self.factor = self.deepspeed.gradient_accumulation_steps() * (
            mesh.dp.size if zero_stage else 1
        )
        """DeepSpeed averages over micro-batches and dp; our losses are shares of one mean."""

    def train_batch(
        self, batches: Sequence[MicroBatch], loss_scale: float, accept: Accept | None = None
    ) -> Tensor:
        self._load(batches, loss_scale * self.factor)
        self.stage.judge = None if accept is None else self._make_judge(accept)
        mean = self.deepspeed.train_batch(_nothing())  # over micro-batches and dp ranks
        self._reunite_copies()
        return mean * (
            self.deepspeed.gradient_accumulation_steps() * self.mesh.dp.size / self.factor
        )

    def eval_batch(self, batches: Sequence[MicroBatch]) -> Tensor:
        self._load(batches, 1.0)
        self.deepspeed.reset_activation_shape()  # rows may differ from training's
        losses = self.deepspeed.eval_batch(
            _nothing(), reduce_output=None, bcast_loss=False, num_micro_batches=len(batches)
        )
        self.deepspeed.reset_activation_shape()
        last = self.mesh.pp.index == self.mesh.pp.size - 1
        device = self.deepspeed.device
        total = torch.stack(list(losses)).sum() if last else torch.zeros((), device=device)
        for axis in (self.mesh.pp, self.mesh.dp):
            if axis.group is not None:
                dist.all_reduce(total, group=axis.group)
        return total

    def grad_norm(self) -> float:
        return float(self.deepspeed.get_global_grad_norm())

    def last_step_skipped(self) -> bool:
        return last_step_skipped(self.optimizer)

    def finish_step(self) -> None:
        finish_weights(self.optimizer)

    def owned_fragments(self) -> list[Fragment]:
        return owned_fragments(self.module.parameters(), self.optimizer, self.mesh)

    def local_fragments(self) -> list[Fragment]:
        return local_fragments(self.module.parameters(), self.optimizer, self.mesh)

    def step_count(self) -> int:
        return step_count(self.optimizer)

    def finish_load(self, updates: int) -> None:
        finish_load(self.optimizer, updates)

    def _make_judge(self, accept: Accept) -> Callable[[Tensor], Tensor]:
        """Adds a step's losses up, and asks when the last micro-batch's is known."""
        total = torch.zeros((), device=self.deepspeed.device)

        def judge(loss: Tensor) -> Tensor:
            total.add_(loss.detach() / self.factor)
            if self.stage.queue:
                return loss
            if self.mesh.dp.group is not None:
                dist.all_reduce(total, group=self.mesh.dp.group)
            return loss if accept(float(total)) else decline(loss)

        return judge

    @torch.no_grad()
    def _reunite_copies(self) -> None:
        """Every stage takes its copies of tied weights from the first stage that has one."""
        for parameter, group in self.drifting:
            dist.broadcast(parameter, src=dist.get_global_rank(group, 0), group=group)
            refresh_master(parameter)

    def _load(self, batches: Sequence[MicroBatch], loss_scale: float) -> None:
        self.stage.queue.clear()  # a step that was cut short leaves some
        self.stage.queue.extend(batches)
        self.stage.loss_scale = loss_scale


def _nothing():  # type: ignore[no-untyped-def]
    """DeepSpeed pulls (inputs, labels) on the first and last stage; ours have their own."""
    return itertools.repeat((torch.zeros(1), torch.zeros(1)))


def _tied_groups(model: nn.Module, mesh: Mesh) -> list[tuple[Tensor, ProcessGroup]]:
    """Weights that other stages hold too, with the group to sum over, in order of name.

    Stages of one group come in the same order everywhere, so all ranks agree on the collectives.
    """
    mine = {spec_of(p).stages for p in model.parameters() if len(spec_of(p).stages) > 1}
    gathered: list[set[tuple[int, ...]]] = [set()] * mesh.world_size
    dist.all_gather_object(gathered, mine)
    groups: dict[tuple[int, ...], ProcessGroup] = {}
    layout = (mesh.pp.size, mesh.dp.size, mesh.tp.size)
    for stages in sorted(set().union(*gathered)):
        for d, t in itertools.product(range(layout[1]), range(layout[2])):
            ranks = [(p * layout[1] + d) * layout[2] + t for p in stages]
            group = dist.new_group(ranks)
            if mesh.rank in ranks:
                groups[stages] = group
    tied = [p for p in model.parameters() if len(spec_of(p).stages) > 1]
    return [(p, groups[spec_of(p).stages]) for p in sorted(tied, key=lambda p: spec_of(p).name)]
