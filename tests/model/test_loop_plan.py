"""The loop plan: who runs when, and where a pipeline may cut."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from megaparcae.config.schema import RecurrenceConfig
from megaparcae.model.draws import sample_depths
from megaparcae.model.loop import run_phase
from megaparcae.model.loop_plan import GRAD_COST, LoopPlan, depth_order

PLANS = {
    "mixed": ([7, 1, 0], [4, 4, 2]),
    "one depth": ([3, 3], [4, 4]),
    "only gradient": ([0, 0], [2, 1]),
    "one loop": ([0], [1]),
    "deep": ([20, 4, 4, 1], [4, 4, 4, 4]),
}


@pytest.fixture(params=PLANS, ids=str)
def plan(request) -> LoopPlan:
    return LoopPlan.from_depths(*PLANS[request.param])


def test_rows_drop_out_when_they_are_finished():
    plan = LoopPlan.from_depths([3, 1, 0], [2, 2, 1])
    assert plan == LoopPlan(no_grad=(2, 1, 1), grad=(3, 2))
    assert plan.work() == 4 + GRAD_COST * 5


def test_unsorted_rows_are_refused():
    with pytest.raises(AssertionError, match="sorted"):
        LoopPlan.from_depths([0, 1], [1, 1])


def test_every_draw_can_be_sorted():
    for sampler in ("poisson", "poisson_full", "poisson_fill", "fixed", "lognormal_poisson"):
        config = RecurrenceConfig(sampler=sampler)
        for step in range(50):
            n, k = sample_depths(config, seed=0, step=step, sample_ids=np.arange(16))
            order = depth_order(n, k)
            assert sorted(order) == list(range(16))
            plan = LoopPlan.from_depths(n[order], k[order])
            assert (sum(plan.no_grad), sum(plan.grad)) == (n.sum(), k.sum())


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_cuts_ascend_from_nothing_to_everything(plan, num_layers):
    cuts = [plan.cut(i / 60, num_layers) for i in range(61)]
    assert cuts[0] == 0
    assert cuts[-1] == num_layers * (len(plan.no_grad) + len(plan.grad))
    assert cuts == sorted(cuts)


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_a_cut_is_within_half_a_unit_of_its_share_of_the_work(plan, num_layers):
    costs = [c for c in plan.no_grad for _ in range(num_layers)]
    costs += [GRAD_COST * c for c in plan.grad for _ in range(num_layers)]
    assert sum(costs) == plan.work() * num_layers
    for fraction in (0.1, 0.25, 1 / 3, 0.5, 0.8, 0.95):
        cut = plan.cut(fraction, num_layers)
        done, target = sum(costs[:cut]), fraction * sum(costs)
        largest = max(costs[max(cut - 1, 0) : cut + 1])
        assert abs(done - target) <= largest / 2 + 1e-9


@pytest.mark.parametrize("num_layers", [1, 3])
def test_the_two_phases_share_every_piece_without_gap_or_overlap(plan, num_layers):
    borders = [plan.cut(f, num_layers) for f in (0.0, 0.2, 0.5, 0.6, 1.0)]
    units = []
    for begin, end in itertools.pairwise(borders):
        first = plan.no_grad_units(begin, end, num_layers)
        second = plan.grad_units(begin, end, num_layers)
        units += [("no grad", i) for i in range(*first)] + [("grad", i) for i in range(*second)]
    expected = [("no grad", i) for i in range(num_layers * len(plan.no_grad))]
    expected += [("grad", i) for i in range(num_layers * len(plan.grad))]
    assert units == expected


@pytest.mark.parametrize("pieces", [1, 2, 3, 7])
def test_every_row_runs_each_of_its_layers_once_and_in_order(plan, pieces):
    """Layer l of any loop maps h to 3 h + l: the result tells the sequence that was run."""
    num_layers, rows = 2, plan.grad[0]
    calls: list[int] = []

    def run(state: torch.Tensor, loop: int, layers: range) -> torch.Tensor:
        assert len(state) == plan.grad[loop]
        calls.extend(len(state) for _ in layers)
        for layer in layers:
            state = 3 * state + layer
        return state

    state = torch.zeros(rows, 1, 1, dtype=torch.float64)
    borders = [i * num_layers * len(plan.grad) // pieces for i in range(pieces + 1)]
    for begin, end in itertools.pairwise(borders):
        state = run_phase(state, plan.grad, begin, end, num_layers, run)
    depths = [sum(count > i for count in plan.grad) for i in range(rows)]
    for row, depth in zip(state.flatten().tolist(), depths, strict=True):
        expected = 0.0
        for _ in range(depth):
            expected = 3 * (3 * expected) + 1
        assert row == expected
    assert sum(calls) == num_layers * sum(depths)
