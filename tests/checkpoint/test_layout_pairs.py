"""A checkpoint of any layout goes on in any other, optimizer states included."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "layouts"))

from tiny import full_weights, merged, start, steps, tiny_config

from harness import run_ranks
from megaparcae.checkpoint.manager import CheckpointManager

HALF, WHOLE = 3, 6
SMALL = {"train": {"global_batch_size": 8}}

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "zero1": (2, {"zero_stage": 1}),
    "zero2": (2, {"zero_stage": 2}),
    "zero3": (2, {"zero_stage": 3}),
    "pp2-tp2": (4, {"pp": 2, "tp": 2}),
    "pp2-zero1": (4, {"pp": 2, "zero_stage": 1}),
    "tp2sp-zero3": (4, {"tp": 2, "sequence_parallel": True, "zero_stage": 3}),
}
TARGETS = {  # every layout is read by two others; by itself, see below
    "one": ("pp2-tp2", "zero3"),
    "dp2": ("one", "zero2"),
    "zero1": ("zero3", "pp2-zero1"),
    "zero2": ("dp2", "tp2sp-zero3"),
    "zero3": ("pp2-tp2", "one"),
    "pp2-tp2": ("zero2", "dp2"),
    "pp2-zero1": ("one", "tp2sp-zero3"),
    "tp2sp-zero3": ("pp2-tp2", "zero1"),
}


def run(changes: dict[str, Any], folder: str, first: int, last: int) -> dict[str, Any]:
    """Resume at `first` if there is a checkpoint, run to `last`, save; on this rank."""
    config = tiny_config(merged(changes, {"checkpoint": {"dir": folder}}))
    live, batches = start(config)
    checkpoints = CheckpointManager(config, live.plan.global_batch)
    assert checkpoints.resume(live.engine) == first
    figures = steps(live, batches, first, last)
    if last == HALF:
        checkpoints.save(last, live.engine)
    return {"steps": figures, "weights": full_weights(live)}


def on_layout(name: str, folder: Path, first: int, last: int, **changes: Any) -> dict[str, Any]:
    world, parallel = LAYOUTS[name]
    changes = merged(SMALL, {**changes, "parallel": parallel})
    return run_ranks(run, world, changes, str(folder), first, last)[0]


@pytest.fixture(scope="module")
def want(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return on_layout("one", tmp_path_factory.mktemp("straight"), 0, WHOLE)


@pytest.fixture(scope="module", params=LAYOUTS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("saved")
    on_layout(request.param, folder, 0, HALF)
    return request.param, folder


def test_a_checkpoint_goes_on_in_other_layouts(saved, want):
    source, folder = saved
    for target in TARGETS[source]:
        got = on_layout(target, folder, HALF, WHOLE)
        for a, b in zip(got["steps"], want["steps"][HALF:], strict=True):
            assert a == pytest.approx(b, rel=1e-5), f"{source} to {target}"
        for name, weight in want["weights"].items():
            error = (got["weights"][name] - weight).norm() / weight.norm().clamp_min(1e-6)
            assert error < 1e-5, f"{source} to {target}: {name}"


@pytest.mark.parametrize("layout", ["dp2", "zero3", "pp2-tp2"])
def test_the_same_layout_goes_on_bit_for_bit(layout, tmp_path):
    straight = on_layout(layout, tmp_path / "a", 0, WHOLE)
    on_layout(layout, tmp_path / "b", 0, HALF)
    resumed = on_layout(layout, tmp_path / "b", HALF, WHOLE)
    assert resumed["steps"] == straight["steps"][HALF:]
    for name, weight in straight["weights"].items():
        assert torch.equal(resumed["weights"][name], weight), name


def test_muons_states_move_between_layouts(tmp_path):
    muon = {"optimizer": {"name": "muon_adamw", "muon_dtype": "fp32", "muon_lr": 2e-3}}
    straight = on_layout("one", tmp_path / "a", 0, WHOLE, **muon)
    on_layout("pp2-tp2", tmp_path / "b", 0, HALF, **muon)
    resumed = on_layout("dp2", tmp_path / "b", HALF, WHOLE, **muon)
    for a, b in zip(resumed["steps"], straight["steps"][HALF:], strict=True):
        assert a == pytest.approx(b, rel=3e-5)
