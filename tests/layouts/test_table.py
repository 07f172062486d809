"""Every legal layout of up to eight processes trains the model that one process trains.

TP 1, 2, 4 x sequence parallelism x PP 1, 2, 4 x DP 1, 2 x ZeRO 0 to 3, in fp32, with depths drawn
per sequence, clipping at work and tied embeddings. Activation checkpointing and the micro-batch
size change from case to case, so that each mode meets each of the others.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
from comparison import assert_same_run, one_process, run_layout
from tiny import tiny_config

from megaparcae.config.batch import solve_batch
from megaparcae.errors import UserError
from megaparcae.train.build import plan_stages

RECOMPUTE = ("none", "block", "loop", "selective")
OUTSIDE = {"none": "none", "block": "block", "loop": "selective", "selective": "block"}
"""Checkpointing of prelude and coda that goes with one of the core: they have no loop."""


@dataclass(frozen=True)
class Case:
    tp: int
    sequence_parallel: bool
    pp: int
    dp: int
    zero: int
    recompute: str

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def is_core(self) -> bool:
        """Few processes, and ZeRO has something to shard."""
        return self.world <= 4 and (self.dp > 1 or self.zero == 0 or self.pp > 1)

    @property
    def micro_batch(self) -> int:
        """Of 8 sequences a step: two micro-batches or more; fewer where ranks exchange much."""
        if self.tp == 4 and self.pp == 1:
            return 8 // self.dp
        return 8 // (self.dp * (2 if self.tp > 1 else max(2, self.pp)))

    def __str__(self) -> str:
        sp = "sp" if self.sequence_parallel else ""
        return f"tp{self.tp}{sp}-pp{self.pp}-dp{self.dp}-zero{self.zero}-{self.recompute}"

    def changes(self) -> dict[str, Any]:
        outside = OUTSIDE[self.recompute]
        return {
            "train": {"micro_batch_size": self.micro_batch},
            "parallel": {
                "tp": self.tp,
                "sequence_parallel": self.sequence_parallel,
                "pp": self.pp,
                "zero_stage": self.zero,
                "recompute_core": self.recompute,
                "recompute_prelude": outside,
                "recompute_coda": outside,
            },
        }


def all_cases() -> list[Case]:
    """All legal combinations; the checkpointing mode steps on with every coordinate."""
    cases = []
    splits = [(1, False), (2, False), (2, True), (4, False), (4, True)]
    for (s, (tp, sp)), (p, pp), dp in itertools.product(
        enumerate(splits), enumerate((1, 2, 4)), (1, 2)
    ):
        for zero in range(4) if pp == 1 else range(2):
            if tp * pp * dp <= 8:
                mode = RECOMPUTE[(s + p + (dp - 1) + zero + tp // 4) % 4]
                cases.append(Case(tp, sp, pp, dp, zero, mode))
    return cases


CASES = all_cases()


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=str(c), marks=() if c.is_core else pytest.mark.slow) for c in CASES],
)
def test_ten_steps_are_those_of_one_process(case):
    ranks = run_layout(case.world, case.changes())
    worst = assert_same_run(ranks, one_process())
    print(f"{case}: {worst.name} {worst.largest:.1e}")


def test_each_checkpointing_mode_meets_each_way_to_split():
    assert len(CASES) == 64
    for field in ("tp", "sequence_parallel", "pp", "dp", "zero"):
        met = {(getattr(case, field), case.recompute) for case in CASES}
        values = {getattr(case, field) for case in CASES}
        assert met == set(itertools.product(values, RECOMPUTE)), field


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"parallel": {"pp": 2, "zero_stage": 2}}, "use zero_stage 0 or 1, or pp 1"),
        ({"parallel": {"pp": 4, "zero_stage": 3}}, "use zero_stage 0 or 1, or pp 1"),
        (
            {"parallel": {"zero_stage": 1}, "optimizer": {"name": "muon_adamw"}},
            "use zero_stage 0 .* or optimizer.name adamw",
        ),
        ({"parallel": {"tp": 3}}, r"num_heads=4 must be divisible .* use tp in \[1, 2, 4\]"),
        ({"parallel": {"tp": 8}}, r"num_heads=4 must be divisible"),
        (
            {"model": {"num_kv_heads": 1}, "parallel": {"tp": 2}},
            r"num_kv_heads=1 must be divisible by parallel.tp=2; use tp in \[1\]",
        ),
        (
            {
                "model": {"sequence_length": 15},
                "parallel": {"tp": 2, "sequence_parallel": True},
            },
            "must be divisible by parallel.tp=2 for sequence parallelism",
        ),
        ({"model": {"num_core_layers": 0}}, "num_core_layers"),
        (
            {"model": {"recurrence": {"mean_recurrence": 2, "backprop_depth": 3}}},
            "use at most 2",
        ),
    ],
)
def test_what_cannot_be_combined_is_refused_with_what_can(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(changes)


@pytest.mark.parametrize(
    "pp, layout, message",
    [
        (64, "balanced", "more than this model can fill"),
        (3, "prelude | core,coda", "has 2 stages, but parallel.pp is 3"),
        (2, "prelude:0 | core,coda", "must name each of these once and in order"),
        (2, "prelude,core:0.5 | coda", "must name each of these once and in order"),
        (2, "prelude | coda,core", "must name each of these once and in order"),
        (2, "prelude | kernel,coda", "has 'kernel', which is no part of a model"),
    ],
)
def test_a_pipeline_that_does_not_add_up_is_refused(pp, layout, message):
    config = tiny_config(
        {
            "parallel": {"pp": pp, "pipeline_layout": layout},
            "model": {"recurrence": {"mean_recurrence": 1, "backprop_depth": 1}},
        }
    )
    with pytest.raises(UserError, match=message):
        plan_stages(config)


def test_processes_that_the_layout_does_not_divide_are_refused():
    config = tiny_config({"parallel": {"tp": 2, "pp": 2}})
    with pytest.raises(UserError, match="start a multiple of 4 processes"):
        solve_batch(config.train, world=6, tp=2, pp=2)
