"""The study of a small model that the README describes: its report follows from its table."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megaparcae.scaling.costs import study_costs
from megaparcae.scaling.grid import write_grid
from megaparcae.scaling.isoflop import fit_isoflop
from megaparcae.scaling.runs import read_runs
from megaparcae.scaling.scale import LoopScale

STUDY = Path(__file__).parent / "toy_study"


def test_the_report_of_the_toy_study_follows_from_its_table():
    runs = read_runs(STUDY / "runs.csv")
    report = (STUDY / "report.md").read_text(encoding="utf-8")
    study = fit_isoflop(runs, LoopScale.from_runs(runs.looped()))
    assert len(study.parabolas) >= 3
    for parabola in study.parabolas:
        assert len(parabola.mu) == 4
        side = f"below {parabola.mu.min():g}" if parabola.status == "outside" else ""
        shown = side or f"{parabola.best_mu:.2f}"
        assert f"| {parabola.budget:.3g} | {shown} |" in report


def test_the_table_holds_the_runs_that_the_grid_of_its_config_plans(tmp_path):
    runs = read_runs(STUDY / "runs.csv").at_training_depth()
    budgets, mus = np.unique(runs.budget).tolist(), np.unique(runs.mu).tolist()
    costs = study_costs("authors")
    planned = write_grid(STUDY / "study.yaml", [], budgets, mus, tmp_path, costs)
    found = set(zip(runs.budget, runs.mu, runs.tokens, runs.params, strict=True))
    assert found == {(run.budget, run.mu, run.tokens, run.params) for run in planned}


def test_more_loops_than_the_mean_neither_help_nor_harm_the_toy_models():
    runs = read_runs(STUDY / "runs.csv")
    at_mean = runs.at_training_depth()
    deep = runs.select(runs.num_loops == 24)
    assert np.abs(deep.loss - at_mean.loss).max() < 0.01
