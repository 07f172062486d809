"""tools/compare_runs.py: noise of another layout is small, a fault is found, mistakes are named."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training_runs import ROOT, environment, make_shard, train

from megaparcae.checkpoint.model_tensors import LazyTensors, write_model_tensors
from megaparcae.errors import UserError
from megaparcae.train.compare import compare_runs

WEIGHTS = {"embedding.weight": torch.arange(12.0).view(4, 3), "final_norm.weight": torch.ones(3)}


def compare(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "compare_runs.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)


def write_run(
    folder: Path, losses: list[float | None], weights: dict[str, torch.Tensor], step: int = 5
) -> Path:
    """A run's folder with a log and one checkpoint."""
    (folder / f"step_{step:08d}").mkdir(parents=True)
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    write_model_tensors(folder / f"step_{step:08d}", LazyTensors(shapes, weights.__getitem__))
    records = [
        {"kind": "step", "step": i + 1, "loss": loss, "grad_norm": 1.0}
        for i, loss in enumerate(losses)
    ]
    lines = [json.dumps(record) for record in records]
    (folder / "log.jsonl").write_text("\n".join([*lines, '{"kind": "st']))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", [3.0, 2.0], WEIGHTS)


def test_a_run_is_the_same_as_itself(run):
    done = compare(run, run)
    assert done.returncode == 0, done.stderr
    assert "same: loss is 0.00e+00 apart" in done.stdout


def test_one_wrong_weight_is_found_and_named_first(run, tmp_path):
    wrong = {**WEIGHTS, "final_norm.weight": torch.tensor([1.0, 1.0, 1.01])}
    done = compare(write_run(tmp_path / "wrong", [3.0, 2.0], wrong), run)
    assert done.returncode == 1
    assert "DIFFERENT: final_norm.weight is 5.77e-03 apart, limit 1e-04" in done.stdout
    assert compare(tmp_path / "wrong", run, "--limit", 0.01).returncode == 0


@pytest.mark.parametrize("loss", [2.001, None])
def test_a_loss_that_parts_or_is_not_a_number_is_found_with_its_step(run, tmp_path, loss):
    done = compare(write_run(tmp_path / "other", [3.0, loss], WEIGHTS), run)
    assert done.returncode == 1
    assert "step 2" in done.stdout and "DIFFERENT: loss" in done.stdout


def test_runs_that_cannot_be_compared_are_refused(run, tmp_path):
    later = write_run(tmp_path / "later", [3.0, 2.0], WEIGHTS, step=6)
    other = write_run(tmp_path / "other", [3.0], {"embedding.weight": torch.ones(4, 3)})
    for folder, message in (
        (later, "they hold steps [6] and [5]; use the same checkpoint.interval"),
        (other, "different parameters, such as final_norm.weight"),
        (tmp_path / "nothing", "is not a folder"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            compare_runs(folder, run)
    done = compare(tmp_path / "nothing", run)
    assert done.returncode == 2 and "Traceback" not in done.stderr


@pytest.mark.slow
def test_real_runs_on_two_layouts_pass_and_another_seed_fails(tmp_path):
    # Muon's bf16 products alone part the weights by 1e-2 in ten steps.
    options = {**make_shard(tmp_path / "shard"), "optimizer.muon_dtype": "fp32"}

    def layout(name: str, world: int = 1, **changes: object) -> Path:
        train({**options, "checkpoint.dir": tmp_path / name, **changes}, world=world)
        return tmp_path / name

    one = layout("one")
    split = layout("split", 2, **{"parallel.tp": 2, "parallel.sequence_parallel": "true"})
    seeded = layout("seeded", **{"train.seed": 1})
    done = compare(split, one)
    assert done.returncode == 0, done.stdout + done.stderr
    assert compare(seeded, one).returncode == 1
