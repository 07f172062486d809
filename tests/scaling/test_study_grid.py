from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaparcae.config.load import load_config
from megaparcae.errors import UserError
from megaparcae.scaling import grid as grid_module
from megaparcae.scaling.grid import Costs, execute_small, read_grid, write_grid
from megaparcae.scaling.runs import read_runs

COSTS = Costs(
    "authors",
    flops_per_token=lambda model: 1e6 * (1 + model.recurrence.mean_recurrence),
    unrolled_params=lambda model: 1000 * model.recurrence.mean_recurrence,
)
BASE = """
model: {sequence_length: 64, hidden_size: 64, num_heads: 2, intermediate_size: 128}
train: {global_batch_size: 8, num_steps: 5}
"""


@pytest.fixture
def base(tmp_path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


def test_every_run_has_a_config_that_loads_and_tokens_that_follow_from_the_budget(base, tmp_path):
    out = tmp_path / "study"
    runs = write_grid(base, ["train.seed=7"], [1e11, 2e11], [2, 1, 4], out, COSTS)
    assert [(r.budget, r.mu) for r in runs] == [(c, m) for c in (1e11, 2e11) for m in (1, 2, 4)]
    assert read_grid(out) == runs
    for run in runs:
        config = load_config(run.config)
        assert config.model.recurrence.mean_recurrence == run.mu
        assert config.model.recurrence.backprop_depth == -(-run.mu // 2)
        assert config.train.num_steps * 8 * 64 == run.tokens
        assert run.tokens * run.flops_per_token == pytest.approx(run.budget, rel=0.02)
        assert config.train.seed == 7
        assert config.validation.interval == config.train.num_steps
        assert run.mu in config.validation.num_loops and 24 in config.validation.num_loops
        assert config.checkpoint.dir == run.dir


def test_bad_grids_are_refused_with_the_remedy(base, tmp_path):
    with pytest.raises(UserError, match=r"is 0\.\d optimizer steps"):
        write_grid(base, [], [1e9], [8], tmp_path, COSTS)
    with pytest.raises(UserError, match="names a value twice"):
        write_grid(base, [], [1e11, 1e11], [2], tmp_path, COSTS)
    with pytest.raises(UserError, match="whole numbers"):
        write_grid(base, [], [1e11], [2.5], tmp_path, COSTS)
    with pytest.raises(UserError, match="positive"):
        write_grid(base, [], [1e11], [0], tmp_path, COSTS)
    base.write_text("model: {architecture: transformer}\ntrain: {global_batch_size: 8}\n")
    with pytest.raises(UserError, match="no mean recurrence to vary"):
        write_grid(base, [], [1e11], [2], tmp_path, COSTS)
    base.write_text("model: {hidden_size: 768}\n")
    with pytest.raises(UserError, match=r"--set train\.global_batch_size"):
        write_grid(base, [], [1e11], [2], tmp_path, COSTS)


def test_small_runs_are_executed_once_and_large_ones_become_commands(base, tmp_path, monkeypatch):
    out = tmp_path / "study"
    runs = write_grid(base, [], [1e11, 2e11], [2, 4], out, COSTS)
    started = []

    class Done:
        returncode = 0

    def fake_run(command):
        run = next(r for r in runs if r.config == command[-1])
        started.append(run.name)
        Path(run.dir).mkdir()
        record = {"kind": "validation", "step": run.num_steps, "loss": {"1": 3.0, str(run.mu): 2.9}}
        (Path(run.dir) / "log.jsonl").write_text(json.dumps(record) + "\n")
        return Done()

    monkeypatch.setattr(grid_module.subprocess, "run", fake_run)
    commands = execute_small(out, max_flops=1e11)
    assert started == ["c1e11-mu2", "c1e11-mu4"]
    assert [c[-1] for c in commands] == [r.config for r in runs if r.budget == 2e11]
    assert all(c[0] == "torchrun" for c in commands)
    execute_small(out, max_flops=1e11)
    assert len(started) == 2
    table = read_runs(out)
    assert len(table) == 4 and set(table.num_loops) == {1, 2, 4}
    assert set(table.params) == {2000, 4000}


def test_a_failed_run_stops_the_study_and_says_how_to_continue(base, tmp_path, monkeypatch):
    out = tmp_path / "study"
    write_grid(base, [], [1e11], [2, 4], out, COSTS)

    class Failed:
        returncode = 1

    monkeypatch.setattr(grid_module.subprocess, "run", lambda command: Failed())
    with pytest.raises(UserError, match=r"c1e11-mu2 ended with exit code 1.*`run` again"):
        execute_small(out, max_flops=1e12)
