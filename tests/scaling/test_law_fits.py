from __future__ import annotations

import time

import numpy as np
import pytest
from synthetic_runs import LOOPS, TRUE, law_runs

from megaparcae.errors import UserError
from megaparcae.scaling.fit import DELTA, fit_law, huber
from megaparcae.scaling.laws import (
    TEST_TIME_FORMS,
    TRAINING,
    UNIFIED,
    UNIFIED_FORMS,
    UNIFIED_GAMMA,
    ScaledLaw,
)

ALL_LAWS = (TRAINING, *UNIFIED_FORMS, *TEST_TIME_FORMS)


def true_params(law):
    return {name: TRUE[name] for name in law.parameters}


@pytest.mark.parametrize("law", ALL_LAWS, ids=lambda law: law.name)
def test_the_analytic_derivatives_are_those_of_finite_differences(law):
    runs = law_runs(UNIFIED, true_params(UNIFIED), LOOPS)
    scaled = ScaledLaw(law, runs.columns())
    theta = scaled.random_theta(runs.loss, 4, np.random.default_rng(0))
    theta = np.clip(theta, -2, 2)
    _, jacobian = scaled.value_and_jacobian(theta)
    step = 1e-6
    for p in range(scaled.num_theta):
        shift = step * (np.arange(scaled.num_theta) == p)
        up, down = (scaled.value_and_jacobian(theta + s * shift)[0] for s in (1, -1))
        assert np.allclose((up - down) / (2 * step), jacobian[:, p], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("law", ALL_LAWS, ids=lambda law: law.name)
def test_scaled_parameters_mean_the_same_law_as_the_parameters_they_stand_for(law):
    runs = law_runs(UNIFIED, true_params(UNIFIED), LOOPS)
    scaled = ScaledLaw(law, runs.columns())
    theta = scaled.random_theta(runs.loss, 3, np.random.default_rng(1))
    params = {name: values[:, None] for name, values in scaled.to_params(theta).items()}
    value, _ = scaled.value_and_jacobian(theta)
    assert np.allclose(law.predict(params, runs.columns()), value, rtol=1e-10)


def test_the_training_law_is_recovered_from_runs_without_noise():
    runs = law_runs(TRAINING, true_params(TRAINING))
    fit = fit_law(TRAINING, runs.columns(), runs.loss, num_restarts=200)
    for name in ("E", "x", "y"):
        assert fit.params[name] == pytest.approx(TRUE[name], rel=0.02), name
    assert fit.mean_error < 1e-5


def test_eight_parameters_from_noisy_runs_predict_held_out_runs_within_a_percent_in_a_minute():
    true = true_params(UNIFIED_GAMMA)
    runs = law_runs(UNIFIED_GAMMA, true, LOOPS, noise=2e-3)
    start = time.perf_counter()
    fit = fit_law(UNIFIED_GAMMA, runs.columns(), runs.loss, num_restarts=1000)
    assert time.perf_counter() - start < 60
    assert fit.params["gamma"] == pytest.approx(TRUE["gamma"], rel=0.05)
    for tokens in (3e9, 11.2e9, 60e9):
        unseen = law_runs(UNIFIED_GAMMA, true, tuple(range(1, 25)), tokens=tokens)
        error = np.abs(fit.predict(unseen.columns()) / unseen.loss - 1)
        assert error.max() < 0.01


def test_the_unified_law_recovers_its_decay_and_most_starts_agree():
    runs = law_runs(UNIFIED, true_params(UNIFIED), LOOPS, noise=2e-3)
    fit = fit_law(UNIFIED, runs.columns(), runs.loss, num_restarts=300)
    assert fit.params["z"] == pytest.approx(TRUE["z"], rel=0.05)
    assert fit.params["Z"] == pytest.approx(TRUE["Z"], rel=0.05)
    assert fit.num_agreeing >= 20
    assert fit.mean_error < 2.5e-3


@pytest.mark.parametrize("law", TEST_TIME_FORMS, ids=lambda law: law.name)
def test_each_test_time_form_is_recovered_from_its_own_curve(law):
    loops = np.arange(1.0, 25)
    true = {"L_inf": 2.95, "Z": 0.9 if law.floor else 3.4, "z": 0.8 if law.floor else 0.05}
    columns = {"T": loops, "mu": np.full(24, 8.0), "N": loops, "D": loops}
    noise = np.exp(5e-5 * np.random.default_rng(0).standard_normal(24))
    fit = fit_law(law, columns, law.predict(true, columns) * noise, num_restarts=200)
    for name in law.parameters:
        assert fit.params[name] == pytest.approx(true[name], rel=0.01), name


def test_bootstrap_intervals_contain_the_truth_and_shrink_with_the_noise():
    widths = []
    for noise in (4e-3, 1e-3):
        runs = law_runs(UNIFIED, true_params(UNIFIED), LOOPS, noise=noise)
        fit = fit_law(
            UNIFIED, runs.columns(), runs.loss, num_restarts=100, num_draws=100,
            groups=runs.run_ids(),
        )  # fmt: skip
        low, high = fit.interval("z")
        assert low * 0.99 < TRUE["z"] < high * 1.01
        widths.append(high - low)
    assert widths[1] < widths[0] / 2


def test_one_diverged_run_hardly_moves_the_huber_fit():
    runs = law_runs(TRAINING, true_params(TRAINING), noise=5e-4)
    losses = runs.loss.copy()
    losses[7] *= 1.5
    fit = fit_law(TRAINING, runs.columns(), losses, num_restarts=200)
    clean = np.delete(np.arange(len(losses)), 7)
    error = np.abs(fit.predict(runs.columns()) / runs.loss - 1)[clean]
    assert error.max() < 0.01


def test_huber_is_square_inside_delta_and_linear_outside():
    assert huber(np.array(DELTA / 2)) == pytest.approx(DELTA**2 / 8)
    assert huber(np.array(-1.0)) == pytest.approx(DELTA * (1 - DELTA / 2))


def test_data_that_cannot_determine_a_law_are_refused_with_the_reason():
    runs = law_runs(TRAINING, true_params(TRAINING))
    few = runs.select(np.arange(len(runs)) < 5)
    with pytest.raises(UserError, match="5 parameters but the table has only 5 points"):
        fit_law(TRAINING, few.columns(), few.loss)
    one_size = {**runs.columns(), "N": np.full(len(runs), 1e8)}
    with pytest.raises(UserError, match="two different values of N"):
        fit_law(TRAINING, one_size, runs.loss)
    unknown = {**runs.columns(), "N": np.full(len(runs), np.nan)}
    with pytest.raises(UserError, match="column params"):
        fit_law(TRAINING, unknown, runs.loss)
