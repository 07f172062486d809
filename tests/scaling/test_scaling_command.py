from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from synthetic_runs import LOOPS, TRUE, law_runs

from megaparcae.scaling.laws import UNIFIED

ROOT = Path(__file__).parents[2]


def scaling(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tools/scaling.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("command", [[], ["grid"], ["run"], ["fit"], ["curves"], ["predict"]])
def test_help_takes_under_two_seconds(command):
    start = time.perf_counter()
    assert scaling(*command, "--help").returncode == 0
    assert time.perf_counter() - start < 2


def test_fit_writes_a_report_that_predict_reads(tmp_path):
    runs = law_runs(UNIFIED, {name: TRUE[name] for name in UNIFIED.parameters}, LOOPS, noise=5e-4)
    runs = runs.select((runs.budget <= 4e18) & (runs.mu <= 8))
    names = {"num_loops": "T"}
    rows = [
        {names.get(name, name): column[i] for name, column in vars(runs).items()}
        for i in range(len(runs))
    ]
    table = tmp_path / "runs.jsonl"
    table.write_text("\n".join(map(json.dumps, rows)))
    result = scaling(
        "fit", table, "--out", tmp_path / "report", "--restarts", "20", "--draws", "10"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(tmp_path / "report" / "report.md")
    result = scaling("predict", "--fit", tmp_path / "report", "--budget", "8e18")
    assert result.returncode == 0 and "mu " in result.stdout and "[" in result.stdout


def test_the_users_mistakes_end_with_code_2_and_one_line(tmp_path):
    for arguments in (
        ["fit", tmp_path / "none.csv", "--out", tmp_path],
        ["fit", tmp_path, "--out", tmp_path],
        ["curves", tmp_path / "none.json", "--out", tmp_path],
        ["run", tmp_path],
        ["predict", "--fit", "paper:9b", "--budget", "1e18"],
    ):
        result = scaling(*arguments)
        assert result.returncode == 2
        assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
