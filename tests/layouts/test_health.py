"""Health records: what they say is true, and the same in every layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny import S, full_weights, merged, start, steps, tiny_config

from harness import run_ranks
from megaparcae.data.sampler import step_sample_ids
from megaparcae.model.probe import NUM_POSITIONS
from megaparcae.train.health import HealthMonitor, spectral_norm

LOOPED: dict[str, Any] = {
    "model": {"recurrence": {"mean_recurrence": 4, "backprop_depth": 2}},
    "train": {"global_batch_size": 16, "micro_batch_size": 4},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "tp2 with sequence parallelism": (2, {"tp": 2, "sequence_parallel": True}),
    "pp2": (2, {"pp": 2}),
    "pp3, borders inside loops": (
        3,
        {
            "pp": 3,
            "pipeline_layout": "embedding,prelude:0-1,core:0.33 | core:0.3 | core:0.37,coda,head",
        },
    ),
    "zero3": (2, {"zero_stage": 3}),
    "zero1 with recomputation": (2, {"zero_stage": 1, "recompute_core": "loop"}),
    "pp2 dp2": (4, {"pp": 2}),
}


def health_records(changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Records of the first and the fifth step."""
    run, batches = start(tiny_config(merged(LOOPED, changes)))
    monitor = HealthMonitor(run)
    records = []
    for step in range(5):
        if step in (0, 4):
            monitor.watch()
        steps(run, batches, step, step + 1)
        if step in (0, 4):
            ids = step_sample_ids(step, run.plan.global_batch)
            n, k = batches.depths(step, ids)
            records.append(monitor.record(batches.read(step), n + k))
    return records


def flat(record: dict[str, Any]) -> dict[str, float]:
    found = {}
    for key, value in record.items():
        found |= (
            {f"{key}/{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
        )
    return found


@pytest.fixture(scope="module")
def one_process() -> list[dict[str, Any]]:
    return run_ranks(health_records, 1, {})[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_reports_the_health_of_one_process(layout, one_process):
    world, parallel = LAYOUTS[layout]
    for records in run_ranks(health_records, world, {"parallel": parallel}):
        for got, want in zip(records, one_process, strict=True):
            assert flat(got) == pytest.approx(flat(want), rel=2e-4)


def direct(changes: dict[str, Any]) -> dict[str, Any]:
    """A record and what it must say, computed the long way round."""
    run, batches = start(tiny_config(merged(LOOPED, changes)))
    monitor = HealthMonitor(run)
    monitor.watch()
    weights = {k: v.clone() for k, v in (full_weights(run) or {}).items()}
    steps(run, batches, 0, 1)
    n, k = batches.depths(0, step_sample_ids(0, run.plan.global_batch))
    record = monitor.record(batches.read(0), n + k)
    change = full_weights(run) or {}
    moved = sum(float((change[x] - weights[x]).double().square().sum()) for x in weights) ** 0.5
    depths = (n + k).tolist()
    return {"record": record, "moved": moved, "depths": depths, "C": change["readout.weight"]}


def test_figures_are_what_their_names_say():
    (found,) = run_ranks(direct, 1, {})
    record, depths = found["record"], found["depths"]
    assert record["update_norm"] == pytest.approx(found["moved"], rel=1e-4)
    assert record["depths"] == {str(t): depths.count(t) for t in sorted(set(depths))}
    largest = float(torch.linalg.matrix_norm(found["C"], 2))
    # Near an orthogonal matrix all singular values are close, which iterations tell apart slowly.
    assert 0.98 * largest < record["C_norm"] <= 1.0001 * largest
    assert record["loss_by_depth"].keys() == record["depths"].keys()
    assert 0 < record["decay_mean"] <= record["rho_A"] < 1
    assert record["residual_ratio"] == pytest.approx(record["residual"] / record["state_norm"])
    assert record["state_norm_max"] >= record["state_norm"] > 0


def states_by_hand() -> dict[str, Any]:
    """h_T and h_(T-1) of every row by running each sequence alone, one loop less and one more."""
    run, batches = start(tiny_config(merged(LOOPED, {"train": {"micro_batch_size": 1}})))
    monitor, model = HealthMonitor(run), run.model
    states: list[torch.Tensor] = []

    def keep(run_loop: Any) -> Any:
        def wrapped(h: torch.Tensor, *rest: Any) -> torch.Tensor:
            after = run_loop(h, *rest)
            states.append(torch.stack([h.detach(), after.detach()]))
            return after

        return wrapped

    model.core.run_loop = keep(model.core.run_loop)
    last: list[torch.Tensor] = []
    leave = model.leave_loop
    model.leave_loop = lambda h: (last.append(states[-1]), leave(h))[1]
    monitor.watch()
    steps(run, batches, 0, 1)
    n, k = batches.depths(0, step_sample_ids(0, run.plan.global_batch))
    record = monitor.record(batches.read(0), n + k)
    at = np.arange(1, NUM_POSITIONS + 1) * S // NUM_POSITIONS - 1
    before, after = torch.cat(last, dim=1)[:, :, at]
    return {
        "record": record,
        "state_norm": float(after.norm(dim=-1).mean()),
        "residual": float((after - before).norm(dim=-1).mean()),
    }


def test_state_and_residual_are_those_of_each_sequences_last_loop():
    (found,) = run_ranks(states_by_hand, 1)
    for name in ("state_norm", "residual"):
        assert found["record"][name] == pytest.approx(found[name], rel=1e-5)


@pytest.mark.parametrize(
    "model",
    [
        {"injection": "linear", "block": "sandwich", "loop_norm": True, "readout": False},
        {"injection": "additive", "prelude_norm": False},
        {"architecture": "transformer", "num_layers": 3},
    ],
    ids=["linear", "additive", "transformer"],
)
def test_the_baselines_have_health_records_too(model):
    (records,) = run_ranks(health_records, 1, {"model": model})
    record = records[-1]
    transformer = model.get("architecture") == "transformer"
    assert ("rho_A" in record) is not transformer
    assert len(record["prelude_norms"]) == (3 if transformer else 2)
    if model.get("injection") == "additive":
        assert record["rho_A"] == 1.0


def test_the_power_iteration_finds_the_largest_singular_value():
    torch.manual_seed(0)
    matrix = torch.randn(20, 12)
    matrix[:, 3] *= 3
    norm, direction = spectral_norm(matrix, None)
    true = float(torch.linalg.matrix_norm(matrix, 2))
    assert norm == pytest.approx(true, rel=1e-3)
    assert spectral_norm(matrix, direction)[0] == pytest.approx(true, rel=1e-5)
    again, _ = spectral_norm(matrix, torch.full((12,), torch.nan))
    assert again == pytest.approx(true, rel=1e-3), "a vector that was lost to NaN starts anew"
