"""Executed against needed FLOPs of real steps, counted on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import merged, start, steps, tiny_config

from harness import run_ranks
from megaparcae.data.sampler import step_sample_ids
from megaparcae.train.work import WorkMeter


def metered(changes: dict[str, Any], wasted: int = 0) -> list[dict[str, Any]]:
    """Records of two steps with a validation between them; `wasted` more rows run a core block."""
    config = tiny_config(changes)
    run, batches = start(config)
    meter = WorkMeter(config, run.plan, run.model.work, torch.device("cpu"))
    records = []
    for step in range(2):
        meter.begin()
        steps(run, batches, step, step + 1)
        run.model.work.grad += wasted
        n, k = batches.depths(step, step_sample_ids(step, run.plan.global_batch))
        records.append(meter.record(int(n.sum()), int(k.sum())))
        run.engine.eval_batch(batches.validation_batches(2))
    return records


LAYOUTS = {
    "one": (1, {}),
    "tp 2, block": (2, {"parallel": {"tp": 2, "recompute_core": "block"}}),
    "pp 2, loop": (2, {"parallel": {"pp": 2, "recompute_core": "loop"}}),
    "dp 2, all recomputed": (
        2,
        {
            "parallel": {
                "recompute_core": "loop",
                "recompute_prelude": "block",
                "recompute_coda": "block",
            }
        },
    ),
}


@pytest.mark.parametrize(("world", "changes"), LAYOUTS.values(), ids=LAYOUTS)
def test_no_row_runs_a_loop_that_it_does_not_need(world, changes):
    for records in run_ranks(metered, world, changes):
        for record in records:
            assert record["efficiency"] == 1.0
            again = record["flops_recomputed"]
            needed, executed = record["flops_needed"], record["flops_executed"]
            for part in ("core_no_grad", "head"):
                assert executed[part] == needed[part] and again[part] == 0, part
                # fused attention computes scores twice whatever is asked for
            repeats = "parallel" in changes
            assert (again["core_grad"] > 0.2 * needed["core_grad"]) is repeats
            outside = changes.get("parallel", {}).get("recompute_coda", "none") != "none"
            assert (again["coda"] > 0.2 * needed["coda"]) is outside


def test_wasted_rows_show():
    (records,) = run_ranks(metered, 1, merged({}, {}), 40)
    for record in records:
        needed = record["flops_needed"]
        core = needed["core_no_grad"] + needed["core_grad"]
        assert 0.5 < record["efficiency"] < 1
        run_ = record["flops_executed"]["core_grad"] - record["flops_recomputed"]["core_grad"]
        done = record["flops_executed"]["core_no_grad"] + run_
        assert record["efficiency"] == pytest.approx(core / done)


def test_a_transformer_has_no_loop_to_waste():
    transformer = {"model": {"architecture": "transformer", "num_layers": 3}}
    (records,) = run_ranks(metered, 1, transformer)
    assert [record["efficiency"] for record in records] == [1.0, 1.0]
