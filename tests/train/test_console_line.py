"""The line of a step, for people."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace

import numpy as np
import pytest

from megaparcae.config.batch import BatchPlan
from megaparcae.config.schema import RunConfig
from megaparcae.train.metrics import StepClock, console_line


def line(**changes: object) -> str:
    record = {
        "step": 7,
        "loss": 10.4,
        "grad_norm": 0.5,
        "lr_factor": 1.0,
        "mean_loops": 4.0,
        "efficiency": 1.0,
        "tokens_per_second": 4200.0,
        "tflops_per_device": 0.0157,
        "mfu": 0.4,
        "eta_seconds": 59.0,
        "skipped_steps": 0,
    }
    return console_line({**record, **changes}, 1000)


def test_the_columns_of_all_lines_stand_below_each_other():
    late = {"step": 1000, "loss": 2.1, "grad_norm": 1234.5, "mean_loops": 12.25}
    fast = {"tokens_per_second": 1.2e6, "tflops_per_device": 412.0, "mfu": 0.0412}
    lines = [line(), line(**late), line(**fast, eta_seconds=86_000), line(tokens_per_second=31)]
    words = ("loss", "norm", "lr", "loops", "tok/s", "TFLOP/s", "MFU", "ETA")
    assert len({tuple(text.index(word) for word in words) for text in lines}) == 1, lines


def test_it_tells_progress_and_the_time_that_is_left():
    assert line().startswith("step    7/1000   1%  loss 10.4000")
    assert line(eta_seconds=90_061).endswith("ETA 1d 1:01:01")
    assert "skipped" not in line()
    assert line(skipped_steps=3).endswith("skipped 3")


def test_a_loss_that_is_no_number_keeps_its_column():
    assert len(line(loss=float("nan"), grad_norm=float("inf"))) == len(line())


def test_the_time_that_is_left_counts_validation_and_saves(monkeypatch: pytest.MonkeyPatch):
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: now.seconds)
    plan = BatchPlan(global_batch=8, micro_batch=8, accumulation=1, dp=1)
    clock = StepClock(RunConfig(), plan, "CPU")
    now.seconds = 100.0
    clock.skip()  # start-up is paid once
    depths = np.full(8, 4)
    for step in (1, 2):
        now.seconds += 2.0
        figures = clock.step(step, depths, depths)
        assert figures["seconds"] == 2.0
    assert figures["eta_seconds"] == pytest.approx(2.0 * 998)
    now.seconds += 3.0  # a validation
    clock.skip()
    now.seconds += 2.0
    figures = clock.step(3, depths, depths)
    assert figures["seconds"] == 2.0
    assert figures["eta_seconds"] == pytest.approx((2.0 + 3.0 / 3) * 997)
    assert not re.search("nan|inf", str(figures))
