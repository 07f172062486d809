from __future__ import annotations

import numpy as np
import pytest
from synthetic_runs import BUDGETS, SCALE, TRUE, law_runs, parabola_runs

from megaparcae.errors import UserError
from megaparcae.scaling.isoflop import fit_isoflop
from megaparcae.scaling.laws import TRAINING
from megaparcae.scaling.runs import Runs
from megaparcae.scaling.scale import LoopScale


def test_known_exponents_are_recovered_from_noisy_runs_within_five_percent():
    gamma = 0.4
    study = fit_isoflop(parabola_runs(gamma, noise=1e-4), SCALE)
    assert study.mu_law.exponent == pytest.approx(gamma, rel=0.05)
    best = np.array([5.5 * (c / 8e18) ** gamma for c in BUDGETS])
    inside = (best >= 2) & (best <= 12)
    cost = SCALE.flops_fixed + 2 * SCALE.flops_core * best
    true_d = np.polyfit(np.log(BUDGETS)[inside], np.log(np.array(BUDGETS) / cost)[inside], 1)[0]
    assert study.tokens_law.exponent == pytest.approx(true_d, rel=0.05)


def test_the_interval_contains_the_true_exponent_and_widens_with_noise():
    widths = []
    for noise in (1e-4, 1e-3):
        low, high = fit_isoflop(parabola_runs(0.4, noise), SCALE).mu_law.interval
        assert low < 0.4 < high
        widths.append(high - low)
    assert widths[1] > 3 * widths[0]


def test_budgets_whose_minimum_is_not_measured_are_left_out_and_named():
    runs = law_runs(TRAINING, {name: TRUE[name] for name in TRAINING.parameters})
    study = fit_isoflop(runs, SCALE)
    statuses = [p.status for p in study.parabolas]
    assert statuses[0] == "outside" and statuses[-1] != "inside"
    assert len(study.notes) == sum(status != "inside" for status in statuses)
    assert "1e+18" in study.notes[0]


def test_without_two_usable_budgets_there_is_no_law_instead_of_a_wrong_one():
    runs = parabola_runs(0.0)
    falling = Runs(**{**vars(runs), "loss": 4 - 0.1 * np.log(runs.mu)})
    study = fit_isoflop(falling, SCALE)
    assert study.mu_law is None and study.tokens_law is None
    assert len(study.notes) == len(BUDGETS)


def test_three_mu_per_budget_give_exponents_without_an_interval():
    runs = parabola_runs(0.4)
    study = fit_isoflop(runs.select(np.isin(runs.mu, (2, 6, 12))), SCALE)
    assert study.mu_law.exponent == pytest.approx(0.4, rel=1e-6)
    assert study.mu_law.interval is None


def test_fixed_depth_baselines_do_not_enter_the_parabola():
    runs = parabola_runs(0.4)
    first = runs.select(runs.mu == 2)
    baseline = Runs(**{**vars(first), "mu": first.mu / 2, "num_loops": first.mu / 2,
                       "loss": first.loss + 1})  # fmt: skip
    both = Runs(**{k: np.concatenate([v, vars(baseline)[k]]) for k, v in vars(runs).items()})
    assert fit_isoflop(both, SCALE).mu_law == fit_isoflop(runs, SCALE).mu_law


def test_too_few_budgets_or_depths_are_refused():
    runs = parabola_runs(0.4)
    with pytest.raises(UserError, match=r"has 1 budget\(s\)"):
        fit_isoflop(runs.select(runs.budget == 1e18), SCALE)
    with pytest.raises(UserError, match="2 values of mu > 1"):
        fit_isoflop(runs.select(runs.mu <= 4), SCALE)


def test_size_and_cost_lines_are_read_back_from_a_table():
    runs = law_runs(TRAINING, {name: TRUE[name] for name in TRAINING.parameters})
    scale = LoopScale.from_runs(runs)
    for name, value in SCALE.as_dict().items():
        assert scale.as_dict()[name] == pytest.approx(value, rel=1e-6), name


def test_tokens_that_do_not_follow_from_the_budget_are_refused():
    runs = parabola_runs(0.4)
    tokens = runs.tokens.copy()
    tokens[3] *= 2
    with pytest.raises(UserError, match="off the cost per token"):
        LoopScale.from_runs(Runs(**{**vars(runs), "tokens": tokens}))
