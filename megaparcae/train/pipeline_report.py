"""What a pipeline will do, said before it starts: who runs what, how busy the stages will be."""

from __future__ import annotations

import numpy as np

from megaparcae.config.batch import BatchPlan
from megaparcae.config.schema import RunConfig
from megaparcae.data.sampler import deal, step_sample_ids
from megaparcae.model.draws import sample_depths
from megaparcae.model.expected_depth import expected_loops
from megaparcae.model.loop_plan import GRAD_COST, LoopPlan, depth_order
from megaparcae.parallel.stages import (
    Stage,
    cost_line,
    describe_stages,
    make_stages,
    single_stage,
)
from megaparcae.scaling.simulate import (
    PassCosts,
    PipelineTime,
    one_forward_one_backward,
    pass_costs,
    pass_times,
)

MOST_MICRO_BATCHES = 256
"""Simulated for the message: a tenth of a second."""


def plan_stages(config: RunConfig) -> list[Stage]:
    """The pipeline's stages; one that runs everything without a pipeline."""
    if config.parallel.pp == 1:
        return single_stage(config.model)
    looped = config.model.architecture == "looped"
    loops = expected_loops(config.model.recurrence) if looped else (0.0, 0.0)
    line = cost_line(config.model, loops, config.parallel.repeats_core)
    return make_stages(
        config.model, line, pp=config.parallel.pp, layout=config.parallel.pipeline_layout
    )


def describe_pipeline(config: RunConfig, plan: BatchPlan, stages: list[Stage]) -> str:
    """The stages and their predicted efficiency."""
    steps = max(1, MOST_MICRO_BATCHES // plan.accumulation)
    costs = pass_costs(config.model, config.parallel)
    efficiency = np.mean(
        [simulate_step(config, plan, stages, costs, step).efficiency for step in range(steps)]
    )
    ideal = plan.accumulation / (plan.accumulation + len(stages) - 1)
    return (
        f"{describe_stages(stages)}\npredicted pipeline efficiency {efficiency:.1%} "
        f"({plan.accumulation} equal micro-batches on equal stages: {ideal:.1%})"
    )


def simulate_step(
    config: RunConfig, plan: BatchPlan, stages: list[Stage], costs: PassCosts, step: int
) -> PipelineTime:
    """A step of the first data-parallel rank's pipeline, after the curriculum."""
    loops = loop_plans(config, plan, config.model.recurrence.curriculum_steps + 1 + step)
    parts = [stage.part for stage in stages]
    return one_forward_one_backward(*pass_times(parts, loops, costs, plan.micro_batch))


def loop_plans(config: RunConfig, plan: BatchPlan, step: int) -> list[LoopPlan | None]:
    """Loops of the micro-batches that the first data-parallel rank computes at `step`."""
    if config.model.architecture == "transformer":
        return [None] * plan.accumulation
    ids = step_sample_ids(step, plan.global_batch)
    n, k = sample_depths(config.model.recurrence, seed=config.train.seed, step=step, sample_ids=ids)
    grad_cost = GRAD_COST + config.parallel.repeats_core
    positions = deal(
        n + grad_cost * k,
        dp=plan.dp,
        micro_batches=plan.accumulation,
        rows=plan.micro_batch,
        mode=config.parallel.deal,
    )
    loops: list[LoopPlan | None] = []
    for rows in positions[0]:
        rows = rows[depth_order(n[rows].tolist(), k[rows].tolist())]
        loops.append(LoopPlan.from_depths(n[rows].tolist(), k[rows].tolist(), grad_cost))
    return loops
