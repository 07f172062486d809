"""Planned work and time against the simulator's and the trainer's own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megaparcae.config.batch import BatchPlan, solve_batch
from megaparcae.config.load import preset_config
from megaparcae.model.flops import step_flops
from megaparcae.plan.depths import Draws, deepest_grad_units
from megaparcae.plan.machines import MACHINES, Cluster
from megaparcae.plan.memory import all_states
from megaparcae.plan.timing import (
    least_time,
    pass_shares,
    step_time,
)
from megaparcae.plan.weights import stage_items
from megaparcae.scaling.simulate import one_forward_one_backward, pass_times
from megaparcae.train.pipeline_report import loop_plans, plan_stages

NODE = Cluster(name="h100", machine=MACHINES["h100"], gpus=8)


def timed(options: list[str], cluster: Cluster = NODE, preset: str = "370m"):
    config = preset_config(preset, options)
    parallel = config.parallel
    batch = solve_batch(config.train, world=cluster.gpus, tp=parallel.tp, pp=parallel.pp)
    stages = plan_stages(config)
    states = all_states(config, stage_items(config, stages), batch.dp)
    return step_time(config, batch, stages, states, cluster, Draws.of(config))


def test_loops_are_those_that_training_deals_and_simulates():
    config = preset_config("1p3b", ["parallel.pp=4", "parallel.recompute_core=loop"])
    plan = BatchPlan(global_batch=64, micro_batch=4, accumulation=16, dp=1, pp=4)
    drawn = Draws.of(config).loops(plan, repeats=True, step=3, rank=0)
    assert list(drawn) == loop_plans(config, plan, step=4)


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_stages_together_hold_the_gradient_work_of_the_deepest_micro_batch(pp):
    config = preset_config("1p3b", [f"parallel.pp={pp}", "model.recurrence.sampler=fixed"])
    plan = BatchPlan(global_batch=32, micro_batch=4, accumulation=8, dp=1, pp=pp)
    units = deepest_grad_units(config, plan, plan_stages(config), Draws.of(config))
    assert sum(units) == 4 * 4 * config.model.num_core_layers


def test_the_arithmetic_is_the_flops_of_the_drawn_depths():
    config = preset_config("370m", ["parallel.recompute_core=loop"])
    batch = solve_batch(config.train, world=8, tp=1, pp=1)
    time, _ = timed(["parallel.recompute_core=loop"])
    draws = Draws.of(config)
    steps = [draws.depths(batch, True, step) for step in range(2)]
    n, k = (np.mean([step[i].sum() for step in steps]) for i in (0, 1))
    flops = step_flops(
        config.model, rows_no_grad=n, rows_grad=k, rows=256, sequence_length=2048
    ).total
    assert time.needed == pytest.approx(flops / (8 * NODE.speed("bf16")))
    assert 0.1 < time.recomputed / time.needed < 0.25


def test_a_pipeline_waits_as_long_as_the_simulator_says():
    """Without traffic and launches, on the drawn passes of the only pipeline."""
    options = ["parallel.pp=4", "train.micro_batch_size=4"]
    cluster = replace(
        NODE, gpus=4, launch=0.0, latency=0.0, machine=replace(NODE.machine, intra=1e9)
    )
    time, _ = timed(options, cluster)
    config = preset_config("370m", options)
    parts = [stage.part for stage in plan_stages(config)]
    batch = solve_batch(config.train, world=4, tp=1, pp=4)
    idle = []
    for step in (1, 2):
        loops = loop_plans(config, batch, step)
        passes = pass_times(parts, loops, pass_shares(config), batch.micro_batch)
        idle.append(1 - one_forward_one_backward(*passes).efficiency)
    arithmetic = time.needed + time.recomputed
    assert time.waiting / (arithmetic + time.waiting) == pytest.approx(np.mean(idle), abs=1e-3)


def test_ranks_wait_for_the_one_with_the_deepest_rows():
    dealt, _ = timed(["train.micro_batch_size=4"])
    undealt, _ = timed(["train.micro_batch_size=4", "parallel.deal=none"])
    assert undealt.waiting > 3 * dealt.waiting


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["parallel.tp=2", "parallel.sequence_parallel=true"],
        ["parallel.pp=2", "train.micro_batch_size=2"],
        ["parallel.pp=4", "parallel.tp=2", "train.micro_batch_size=1"],
        ["optimizer.name=adamw", "parallel.zero_stage=3"],
    ],
)
def test_the_bound_is_below_every_step(options):
    config = preset_config("370m", options)
    parallel = config.parallel
    for gpus in (8, 64):
        cluster = replace(NODE, gpus=gpus)
        train = replace(config.train, micro_batch_size=1)
        run = replace(config, train=train)
        batch = solve_batch(train, world=gpus, tp=parallel.tp, pp=parallel.pp)
        bound = least_time(run, batch, cluster)
        time, _ = timed([*options, "train.micro_batch_size=1"], cluster)
        assert bound.total <= time.total * 1.03


def test_traffic_between_nodes_uses_the_cards_of_all_ranks_of_the_group():
    cluster = replace(NODE, gpus=64)
    assert cluster.bandwidth(8, 1) == 450e9 * 0.8  # inside a node
    assert cluster.bandwidth(64, 1) == 8 * 50e9 * 0.8
    assert cluster.bandwidth(32, 2) == 4 * 50e9 * 0.8
    assert cluster.bandwidth(2, 32) == 50e9 * 0.8


def test_tensor_parallel_ranks_send_four_times_the_stream_per_block():
    _, traffic = timed(["parallel.tp=2", "model.recurrence.sampler=fixed"])
    config = preset_config("370m")
    blocks = 4 + 4 + 8 * 4 + 4 * 4 + 8  # forward: prelude, coda, 8 loops; backward: 4 loops, both
    rows = 256 / 4  # of a data-parallel rank
    per_row = 4 * 0.5 * 2048 * config.model.hidden_size * 2
    assert traffic.tensor == pytest.approx(rows * blocks * per_row)
