"""Rates over the run against tables computed by hand and the authors' tables."""

from __future__ import annotations

import math

import pytest
from golden_optimizer import meta

from megaparcae.config.schema import OptimizerConfig, ScheduleConfig
from megaparcae.optim.schedule import hyperparameters_at, lr_factor

STEPS = (0, 1, 9, 10, 55, 99, 100, 150)


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("constant", (0, 0.1, 0.9, 1, 1, 1, 1, 1)),
        ("linear", (0, 0.1, 0.9, 1, 0.55, 0.11, 0.1, 0.1)),
        (
            "cosine",
            (0, 0.1, 0.9, 1, 0.55, 0.1 + 0.45 * (1 - math.cos(math.pi / 90)), 0.1, 0.1),
        ),
        ("trapezoid", (0, 0.1, 0.9, 1, 1, 0.1, 0.1, 0.1)),
    ],
)
def test_rate_follows_the_hand_table(kind, expected):
    schedule = ScheduleConfig(kind=kind, warmup_steps=10, cooldown_steps=20, min_factor=0.1)
    assert [lr_factor(s, schedule, 100) for s in STEPS] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("kind", ["linear", "cosine", "trapezoid"])
@pytest.mark.parametrize("least", [0.0, 0.1])
@pytest.mark.parametrize("warmup", [0, 10, 1000])
def test_falling_schedules_end_exactly_at_min_factor(kind, least, warmup):
    schedule = ScheduleConfig(kind=kind, warmup_steps=warmup, min_factor=least)
    assert lr_factor(100, schedule, 100) == least


def test_a_run_shorter_than_its_warmup_only_warms_up():
    schedule = ScheduleConfig(kind="cosine", warmup_steps=10)
    assert [lr_factor(s, schedule, 5) for s in range(5)] == [0, 0.1, 0.2, 0.3, 0.4]


def test_overlapping_warmup_and_cooldown_take_the_smaller():
    schedule = ScheduleConfig(warmup_steps=8, cooldown_steps=8)
    assert [lr_factor(s, schedule, 8) for s in (0, 2, 4, 6)] == [0, 0.25, 0.5, 0.25]


def test_trapezoid_without_cooldown_is_constant():
    schedule = ScheduleConfig(cooldown_steps=0)
    assert {lr_factor(s, schedule, 10) for s in range(10)} == {1.0}


def test_trapezoid_is_the_authors_table_with_warmup_and_floor():
    schedule = ScheduleConfig(warmup_steps=5, cooldown_steps=10, min_factor=0.1)
    table = meta()["schedule"]["with_warmup_5_cooldown_10_of_30_base_1_min_0.1"]
    assert [lr_factor(s, schedule, 30) for s in range(31)] == table


def test_all_scheduled_values_are_the_authors():
    optimizer, schedule = OptimizerConfig(name="muon_adamw"), ScheduleConfig()
    for row in meta()["schedule"]["table"]:
        step = row["optimizer_step"]
        now = hyperparameters_at(step, optimizer=optimizer, schedule=schedule, num_steps=40)
        assert now.lr_factor * optimizer.lr == pytest.approx(row["lr"], rel=3e-16)
        assert now.lr_factor * optimizer.muon_lr == pytest.approx(row["muon_lr"], rel=3e-16)
        assert now.muon_weight_decay == row["muon_weight_decay"]
        assert now.muon_momentum == row["muon_momentum"]


def test_momentum_reaches_its_target_after_the_warmup_and_stays():
    optimizer, schedule = OptimizerConfig(), ScheduleConfig()
    for step in (300, 301, 900):
        now = hyperparameters_at(step, optimizer=optimizer, schedule=schedule, num_steps=1000)
        assert now.muon_momentum == 0.95
