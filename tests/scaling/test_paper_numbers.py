"""What the paper's published numbers give: its held-out losses, its exponents, its optima."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megaparcae.errors import UserError
from megaparcae.scaling.laws import TRAINING
from megaparcae.scaling.paper import paper_model, published_exponents
from megaparcae.scaling.scale import LoopScale

GOLDEN = Path(__file__).parents[1] / "golden"
FLOPS = json.loads((GOLDEN / "flops.json").read_text())["models"]
SIZES = json.loads((GOLDEN / "parcae_sizes.json").read_text())["models"]
NAMES = ("140m", "370m")


@pytest.mark.parametrize("name", NAMES)
def test_sizes_and_costs_are_the_authors_for_every_mean_recurrence(name):
    model = paper_model(name)
    for mu in range(1, 13):
        golden = FLOPS[name]["per_mean_recurrence"][str(mu)]
        assert model.scale.flops_per_token(mu) == golden["flops_per_token"]
        assert model.hardware_scale.flops_per_token(mu) == golden["with_head_without_tables"]
        assert model.scale.unrolled_params(mu) == SIZES[name]["unrolled_parameters_at_mu"][str(mu)]


@pytest.mark.parametrize("name", ["140m", "370m", "770m", "1.3b"])
def test_two_points_of_the_counters_give_the_whole_line(name):
    flops, sizes = FLOPS[name]["per_mean_recurrence"], SIZES[name]["unrolled_parameters_at_mu"]
    scale = LoopScale.from_functions(
        lambda mu: sizes[str(mu)], lambda mu: flops[str(mu)]["flops_per_token"]
    )
    for mu in range(1, 13):
        assert scale.unrolled_params(mu) == pytest.approx(sizes[str(mu)], rel=1e-12)
        golden = flops[str(mu)]["flops_per_token"]
        assert scale.flops_per_token(mu) == pytest.approx(golden, rel=1e-12)


@pytest.mark.parametrize("name, measured_here", [("140m", 0.0095), ("370m", 0.0026)])
def test_held_out_losses_of_table_5_are_predicted_within_the_papers_error(name, measured_here):
    model = paper_model(name)
    predicted, loss = model.held_out_prediction()
    assert abs(predicted / loss - 1) <= model.held_out_error
    assert predicted / loss - 1 == pytest.approx(measured_here, abs=1e-4)


def test_the_published_optima_have_the_papers_exponents_with_hardware_flops():
    exponents = published_exponents([paper_model(name) for name in NAMES], hardware_flops=True)
    assert exponents.mu == pytest.approx(0.428, abs=0.001)
    assert exponents.tokens == pytest.approx(0.795, abs=0.001)
    assert exponents.mu_interval[0] < 0.40 < exponents.mu_interval[1]
    assert exponents.tokens_interval[0] < 0.78 < exponents.tokens_interval[1]


def test_the_authors_flop_counter_does_not_give_the_papers_token_exponent():
    exponents = published_exponents([paper_model(name) for name in NAMES], hardware_flops=False)
    assert exponents.tokens == pytest.approx(0.851, abs=0.001)
    assert exponents.tokens_interval[0] > 0.78


@pytest.mark.parametrize("name, gamma", [("140m", 1.25), ("370m", 0.61)])
def test_the_parametric_law_has_steeper_optima_than_the_parabolas(name, gamma):
    """The mu that minimises Table 11's law at a budget grows faster with the budget than Table 6's
    minima of parabolas: exponents 1.25 and 0.61, where these give about 0.4."""
    model = paper_model(name)
    mu = np.geomspace(0.1, 100, 4000)
    cost = model.scale.flops_fixed + 2 * model.scale.flops_core * mu
    size = model.scale.unrolled_params(mu)
    budgets = np.array(list(model.optimal_mu))
    loss = TRAINING.predict(model.training, {"N": size, "D": budgets[:, None] / cost})
    best = mu[loss.argmin(1)]
    assert np.polyfit(np.log(budgets), np.log(best), 1)[0] == pytest.approx(gamma, abs=0.02)


def test_another_size_is_refused():
    with pytest.raises(UserError, match="choose 140m or 370m"):
        paper_model("1b")
