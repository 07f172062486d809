"""ZeRO-3 with parameters really partitioned: DeepSpeed keeps parameters of tests' size whole, so
that a checkpoint test with its usual threshold never sees a partition."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_layout_pairs import HALF, WHOLE
from tiny import full_weights, merged, start, steps, tiny_config

from harness import run_ranks
from megaparcae.checkpoint.manager import CheckpointManager

ZERO3 = Path(__file__).resolve().parents[2] / "ds_configs" / "zero3.json"
BATCH = {"train": {"global_batch_size": 12}}  # for three dp ranks too

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "pp2-tp2": (4, {"pp": 2, "tp": 2}),
    "dp2": (2, {"zero_stage": 3}),
    "dp3": (3, {"zero_stage": 3}),  # the last partitions are padded
    "tp2": (4, {"tp": 2, "zero_stage": 3}),
}


def run(changes: dict[str, Any], folder: str, first: int, last: int) -> dict[str, Any]:
    """Resume at `first`, run to `last`, save; on this rank."""
    parallel = changes["parallel"]
    if "zero_stage" in parallel:
        options = json.loads(ZERO3.read_text())
        options["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        path = Path(f"{folder}-zero3-{dist.get_rank()}.json")
        path.write_text(json.dumps(options))
        changes = merged(changes, {"parallel": {"deepspeed_config": str(path)}})
    config = tiny_config(merged(changes, {"checkpoint": {"dir": folder}}))
    live, batches = start(config)
    checkpoints = CheckpointManager(config, live.plan.global_batch)
    assert checkpoints.resume(live.engine) == first
    figures = steps(live, batches, first, last)
    if "zero_stage" in parallel:
        assert all(p.numel() == 0 for p in live.model.parameters()), "nothing is kept whole"
    if last == HALF:
        checkpoints.save(last, live.engine)
    return {"steps": figures, "weights": full_weights(live)}


def on_layout(name: str, folder: Path, first: int, last: int) -> dict[str, Any]:
    world, parallel = LAYOUTS[name]
    changes = merged(BATCH, {"parallel": parallel})
    return run_ranks(run, world, changes, str(folder), first, last)[0]


@pytest.fixture(scope="module")
def want(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return on_layout("one", tmp_path_factory.mktemp("straight"), 0, WHOLE)


@pytest.mark.parametrize(
    ("source", "targets"),
    [("dp2", ("one", "dp3", "pp2-tp2")), ("dp3", ("tp2",)), ("pp2-tp2", ("dp3", "tp2"))],
)
def test_partitions_are_read_and_written_by_other_layouts(source, targets, want, tmp_path):
    on_layout(source, tmp_path, 0, HALF)
    for target in targets:
        got = on_layout(target, tmp_path, HALF, WHOLE)
        for a, b in zip(got["steps"], want["steps"][HALF:], strict=True):
            assert a == pytest.approx(b, rel=1e-6), f"{source} to {target}"
        for name, weight in want["weights"].items():
            error = (got["weights"][name] - weight).norm() / weight.norm().clamp_min(1e-6)
            assert error < 1e-5, f"{source} to {target}: {name}"


@pytest.mark.parametrize("layout", ["dp2", "dp3"])
def test_partitions_go_on_bit_for_bit(layout, tmp_path):
    straight = on_layout(layout, tmp_path / "a", 0, WHOLE)
    on_layout(layout, tmp_path / "b", 0, HALF)
    resumed = on_layout(layout, tmp_path / "b", HALF, WHOLE)
    assert resumed["steps"] == straight["steps"][HALF:]
    for name, weight in straight["weights"].items():
        assert torch.equal(resumed["weights"][name], weight), name
