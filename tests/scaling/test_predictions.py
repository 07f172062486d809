from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from megaparcae.errors import UserError
from megaparcae.scaling.predict import Predictor, Question, answer, describe

PAPER = Predictor.from_paper("140m")


def test_without_serving_the_whole_budget_is_trained_at_the_lowest_loss():
    result = answer(PAPER, Question(4e18))
    scale = PAPER.scale
    assert result.tokens * scale.flops_per_token(result.mu) == pytest.approx(4e18)
    mu = np.arange(1, 13)
    losses = PAPER.law.predict(
        PAPER.params,
        {"N": scale.unrolled_params(mu), "D": 4e18 / scale.flops_per_token(mu), "T": mu, "mu": mu},
    )
    assert result.mu == mu[losses.argmin()]
    assert losses.min() <= result.loss <= losses.min() * 1.001


def test_loops_that_gain_nothing_are_not_asked_for():
    result = answer(PAPER, Question(16e18))
    assert result.num_loops < result.mu


def test_more_served_tokens_mean_less_training_and_no_more_loops():
    few, many = (answer(PAPER, Question(16e18, served_tokens=n)) for n in (1e9, 1e10))
    assert many.tokens * PAPER.scale.flops_per_token(many.mu) < 16e18 * 0.8
    assert many.num_loops <= few.num_loops
    assert many.loss > few.loss


def test_a_limit_on_serving_flops_bounds_the_loops():
    limit = float(PAPER.scale.forward_flops_per_token(3))
    assert answer(PAPER, Question(64e18, serving_flops=limit)).num_loops == 3


def test_the_papers_error_is_the_interval_of_its_loss():
    result = answer(PAPER, Question(4e18))
    low, high = result.intervals["loss"]
    assert high / result.loss - 1 == pytest.approx(0.013)
    assert set(result.intervals) == {"loss"} and low < result.loss


def test_a_law_without_a_test_time_part_answers_with_t_equal_to_mu():
    result = answer(Predictor.from_paper("370m"), Question(64e18))
    assert result.num_loops == result.mu
    assert any("no test-time part" in note for note in result.notes)


def test_an_optimum_at_the_border_or_outside_the_data_is_said():
    assert "--max-mu" in " ".join(answer(PAPER, Question(64e18)).notes)
    assert "extrapolation" in " ".join(answer(PAPER, Question(64e18, max_mu=80)).notes)


def test_bootstrap_draws_become_intervals_and_survive_the_file(tmp_path):
    rng = np.random.default_rng(0)
    draws = {k: v * np.exp(0.002 * rng.standard_normal(50)) for k, v in PAPER.params.items()}
    predictor = replace(PAPER, draws=draws)
    path = tmp_path / "fit.json"
    path.write_text(json.dumps({"predictor": predictor.as_dict()}))
    again = Predictor.load(str(path))
    result = answer(again, Question(4e18))
    assert set(result.intervals) == {"mu", "tokens", "num_loops", "loss"}
    assert result.intervals["loss"][0] < result.loss < result.intervals["loss"][1]
    assert result.mu == answer(predictor, Question(4e18)).mu
    assert "to" in describe(again, Question(4e18))


def test_impossible_questions_are_refused_with_the_remedy(tmp_path):
    with pytest.raises(UserError, match="positive number of FLOPs"):
        answer(PAPER, Question(-1))
    with pytest.raises(UserError, match="below the .* forward FLOPs of one loop"):
        answer(PAPER, Question(1e18, serving_flops=1e3))
    with pytest.raises(UserError, match="can't pay for serving"):
        answer(PAPER, Question(1e18, served_tokens=1e12))
    path = tmp_path / "fit.json"
    path.write_text('{"predictor": null}')
    with pytest.raises(UserError, match="not a fit with a parametric law"):
        Predictor.load(str(path))
