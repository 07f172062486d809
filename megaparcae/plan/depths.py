"""The depths that a planned run will draw and deal, and what they ask of each stage. No torch."""

# D data-parallel ranks, M micro-batches, R rows of a micro-batch
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megaparcae.config.batch import BatchPlan
from megaparcae.config.schema import RecurrenceConfig, RunConfig
from megaparcae.data.sampler import deal, step_sample_ids
from megaparcae.model.draws import sample_depths
from megaparcae.model.loop_plan import GRAD_COST, LoopPlan, depth_order
from megaparcae.parallel.stages import Stage
from megaparcae.scaling.simulate import PassCosts, pass_times

NUM_STEPS = 2
"""Steps that are drawn."""
RANKS = 4
"""Pipelines of a step that are simulated."""

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Draws:
    """Depths of the sequences of a run, as training draws and deals them."""

    recurrence: RecurrenceConfig
    seed: int
    deal: Literal["none", "balanced"]
    looped: bool

    @staticmethod
    def of(config: RunConfig) -> Draws:
        """Of a run's model."""
        model = config.model
        looped = model.architecture == "looped"
        return Draws(model.recurrence, config.train.seed, config.parallel.deal, looped)

    @lru_cache(maxsize=512)  # noqa: B019  (it lives as long as the plan)
    def depths(self, batch: BatchPlan, repeats: bool, step: int) -> tuple[Ints, Ints]:
        """Loops without and with gradient [D, M, R]."""
        shape = (batch.dp, batch.accumulation, batch.micro_batch)
        if not self.looped:
            return np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        step += self.recurrence.curriculum_steps + 1
        ids = step_sample_ids(step, batch.global_batch)
        n, k = sample_depths(self.recurrence, seed=self.seed, step=step, sample_ids=ids)
        costs = n + (GRAD_COST + repeats) * k
        names = ("dp", "micro_batches", "rows")
        places = deal(costs, mode=self.deal, **dict(zip(names, shape, strict=True)))
        return n[places], k[places]

    @lru_cache(maxsize=512)  # noqa: B019
    def loops(
        self, batch: BatchPlan, repeats: bool, step: int, rank: int
    ) -> tuple[LoopPlan | None, ...]:
        """Of the micro-batches of one data-parallel rank."""
        if not self.looped:
            return (None,) * batch.accumulation
        plans = []
        for n, k in zip(
            *(depths[rank] for depths in self.depths(batch, repeats, step)), strict=True
        ):
            order = depth_order(n.tolist(), k.tolist())
            sorted_depths = n[order].tolist(), k[order].tolist()
            plans.append(LoopPlan.from_depths(*sorted_depths, GRAD_COST + repeats))
        return tuple(plans)


def deepest_grad_units(
    config: RunConfig, batch: BatchPlan, stages: Sequence[Stage], draws: Draws
) -> list[float]:
    """Rows times core blocks with gradient on each stage, of the deepest micro-batch drawn."""
    repeats, layers = config.parallel.repeats_core, config.model.num_core_layers
    if len(stages) == 1:
        deepest = max(draws.depths(batch, repeats, s)[1].sum(-1).max() for s in range(NUM_STEPS))
        return [float(deepest) * layers]
    parts = tuple(stage.part for stage in stages)
    costs = PassCosts(num_core_layers=layers, head=0.0, backward=1.0)
    bare = [replace(part, prelude=range(0), coda=range(0)) for part in parts]
    most = np.zeros(len(stages))
    for rank in range(min(RANKS, batch.dp)):
        loops = draws.loops(batch, repeats, 0, rank)
        most = np.maximum(most, pass_times(bare, loops, costs, batch.micro_batch)[1].max(axis=1))
    return [float(units) for units in most]
