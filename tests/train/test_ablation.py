"""The ablation suites: valid configs, one result a run, resumable, and a report that is honest."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megaparcae.train.ablation import Job, is_finished, plan_jobs, read_outcome
from megaparcae.train.ablation_report import write_report
from megaparcae.train.ablation_suites import SUITES

ROOT = Path(__file__).resolve().parents[2]
LEVEL = 4.0


def jobs_of(suite: str, out: Path, **changes: Any) -> list[Job]:
    options = {"model": {"vocab_size": 300}}
    arguments = {"data": "shard", "seeds": 2, "num_steps": None, "options": options, **changes}
    return plan_jobs(SUITES[suite], out=out, **arguments)


def pretend(job: Job, losses: list[float | None], stopped: str = "") -> None:
    """The files of a finished run."""
    job.folder.mkdir(parents=True)
    records: list[dict[str, Any]] = [
        {"kind": "step", "step": i, "loss": loss} for i, loss in enumerate(losses, 1)
    ]
    records.append({"kind": "health", "step": 1, "state_norm_max": 12.5})
    if not stopped:
        depths = job.tree["validation"]["num_loops"]
        found = {str(depth): losses[-1] for depth in depths}
        records.append({"kind": "validation", "step": len(losses), "loss": found})
    (job.folder / "log.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    result = {"options": job.tree, "stopped": stopped}
    (job.folder / "result.json").write_text(json.dumps(result))


@pytest.mark.parametrize("name", SUITES)
def test_variants_differ_in_nothing_but_what_they_are_about(name, tmp_path):
    jobs = jobs_of(name, tmp_path)
    suite = SUITES[name]
    assert len(jobs) == len(suite.variants) * max(1, len(suite.rates)) * 2
    assert len({job.folder for job in jobs}) == len(jobs)
    first = jobs[0].config()
    for job in jobs:
        config = job.config()
        assert config.train.num_steps == first.train.num_steps
        assert config.data == first.data and config.validation == first.validation
        assert config.model.hidden_size == first.model.hidden_size


def test_a_finished_run_is_not_made_again_unless_its_options_change(tmp_path):
    job = jobs_of("table8", tmp_path)[0]
    assert not is_finished(job)
    pretend(job, [5.0, 3.0])
    assert is_finished(job)
    assert not is_finished(jobs_of("table8", tmp_path, num_steps=7)[0])


def test_a_run_that_stopped_or_learnt_nothing_did_not_converge(tmp_path):
    good, bad, stopped = jobs_of("table2", tmp_path)[:3]
    pretend(good, [5.0, 3.0])
    pretend(bad, [5.0, 4.5])
    pretend(stopped, [5.0, None], stopped="6 steps in a row were skipped")
    found = [read_outcome(job, level=LEVEL) for job in (good, bad, stopped)]
    assert [outcome.diverged for outcome in found] == [False, True, True]
    assert math.isnan(found[2].losses[-1]) and found[2].validation == {}


@pytest.mark.parametrize("name", ["table2", "table4"])
def test_the_report_shows_spread_and_failures(name, tmp_path):
    jobs = jobs_of(name, tmp_path)
    for i, job in enumerate(jobs):
        if i < 2:
            pretend(job, [5.0, 3.0 + 0.2 * i])
        elif i == 2:
            pretend(job, [None], stopped="stopped")
        else:
            pretend(job, [5.0, 3.0])
    outcomes = [read_outcome(job, level=LEVEL) for job in jobs]
    text = write_report(SUITES[name], outcomes, LEVEL, tmp_path / "docs")
    assert "3.100 ± 0.141" in text, "mean and standard deviation of two seeds"
    assert "✗ 1/2" in text and "Paper:" in text
    if name == "table4":  # the third run, seed 1 of the second variant, was stopped
        assert "| + constrained A | -0.200 |" in text, "pairs of runs with one seed"
    assert all(variant.label in text for variant in SUITES[name].variants)
    assert (tmp_path / "docs" / f"{name}.png").stat().st_size > 5000
    rows = json.loads((tmp_path / "docs" / f"{name}.json").read_text())
    assert len(rows) == len(jobs) and rows[2]["train_loss"] == [None]


@pytest.mark.slow
def test_the_tool_makes_the_runs_once_and_goes_on_where_it_was(tmp_path):
    sys.path.insert(0, str(ROOT / "tests" / "cli"))
    from training_runs import environment, make_shard

    shard = make_shard(tmp_path)
    command = [sys.executable, str(ROOT / "tools" / "ablate.py"), "table8"]
    command += ["--data", str(shard["data.train"]), "--vocab-size", "300"]
    command += ["--out", str(tmp_path / "out"), "--seeds", "1", "--steps", "3"]
    command += ["--set", "validation.num_sequences=8"]
    first, second = (
        subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
        for _ in range(2)
    )
    assert first.returncode == 0, first.stderr
    assert second.returncode == 0, second.stderr
    assert "0 of 2 runs are finished" in first.stderr and "[2/2]" in first.stderr
    assert "2 of 2 runs are finished; 0 to do" in second.stderr
    assert "| one depth per sequence |" in second.stdout
    assert (tmp_path / "out" / "docs" / "table8.md").read_text() == second.stdout.rstrip() + "\n"
    assert not list((tmp_path / "out").rglob("step_*")), "no weights are left behind"
