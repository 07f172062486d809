"""Depth samplers and start states: exact distributions, pure functions of seed, step and sample."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from golden_data import read_json
from megaparcae.config.schema import ModelConfig, RecurrenceConfig
from megaparcae.model.depth import start_state
from megaparcae.model.draws import mean_depths, random_keys, sample_depths

NUM_SAMPLES = 200_000
IDS = np.arange(NUM_SAMPLES)
PAIRS = [(8, 4), (16, 8), (2, 1), (1, 1), (12, 6), (32, 8)]
SAMPLERS = {
    "poisson": "poisson-truncated-full",
    "poisson_full": "poisson-full",
    "poisson_fill": "poisson-fill",
    "fixed": "fixed",
    "lognormal_poisson": "lognormal-poisson (Huginn)",
}


def recurrence(mean: int, most: int, sampler: str = "poisson", **rest) -> RecurrenceConfig:
    return RecurrenceConfig(mean_recurrence=mean, backprop_depth=most, sampler=sampler, **rest)


def assert_distribution(drawn: np.ndarray, exact: dict) -> None:
    """Chi-square of the histogram (1 in 10,000), and the mean within 4 standard errors."""
    if "value" in exact:
        assert (drawn == exact["value"]).all()
        return
    error = math.sqrt(exact["variance"] / len(drawn))
    assert abs(drawn.mean() - exact["mean"]) <= 4 * error + 1e-12
    if "pmf" not in exact:
        return
    expected = len(drawn) * np.array(exact["pmf"])
    counts = np.bincount(drawn, minlength=len(expected))[: len(expected)]
    common = expected >= 5
    expected = np.append(expected[common], len(drawn) - expected[common].sum())
    counts = np.append(counts[common], len(drawn) - counts[common].sum())
    if expected[-1] < 5:  # too rare to test on its own
        expected, counts = expected[:-1], counts[:-1]
    statistic = ((counts - expected) ** 2 / expected).sum()
    df = max(len(expected) - 1, 1)
    quantile = df * (1 - 2 / (9 * df) + 3.719 * math.sqrt(2 / (9 * df))) ** 3  # Wilson-Hilferty
    assert statistic <= quantile


@pytest.mark.parametrize(("mean", "most"), PAIRS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_depths_follow_the_exact_distribution(sampler, mean, most):
    exact = read_json("depth_sampling")["exact"][f"mu{mean}_b{most}"][SAMPLERS[sampler]]
    if sampler == "lognormal_poisson":  # its table ends before the tail does; there k = most
        missing = 1 - exact["k"]["mass_listed"]
        exact["k"]["mean"] += missing * most
        if "pmf" in exact["k"]:
            exact["k"]["pmf"][most] += missing
    n, k = sample_depths(recurrence(mean, most, sampler), seed=1, step=0, sample_ids=IDS)
    assert_distribution(n, exact["n"])
    assert_distribution(k, exact["k"])
    assert_distribution(n + k, exact["T"])


def test_depths_of_one_sample_follow_the_distribution_over_the_steps():
    config = recurrence(8, 4)
    steps = range(4000)
    depths = [sample_depths(config, seed=1, step=s, sample_ids=IDS[:3]) for s in steps]
    exact = read_json("depth_sampling")["exact"]["mu8_b4"][SAMPLERS["poisson"]]
    totals = np.array([n + k for n, k in depths])
    for i in range(3):
        assert_distribution(totals[:, i], exact["T"])
    assert np.abs(np.corrcoef(totals.T) - np.eye(3)).max() < 0.08


def test_one_depth_for_the_batch_is_split_like_a_depth_per_sequence():
    config = recurrence(8, 4, draw_per="batch")
    drawn = []
    for step in range(4000):
        n, k = sample_depths(config, seed=1, step=step, sample_ids=IDS[:4])
        assert len({*zip(n, k, strict=True)}) == 1
        drawn.append((n[0], k[0]))
    n, k = np.array(drawn).T
    exact = read_json("depth_sampling")["exact"]["mu8_b4"][SAMPLERS["poisson"]]
    assert_distribution(n + k, exact["T"])
    assert_distribution(k, exact["k"])


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("draw_per", ["sequence", "batch"])
def test_depths_depend_on_seed_step_and_sample_alone(sampler, draw_per):
    config = recurrence(8, 4, sampler, draw_per=draw_per)
    n, k = sample_depths(config, seed=3, step=5, sample_ids=np.arange(100, 164))
    for ids in (np.array([130]), np.array([163, 101, 130]), np.arange(120, 140)):
        part = sample_depths(config, seed=3, step=5, sample_ids=ids)
        np.testing.assert_array_equal(part[0], n[ids - 100])
        np.testing.assert_array_equal(part[1], k[ids - 100])


def test_another_seed_step_or_sample_gives_other_depths():
    config, ids = recurrence(8, 4), np.arange(64)
    draws = [
        tuple(sample_depths(config, seed=seed, step=step, sample_ids=ids + shift)[0])
        for seed, step, shift in ((1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 64), (11, 0, 0))
    ]
    assert len(set(draws)) == len(draws)


def test_keys_of_neighbouring_steps_and_samples_do_not_meet():
    keys = [random_keys(1, "depth", step, np.arange(10_000)) for step in range(10)]
    keys += [random_keys(1, "start state", step, np.arange(10_000)) for step in range(10)]
    assert len(np.unique(np.concatenate(keys))) == 200_000


def test_the_deepest_rows_have_the_most_loops_with_gradient():
    """Rows sorted by n must be sorted by k as well: every sampler keeps this."""
    for sampler in SAMPLERS:
        n, k = sample_depths(recurrence(8, 4, sampler), seed=1, step=0, sample_ids=IDS[:5000])
        order = np.lexsort((-k, -n))
        assert (np.diff(k[order]) <= 0).all(), sampler


@pytest.mark.parametrize("row", read_json("depth_sampling")["curriculum"]["table"], ids=str)
def test_the_curriculum_is_the_authors(row):
    config = recurrence(
        8,
        4,
        curriculum="sqrt" if "sqrt" in row["ramp"] else "linear",
        curriculum_target=row["target"],
        curriculum_steps=100,
    )
    assert mean_depths(config, row["step"]) == (row["t_no_grad"], row["s_grad"])


def test_a_curriculum_draws_around_its_present_mean():
    config = recurrence(8, 4, curriculum="linear", curriculum_target="both", curriculum_steps=100)
    n, k = sample_depths(config, seed=1, step=50, sample_ids=IDS)
    assert k.max() == 2
    assert abs((n + k).mean() - (4 + math.exp(-4))) < 4 * 2 / math.sqrt(NUM_SAMPLES)


def draw_states(config: ModelConfig, ids: np.ndarray, seed: int = 1, step: int = 2):
    return start_state(
        config,
        seed=seed,
        step=step,
        sample_ids=ids,
        sequence_length=64,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("name", ["like_init", "normal", "embed", "unit", "zero"])
def test_start_states_have_the_authors_statistics(name):
    golden = read_json("init_stats")["state_init"][name.replace("_", "-")]
    states = draw_states(ModelConfig(state_init=name), np.arange(8))
    assert states.shape == (8, 64, 768)
    assert states.dtype == torch.float32
    assert states.std().item() == pytest.approx(golden["measured_std"], rel=0.01)
    assert abs(states.mean().item()) < 4 * max(golden["measured_std"], 1e-9) / math.sqrt(
        8 * 64 * 768
    )
    match name:
        case "like_init":
            assert states.abs().max().item() <= 3 * golden["nominal_std"] * (1 + 1e-6)
        case "unit":
            torch.testing.assert_close(states.mean(-1), torch.zeros(8, 64), rtol=0, atol=1e-6)
            torch.testing.assert_close(states.std(-1), torch.ones(8, 64))
        case "zero":
            assert not states.any()


def test_like_init_follows_the_scale_of_the_embeddings():
    plain, scaled = (
        draw_states(ModelConfig(scale_embeddings=scale), np.arange(2)) for scale in (False, True)
    )
    torch.testing.assert_close(scaled, plain * math.sqrt(768))


@pytest.mark.parametrize("name", ["like_init", "normal", "embed", "unit"])
def test_start_states_are_the_same_in_any_batch(name):
    config = ModelConfig(state_init=name, hidden_size=64, num_heads=2)
    states = draw_states(config, np.arange(6))
    assert len({row[0, 0].item() for row in states}) == 6
    assert torch.equal(draw_states(config, np.array([4, 1])), states[[4, 1]])
    assert not torch.equal(draw_states(config, np.arange(6), step=3), states)
    assert not torch.equal(draw_states(config, np.arange(6), seed=2), states)
