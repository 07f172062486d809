"""The pipeline simulator: exact small cases, and the efficiencies that the design rests on."""

from __future__ import annotations

import numpy as np
import pytest

from megaparcae.config.batch import BatchPlan
from megaparcae.config.load import preset_config
from megaparcae.model.loop_plan import LoopPlan
from megaparcae.scaling.simulate import (
    one_forward_one_backward,
    pass_costs,
    pass_times,
    run_order,
    stage_order,
)
from megaparcae.train.build import plan_stages
from megaparcae.train.pipeline_report import describe_pipeline, simulate_step


@pytest.mark.parametrize("num_stages, num_micro", [(1, 3), (3, 16), (4, 32), (8, 64)])
def test_equal_passes_have_the_efficiency_of_the_textbook(num_stages, num_micro):
    forward = np.ones((num_stages, num_micro))
    time = one_forward_one_backward(forward, 2 * forward)
    assert time.makespan == 3 * (num_micro + num_stages - 1)
    assert time.efficiency == pytest.approx(num_micro / (num_micro + num_stages - 1))


def test_the_slowest_stage_sets_the_pace():
    forward = np.ones((3, 50))
    forward[1] = 4
    time = one_forward_one_backward(forward, forward)
    assert time.makespan == 1 + (4 + 4) * 50 + 1


def test_two_stages_by_hand():
    forward, backward = np.array([[1.0, 2.0], [3.0, 1.0]]), np.array([[1.0, 1.0], [2.0, 2.0]])
    # stage 0: F0 0-1, F1 1-3, B0 6-7, B1 9-10; stage 1: F0 1-4, B0 4-6, F1 6-7, B1 7-9
    time = one_forward_one_backward(forward, backward)
    assert time.makespan == 10
    assert list(time.busy) == [5, 8]


def test_an_order_in_which_stages_wait_for_each_other_is_noticed():
    forward = np.ones((2, 1))
    with pytest.raises(AssertionError, match="wait for each other"):
        run_order([[(False, 0), (True, 0)], list(stage_order(1, 2, 1))], forward, forward)


def test_stages_together_do_the_work_of_one_process():
    config = preset_config("1p3b", ["parallel.pp=4", "parallel.recompute_core=loop"])
    costs = pass_costs(config.model, config.parallel)
    loop = LoopPlan.from_depths([9, 4, 1, 0], [4, 4, 4, 3], grad_cost=4)
    parts = [stage.part for stage in plan_stages(config)]
    forward, backward = pass_times(parts, [loop], costs, rows=4)
    layers = config.model.num_prelude_layers + config.model.num_coda_layers
    core = config.model.num_core_layers
    assert forward.sum() == pytest.approx(4 * layers + core * (14 + 15) + 4 * costs.head)
    assert backward.sum() == pytest.approx(8 * layers + core * 3 * 15 + 8 * costs.head)


def efficiency(pp: int, micro_batches: int, rows: int, layout: str, deal: str) -> float:
    options = [f"parallel.pp={pp}", f"parallel.pipeline_layout={layout}", f"parallel.deal={deal}"]
    config = preset_config("1p3b", options)
    plan = BatchPlan(
        global_batch=micro_batches * rows,
        micro_batch=rows,
        accumulation=micro_batches,
        dp=1,
        pp=pp,
    )
    stages, costs = plan_stages(config), pass_costs(config.model, config.parallel)
    steps = [simulate_step(config, plan, stages, costs, step) for step in range(20)]
    return float(np.mean([step.efficiency for step in steps]))


@pytest.mark.parametrize(
    "pp, micro_batches, rows, undealt, dealt",
    [(3, 16, 4, 0.84, 0.86), (4, 32, 4, 0.85, 0.87), (8, 64, 2, 0.75, 0.85)],
)
def test_loop_aware_stages_keep_the_designed_efficiency(pp, micro_batches, rows, undealt, dealt):
    shape = pp, micro_batches, rows
    assert efficiency(*shape, "balanced", "none") == pytest.approx(undealt, abs=0.025)
    assert efficiency(*shape, "balanced", "balanced") == pytest.approx(dealt, abs=0.02)
    assert efficiency(*shape, "balanced", "balanced") >= dealt - 0.01


def test_a_core_on_one_stage_wastes_half():
    assert efficiency(3, 16, 4, "prelude | core | coda", "balanced") < 0.5


def test_the_message_at_the_start_says_who_does_what_and_how_well():
    config = preset_config("1p3b", ["parallel.pp=4"])
    plan = BatchPlan(global_batch=128, micro_batch=4, accumulation=32, dp=1, pp=4)
    said = describe_pipeline(config, plan, plan_stages(config))
    assert said.count("stage ") == 4
    assert "predicted pipeline efficiency 88" in said
    assert "91.4%" in said
