from __future__ import annotations

import json

import numpy as np
import pytest
from synthetic_runs import LOOPS, SCALE, TRUE, law_runs, parabola_runs

from megaparcae.errors import UserError
from megaparcae.scaling.laws import UNIFIED
from megaparcae.scaling.predict import Predictor, Question, answer
from megaparcae.scaling.report import write_report
from megaparcae.scaling.runs import Runs
from megaparcae.scaling.study import run_study

UNIFIED_TRUE = {name: TRUE[name] for name in UNIFIED.parameters}


@pytest.fixture(scope="module")
def study():
    runs = law_runs(UNIFIED, UNIFIED_TRUE, LOOPS, noise=5e-4)
    runs = runs.select(np.isin(runs.budget, (2e18, 4e18, 8e18, 16e18)))
    unseen = law_runs(UNIFIED, UNIFIED_TRUE, tuple(range(1, 17)), tokens=11.2e9)
    unseen = unseen.select(unseen.mu == 8)
    return run_study(runs, unseen, num_restarts=60, num_draws=20)


def test_held_out_curves_are_predicted_and_the_oracle_floor_helps_or_equals(study):
    (item,) = study.held_out
    assert item.error < 0.01 and item.oracle_error < 0.01
    assert len(item.predicted) == 16


def test_the_true_form_wins_inside_and_beyond_the_data(study):
    forms = ("shifted_power", "power", "power_no_floor")
    best = study.test_time.mean_huber("exponential")
    beyond = study.test_time.mean_extrapolated("exponential")
    assert all(study.test_time.mean_huber(form) > 2 * best for form in forms)
    assert all(study.test_time.mean_extrapolated(form) > 2 * beyond for form in forms)
    assert max(c.floor_error for c in study.test_time.curves) < 0.01


def test_conditioning_on_mu_is_found_to_matter(study):
    assert study.unified["unified_no_mu"].huber > 5 * study.unified["unified"].huber
    assert study.unified["unified_gamma"].params["gamma"] == pytest.approx(1, abs=0.05)


def test_report_json_and_figures_are_written_and_the_fit_answers_questions(study, tmp_path):
    report = write_report(study, tmp_path).read_text()
    names = ("isoflop_parabolas", "optimal_power_laws", "isoloss_contours",
             "test_time_curves", "held_out")  # fmt: skip
    for name in names:
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
        assert f"({name}.png)" in report
    data = json.loads((tmp_path / "fit.json").read_text())
    assert data["unified"]["unified"]["num_points"] == 240
    result = answer(Predictor.load(str(tmp_path)), Question(8e18))
    assert 2 <= result.mu <= 12
    assert result.intervals["loss"][0] <= result.loss <= result.intervals["loss"][1]


def test_a_table_with_losses_at_one_depth_gives_what_it_can_and_says_what_is_missing(tmp_path):
    study = run_study(parabola_runs(0.4), num_restarts=20, num_draws=0)
    (tmp_path / "held_out.png").write_text("of an earlier report")
    assert study.isoflop.mu_law is not None
    assert set(study.skipped) == {"training", "test_time", "unified"}
    report = write_report(study, tmp_path).read_text()
    assert "column params" in report and "Not fitted" in report
    assert study.predictor is None
    assert not (tmp_path / "held_out.png").exists()


def test_a_minimum_outside_the_measured_mu_is_given_as_a_side_not_as_a_number(tmp_path):
    study = run_study(parabola_runs(0.6), num_restarts=5, num_draws=0)
    report = write_report(study, tmp_path).read_text()
    assert "| 1e+18 | below 2 | - | - | outside |" in report
    assert "| 6.4e+19 | above 12 | - | - | outside |" in report


def test_predicting_held_out_runs_without_a_law_is_refused():
    unseen = law_runs(UNIFIED, UNIFIED_TRUE, (8,), tokens=1e9)
    with pytest.raises(UserError, match="need a parametric law"):
        run_study(parabola_runs(0.4), unseen, num_restarts=5, num_draws=0)


def test_only_fixed_depth_runs_are_refused():
    runs = parabola_runs(0.4)
    ones = np.ones(len(runs))
    with pytest.raises(UserError, match="no looped runs"):
        run_study(Runs(**{**vars(runs), "mu": ones, "num_loops": ones}))
    assert SCALE.flops_core > 0
