"""Training without a pipeline: DeepSpeed's engine around the whole model, ZeRO 0 to 3."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from megaparcae.engine.base import Accept, MicroBatch
from megaparcae.engine.decline import decline
from megaparcae.engine.fragments import (
    finish_load,
    finish_weights,
    last_step_skipped,
    local_fragments,
    owned_fragments,
    step_count,
    watch_gradients,
)
from megaparcae.engine.mpu import ModelParallelUnit
from megaparcae.parallel.mesh import Mesh
from megaparcae.parallel.sequence import sum_partial_gradients_as_produced
from megaparcae.parallel.shard import Fragment
from megaparcae.parallel.sharded_optimizer import ShardedOptimizer


class PlainEngine:
    """An `Engine` over deepspeed.initialize."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        options: dict[str, Any],
        mesh: Mesh,
        leaf_modules: tuple[type[nn.Module], ...],
        run_order: Iterable[tuple[nn.Module, nn.Module]] | None,
    ) -> None:
        """`leaf_modules` are gathered as a whole under ZeRO-3: the module that holds the loop, and
        those that use weights of modules inside without calling these. With a `run_order` our
        optimizer's weights travel during the next forward pass (`overlap_forward`)."""
        self.mesh = mesh
        self.zero_stage: int = options["zero_optimization"]["stage"]
        if self.zero_stage:
            sum_partial_gradients_as_produced(model, mesh)
        if self.zero_stage == 3:
            deepspeed.utils.set_z3_leaf_modules(model, list(leaf_modules))
        self.deepspeed, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config={**options, "zero_allow_untested_optimizer": True, "steps_per_print": 2**62},
            mpu=ModelParallelUnit(mesh) if mesh.tp.size > 1 else None,
        )
        if not self.zero_stage:  # our optimizer moves each gradient once, itself
            self.deepspeed.enable_backward_allreduce = False
        self.module = model
        self.optimizer: Optimizer = self.deepspeed.optimizer
        if run_order is not None and isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.overlap_forward(model, run_order)
        watch_gradients(self.optimizer)
        # DeepSpeed averages over dp; our losses are already shares of one mean.
        self.dp_factor = mesh.dp.size if self.zero_stage else 1

    def train_batch(
        self, batches: Sequence[MicroBatch], loss_scale: float, accept: Accept | None = None
    ) -> Tensor:
        self.module.train()
        total = torch.zeros((), device=self.deepspeed.device)
        for i, batch in enumerate(batches, 1):
            loss = self.deepspeed(batch) * loss_scale
            total += loss.detach()
            if i == len(batches):
                self._sum_over_dp(total)
                if accept is not None and not accept(float(total)):
                    loss = decline(loss)
                if isinstance(self.optimizer, ShardedOptimizer):
                    self.optimizer.overlap_next_backward()
            self.deepspeed.backward(loss * self.dp_factor, scale_wrt_gas=False)
            self.deepspeed.step()
        return total

    @torch.no_grad()
    def eval_batch(self, batches: Sequence[MicroBatch]) -> Tensor:
        self.module.eval()
        total = torch.zeros((), device=self.deepspeed.device)
        for batch in batches:
            total += self.deepspeed(batch)
        return self._sum_over_dp(total)

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

    def _sum_over_dp(self, value: Tensor) -> Tensor:
        if self.mesh.dp.group is not None:
            dist.all_reduce(value, group=self.mesh.dp.group)
        return value
