"""FLOPs of a step by part: needed by the depths drawn, executed as counted, computed again."""

from __future__ import annotations

from dataclasses import asdict

import torch
import torch.distributed as dist

from megaparcae.config.batch import BatchPlan
from megaparcae.config.schema import REPEATS_BLOCKS, RunConfig
from megaparcae.model.flops import Flops, Recompute, step_flops
from megaparcae.model.recompute import WorkCounter
from megaparcae.train.sinks import Record


class WorkMeter:
    """What all ranks ran in a step against what its samples need; all ranks call it together."""

    def __init__(
        self, config: RunConfig, plan: BatchPlan, counter: WorkCounter, device: torch.device
    ) -> None:
        self.config, self.plan = config, plan
        self.counter, self.device = counter, device
        self.begin()

    def begin(self) -> None:
        """A step begins here: what validation ran before it is not counted."""
        self.seen = self.counter.no_grad, self.counter.grad

    def record(self, no_grad: int, grad: int) -> Record:
        """`flops` by part, and `efficiency`: needed core FLOPs per executed one, without what
        checkpointing computes again. Takes sum(n_i) and sum(k_i) of the whole batch."""
        executed = self._executed_loops()
        needed = self._flops(no_grad, grad, None)
        once = self._flops(*executed, None)
        run = self._flops(*executed, Recompute.of(self.config.parallel))
        core, done = (f.core_no_grad + f.core_grad for f in (needed, once))
        again = {part: value - asdict(once)[part] for part, value in asdict(run).items()}
        return {
            "efficiency": core / done if done else 1.0,
            "flops_needed": asdict(needed),
            "flops_executed": asdict(run),
            "flops_recomputed": again,
        }

    def _executed_loops(self) -> tuple[float, float]:
        """Rows times loops that the ranks counted, without and with gradient."""
        model, parallel = self.config.model, self.config.parallel
        if model.architecture == "transformer":
            return 0.0, 0.0
        now = self.counter.no_grad - self.seen[0], self.counter.grad - self.seen[1]
        counted = torch.tensor(now, dtype=torch.float64, device=self.device)
        if dist.is_initialized():
            dist.all_reduce(counted)
        no_grad, grad = (counted / parallel.tp).tolist()  # tensor-parallel ranks run the same rows
        outside = self.plan.global_batch * (
            model.num_prelude_layers * (1 + (parallel.recompute_prelude in REPEATS_BLOCKS))
            + model.num_coda_layers * (1 + (parallel.recompute_coda in REPEATS_BLOCKS))
        )
        layers = model.num_core_layers
        return no_grad / layers, (grad - outside) / layers / (
            1 + (parallel.recompute_core in REPEATS_BLOCKS)
        )

    def _flops(self, no_grad: float, grad: float, recompute: Recompute | None) -> Flops:
        return step_flops(
            self.config.model,
            rows_no_grad=no_grad,
            rows_grad=grad,
            rows=self.plan.global_batch,
            sequence_length=self.config.model.sequence_length,
            executed=recompute,
        )
