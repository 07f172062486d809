"""A gradient that is not finite on one rank: all ranks skip the step together, and go on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny import full_weights, start, steps, tiny_config

from harness import run_ranks

BAD_STEP = 3
LAYOUTS = {
    "one process": (1, {}),
    "dp": (2, {}),
    "zero 1": (2, {"zero_stage": 1}),
    "zero 2": (2, {"zero_stage": 2}),
    "zero 3": (2, {"zero_stage": 3}),
    "zero 1 with tp": (4, {"zero_stage": 1, "tp": 2}),
    "zero 3 with tp": (4, {"zero_stage": 3, "tp": 2}),
    "pipeline": (2, {"pp": 2}),
    "pipeline with zero 1": (4, {"pp": 2, "zero_stage": 1}),
    "pipeline with tp and sequence parallel": (
        4,
        {"pp": 2, "tp": 2, "sequence_parallel": True},
    ),
}


def poison(run: Any) -> None:
    """The last rank's next gradient of its first parameter that is not a copy has a NaN."""
    if run.mesh.rank != run.mesh.world_size - 1:
        return
    parameter = next(p for n, p in run.model.named_parameters() if "core" in n)

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        handle.remove()
        return grad + torch.nan

    handle = parameter.register_hook(spoil)


def train_with_a_bad_step(parallel: dict[str, Any]) -> dict[str, Any]:
    run, batches = start(tiny_config({"parallel": parallel}))
    steps(run, batches, 0, BAD_STEP)
    before = full_weights(run)
    poison(run)
    bad = steps(run, batches, BAD_STEP, BAD_STEP + 1)
    skipped, updates = run.engine.last_step_skipped(), run.engine.step_count()
    after = full_weights(run)
    rest = steps(run, batches, BAD_STEP + 1, BAD_STEP + 3)
    weights = full_weights(run)
    return {
        "changed": dist.get_rank() == 0
        and any(not torch.equal(before[name], after[name]) for name in before),
        "skipped": (skipped, run.engine.last_step_skipped()),
        "updates": (updates, run.engine.step_count()),
        "norm": bad[0][1],
        "rest": rest,
        "weights": weights,
    }


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    return run_ranks(train_with_a_bad_step, 1, {})[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_nan_on_one_rank_skips_the_step_on_all(layout, reference):
    world, parallel = LAYOUTS[layout]
    ranks = run_ranks(train_with_a_bad_step, world, parallel)
    for rank in ranks:
        assert rank["skipped"] == (True, False)
        assert rank["updates"] == (BAD_STEP, BAD_STEP + 2)
        assert not math.isfinite(rank["norm"])
        assert not rank["changed"]
        for got, want in zip(rank["rest"], reference["rest"], strict=True):
            assert got == pytest.approx(want, rel=1e-5)
    for name, weight in reference["weights"].items():
        torch.testing.assert_close(ranks[0]["weights"][name], weight, rtol=0, atol=1e-5)
