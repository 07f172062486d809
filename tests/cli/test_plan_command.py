"""tools/plan.py: what a model costs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "plan.py"


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOL), *arguments], capture_output=True, text=True, timeout=60
    )


def test_help_comes_at_once():
    started = time.perf_counter()
    result = plan("--help")
    assert result.returncode == 0
    assert "--preset" in result.stdout
    assert time.perf_counter() - started < 2


@pytest.mark.parametrize("preset", ["140m", "1p3b", "transformer_1p3b"])
def test_tables_fit_a_terminal_of_80_columns(preset):
    result = plan("--preset", preset)
    assert result.returncode == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "…" not in result.stdout


def test_json_holds_the_papers_parameters_and_the_authors_flops():
    costs = json.loads(plan("--preset", "140m", "--json").stdout)
    assert costs["parameters"]["total"] == 144_323_136
    assert costs["unrolled_parameters"] == 243_436_416
    assert costs["flops_per_token"]["authors"] == 1_359_902_976
    tokens = costs["run"]["tokens"]
    assert tokens == pytest.approx(11.2e9, rel=1e-3)
    assert costs["run"]["flops_authors"] == tokens * 1_359_902_976


def test_the_table_names_its_unit():
    """1,359,902,976 FLOPs are 1.36 G, and parameters are not abbreviated."""
    out = plan("--preset", "140m").stdout
    line = next(line for line in out.splitlines() if "authors' convention" in line)
    assert "1.36 G" in line
    assert "144,323,136" in out


def test_options_can_be_changed(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("preset: 140m\nparallel: {recompute_core: block}\n")
    changed = plan("--config", str(config), "--set", "model.recurrence.mean_recurrence=4", "--json")
    costs = json.loads(changed.stdout)
    assert costs["flops_per_token"]["authors"] == 1_032_695_040
    per_token = costs["flops_per_token"]
    assert per_token["executed"]["core_grad"] > 1.2 * per_token["needed"]["core_grad"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--preset", "14m"), "did you mean 140m"),
        (("--config", "missing.yaml"), "missing.yaml"),
        (("--preset", "140m", "--set", "model.mlp=relu3"), "choose relu2"),
        ((), "--preset"),
        (("--preset", "1p3b", "--gpus", "12"), "whole number of nodes"),
        (("--preset", "1p3b", "--gpus", "8", "--machine", "h10"), "choose a100-40"),
        (("--preset", "1p3b", "--gpus", "1", "--memory", "16"), "or --machine=rtx4090"),
    ],
)
def test_mistakes_end_with_2_and_one_sentence(arguments, message):
    result = plan(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_cluster_is_planned_and_the_run_written(tmp_path):
    run = tmp_path / "run.yaml"
    result = plan("--preset", "140m", "--gpus", "8", "--dollars", "2", "--output", str(run))
    assert result.returncode == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 100
    for title in ("Layouts that fit", "GiB of the fullest GPU", "one step", "Whole run"):
        assert title in result.stdout
    assert "dollars" in result.stdout and "model.num_heads=6 must" in result.stdout
    again = plan("--config", str(run), "--gpus", "8", "--as-is", "--json")
    layout = json.loads(again.stdout)["layouts"][0]
    assert layout["batch"]["dp"] * layout["batch"]["tp"] * layout["batch"]["pp"] == 8
    assert f"{layout['step_seconds']['total']:.3f}" in result.stdout


def test_planning_does_without_torch():
    """Torch alone takes longer to import than a plan may take."""
    code = "import megaparcae.plan.report, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=TOOL.parents[1]).returncode == 0
