"""What the stages of a real pipeline compute, against the plan and the simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from deepspeed.runtime.pipe import schedule
from tiny import merged, start, steps, tiny_config

from harness import run_ranks
from megaparcae.config.batch import BatchPlan, solve_batch
from megaparcae.config.load import preset_config
from megaparcae.config.schema import RunConfig
from megaparcae.engine.pipeline import StageModule
from megaparcae.parallel.stages import Stage
from megaparcae.scaling.simulate import (
    one_forward_one_backward,
    pass_costs,
    pass_times,
    stage_order,
)
from megaparcae.train.build import plan_stages
from megaparcae.train.pipeline_report import describe_pipeline, loop_plans

NUM_STEPS = 50
NAMED = "prelude | core | coda"
MODEL = {"model": {"recurrence": {"mean_recurrence": 6, "backprop_depth": 3}}}


def count_work(changes: dict[str, Any], num_steps: int) -> tuple[int, int]:
    """Rows times blocks of this rank, without and with gradient."""
    run, batches = start(tiny_config(changes))
    steps(run, batches, 0, num_steps)
    return run.model.work.no_grad, run.model.work.grad


def test_each_stage_of_a_real_run_does_the_work_that_the_plan_gives_it():
    parallel = {"parallel": {"pp": 2}, "train": {"micro_batch_size": 4}}
    changes = merged(MODEL, parallel)
    config = tiny_config(changes)
    stages = plan_stages(config)
    rows = NUM_STEPS * (config.train.global_batch_size or 0)
    ranks = run_ranks(count_work, 2, changes, NUM_STEPS, timeout=120)
    for planned, (no_grad, grad) in zip(blocks(config, stages), ranks, strict=True):
        assert no_grad + 3 * grad == pytest.approx(rows * planned, rel=0.03)


def blocks(config: RunConfig, stages: list[Stage]) -> list[float]:
    """Planned cost per row of each stage's blocks: the head has none."""
    head = 3 * pass_costs(config.model, config.parallel).head
    return [stage.cost - head * stage.part.head for stage in stages]


@pytest.mark.parametrize("recompute", ["none", "loop"])
@pytest.mark.parametrize("pp, layout", [*((p, "balanced") for p in (2, 3, 4, 8)), (3, NAMED)])
def test_fifty_steps_of_the_largest_model_share_their_work_as_planned(pp, layout, recompute):
    """By the simulator, whose passes are those of a real pipeline (see below)."""
    options = {"pp": pp, "pipeline_layout": f"'{layout}'", "recompute_core": recompute}
    config = preset_config("1p3b", [f"parallel.{name}={value}" for name, value in options.items()])
    stages = plan_stages(config)
    plan = BatchPlan(global_batch=64, micro_batch=4, accumulation=16, dp=1, pp=pp)
    costs = replace(pass_costs(config.model, config.parallel), head=0.0)
    parts = [stage.part for stage in stages]
    done = np.zeros(pp)
    for step in range(NUM_STEPS):
        loops = loop_plans(config, plan, step)
        done += sum(times.sum(axis=1) for times in pass_times(parts, loops, costs, 4))
    planned = np.array(blocks(config, stages)) * NUM_STEPS * 64
    print(pp, recompute, done / planned)
    np.testing.assert_allclose(done, planned, rtol=0.03)


def record_passes(changes: dict[str, Any], num_steps: int) -> list[list[float]]:
    """Counted forward work of each micro-batch of each step on this rank: blocks times rows."""
    passes: list[list[float]] = []
    original = StageModule.forward

    def counting(self: StageModule, carry: Any) -> Any:
        before = replace(self.model.work)  # type: ignore[type-var]
        output = original(self, carry)
        work = self.model.work
        passes[-1].append((work.no_grad - before.no_grad, work.grad - before.grad))
        return output

    StageModule.forward = counting
    run, batches = start(tiny_config(changes))
    for step in range(num_steps):
        passes.append([])
        steps(run, batches, step, step + 1)
    return passes


def test_the_simulator_knows_each_pass_of_a_real_pipeline():
    changes = merged(MODEL, {"parallel": {"pp": 4}, "train": {"micro_batch_size": 1}})
    config = tiny_config(changes)
    plan = solve_batch(config.train, world=4, tp=1, pp=4)
    parts = [stage.part for stage in plan_stages(config)]
    costs = replace(pass_costs(config.model, config.parallel), head=0.0)  # it is not counted
    counted = np.array(run_ranks(record_passes, 4, changes, 6))  # [P, steps, M, 2]
    for step in range(6):
        loops = loop_plans(config, plan, step)
        forward, backward = pass_times(parts, loops, costs, plan.micro_batch)
        np.testing.assert_array_equal(counted[:, step].sum(-1), forward)
        np.testing.assert_array_equal(2.0 * counted[:, step, :, 1], backward)


@pytest.mark.parametrize("num_stages, num_micro", [(2, 1), (2, 4), (3, 2), (4, 8), (4, 4)])
def test_the_simulated_order_is_that_of_deepspeed(num_stages, num_micro):
    for stage in range(num_stages):
        commands = schedule.TrainSchedule(num_micro, num_stages, stage).steps()
        order = [
            isinstance(command, schedule.ForwardPass)
            for step in commands
            for command in step
            if isinstance(command, schedule.ForwardPass | schedule.BackwardPass)
        ]
        ours = [is_forward for is_forward, _ in stage_order(stage, num_stages, num_micro)]
        assert ours == order, stage


def test_the_idle_share_of_counted_work_is_the_predicted_one():
    """On the real passes of six steps, with the prediction made before the run."""
    changes = merged(MODEL, {"parallel": {"pp": 4}, "train": {"micro_batch_size": 1}})
    config = tiny_config(changes)
    plan = solve_batch(config.train, world=4, tp=1, pp=4)
    said = describe_pipeline(config, plan, plan_stages(config))
    predicted = float(said.partition("predicted pipeline efficiency ")[2].partition("%")[0]) / 100
    counted = np.array(run_ranks(record_passes, 4, changes, 6), float)
    head = pass_costs(config.model, config.parallel).head
    counted[-1, ..., 1] += head * plan.micro_batch
    real = [
        one_forward_one_backward(counted[:, step].sum(-1), 2 * counted[:, step, :, 1]).efficiency
        for step in range(6)
    ]
    assert np.mean(real) == pytest.approx(predicted, abs=0.05)
