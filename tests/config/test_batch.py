"""Batch arithmetic: any two sizes are enough, and every refusal names sizes that work."""

from __future__ import annotations

import itertools

import pytest

from megaparcae.config.batch import solve_batch
from megaparcae.config.schema import TrainConfig
from megaparcae.errors import UserError

NAMES = ("global_batch_size", "micro_batch_size", "gradient_accumulation_steps")


def train(total=None, micro=None, accumulation=None) -> TrainConfig:
    return TrainConfig(**dict(zip(NAMES, (total, micro, accumulation), strict=True)))


@pytest.mark.parametrize("sizes", [(64, 4, None), (64, None, 4), (None, 4, 4), (64, 4, 4)])
def test_any_two_sizes_give_the_third(sizes):
    plan = solve_batch(train(*sizes), world=16, tp=2, pp=2)
    assert (plan.global_batch, plan.micro_batch, plan.accumulation, plan.dp) == (64, 4, 4, 4)
    assert plan.world == 16


def test_the_explanation_derives_dp_from_world_tp_and_pp():
    plan = solve_batch(train(8, 2), world=4, tp=2, pp=2)
    assert plan.explain() == (
        "dp 1 = world 4 / (tp 2 x pp 2); global batch 8 = micro 2 x accumulation 4 x dp 1"
    )


@pytest.mark.parametrize(
    "sizes, world, expected",
    [
        ((8, 3, None), 4, "multiple of micro_batch_size=3 x dp=1 (dp 1 = world 4 / (tp 2 x pp 2)); "
         "use train.global_batch_size in [6, 9] or train.micro_batch_size in [1, 2, 4, 8]"),
        ((2, 4, None), 4, "use train.global_batch_size in [4] or train.micro_batch_size in [1, 2]"),
        ((9, 1, None), 8, "dp=2 (dp 2 = world 8 / (tp 2 x pp 2)); use train.global_batch_size in"),
        ((12, None, 5), 4, "train.gradient_accumulation_steps in [1, 2, 3, 4, 6, 12]"),
        ((8, 2, 1), 4, "8 is not micro_batch_size=2 x gradient_accumulation_steps=1 x dp=1 = 2"),
        ((8, None, None), 4, "train has only global_batch_size=8; give any two of global_batch_s"),
        ((None, None, None), 4, "train has no batch size; give any two"),
        ((8, 2, None), 6, "must divide the number of processes, which is 6; start a multiple of 4 "
         "processes, or choose tp x pp in [1, 2, 3]"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_add_up_are_refused_with_sizes_that_do(sizes, world, expected):
    with pytest.raises(UserError) as caught:
        solve_batch(train(*sizes), world=world, tp=2, pp=2)
    assert expected in str(caught.value)


def test_what_is_suggested_works():
    for total, micro, world in itertools.product(range(1, 30), range(1, 9), (1, 2, 3)):
        try:
            solve_batch(train(total, micro), world=world, tp=1, pp=1)
        except UserError as error:
            totals, *micros = [part.split("]")[0] for part in str(error).split(" in [")[1:]]
            for suggestion in totals.split(", "):
                solve_batch(train(int(suggestion), micro), world=world, tp=1, pp=1)
            for suggestion in micros[0].split(", ") if micros else []:
                solve_batch(train(total, int(suggestion)), world=world, tp=1, pp=1)
