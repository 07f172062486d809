"""Samples of a step, and the deal."""

from __future__ import annotations

import numpy as np
import pytest

from megaparcae.data.sampler import deal, imbalance, step_sample_ids


def looped_costs(seed: int, num_samples: int) -> np.ndarray:
    """n + 3 k with T ~ Poisson(8), at least 1, and at most 4 loops with gradient."""
    loops = np.maximum(1, np.random.default_rng(seed).poisson(8, num_samples))
    with_gradient = np.minimum(loops, 4)
    return loops - with_gradient + 3 * with_gradient


def test_steps_take_consecutive_samples_without_end() -> None:
    assert step_sample_ids(3, 4).tolist() == [12, 13, 14, 15]
    assert step_sample_ids(2**40, 256)[-1] == 2**48 + 255


@pytest.mark.parametrize("mode", ["none", "balanced"])
@pytest.mark.parametrize("shape", [(8, 4, 8), (1, 1, 1), (3, 5, 2), (32, 1, 8), (1, 16, 4)])
def test_every_sample_of_the_step_is_dealt_once(shape: tuple[int, int, int], mode: str) -> None:
    dp, micro_batches, rows = shape
    costs = looped_costs(0, dp * micro_batches * rows)
    positions = deal(costs, dp=dp, micro_batches=micro_batches, rows=rows, mode=mode)
    assert positions.shape == shape
    assert (np.sort(positions.ravel()) == np.arange(len(costs))).all()


def test_ranks_and_micro_batches_carry_equal_work() -> None:
    for seed in range(50):
        costs = looped_costs(seed, 256)
        positions = deal(costs, dp=8, micro_batches=4, rows=8)
        assert imbalance(costs, positions) < 0.005
        per_micro_batch = costs[positions].sum(axis=2)
        assert per_micro_batch.max() / per_micro_batch.mean() < 1.02


def test_the_deal_is_the_same_everywhere_and_breaks_ties_by_sample() -> None:
    costs = looped_costs(1, 64)
    first = deal(costs, dp=4, micro_batches=4, rows=4)
    assert (first == deal(costs.astype(float), dp=4, micro_batches=4, rows=4)).all()
    equal = deal(np.ones(6), dp=1, micro_batches=1, rows=6)
    assert equal.ravel().tolist() == [0, 1, 2, 3, 4, 5]


def test_rows_of_a_micro_batch_come_by_falling_cost() -> None:
    costs = looped_costs(2, 64)
    dealt = costs[deal(costs, dp=2, micro_batches=4, rows=8)]
    assert (np.diff(dealt, axis=2) <= 0).all()


def test_without_a_deal_the_samples_stay_in_order() -> None:
    positions = deal(looped_costs(3, 24), dp=2, micro_batches=3, rows=4, mode="none")
    assert positions.ravel().tolist() == list(range(24))
