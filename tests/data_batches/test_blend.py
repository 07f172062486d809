"""Blends: what a weight means, and which sample is which row."""

from __future__ import annotations

import numpy as np
import pytest

from megaparcae.data.blend import check_weights, cycle_counts, make_blend
from megaparcae.errors import UserError


def drawn(blend, num_samples: int) -> np.ndarray:
    sets, _, _ = blend.locate(np.arange(num_samples))
    return np.bincount(sets, minlength=len(blend.sizes))


@pytest.mark.parametrize("weights", [[None], [1.0], [0.3]])
def test_one_set_is_drawn_whole_once_per_epoch_with_or_without_a_weight(weights: list) -> None:
    blend = make_blend([10], weights, seed=0)
    _, epochs, rows = blend.locate(np.arange(25))
    assert epochs.tolist() == [0] * 10 + [1] * 10 + [2] * 5
    assert sorted(rows[:10]) == sorted(rows[10:20]) == list(range(10))
    assert rows[:10].tolist() != rows[10:20].tolist()


def test_weights_are_shares_of_samples() -> None:
    sizes = [10, 20]
    assert drawn(make_blend(sizes, [1.0, 1.0], 0), 30).tolist() == [15, 15]
    assert drawn(make_blend(sizes, [10.0, 20.0], 0), 30).tolist() == [10, 20]
    assert drawn(make_blend(sizes, [None, None], 0), 30).tolist() == [10, 20]


@pytest.mark.parametrize("weights", [[1.0, 1.0], [10.0, 20.0], [None, None], [0.1, 0.9]])
def test_the_table_counts_what_is_really_drawn(weights: list) -> None:
    blend = make_blend([10, 20], weights, seed=5)
    for num_samples in (0, 1, 7, 30, 91):
        assert blend.count(num_samples).tolist() == drawn(blend, num_samples).tolist()


def test_three_hundred_sets_smaller_than_a_batch_are_each_drawn_twice() -> None:
    blend = make_blend([1] * 300, [1.0] * 300, seed=0)
    assert (drawn(blend, 600) == 2).all()
    blend = make_blend([1] * 300, [None] * 300, seed=0)
    assert (drawn(blend, 600) == 2).all()


def test_a_set_of_weight_zero_is_never_drawn() -> None:
    assert drawn(make_blend([10, 20, 5], [1.0, 0.0, 3.0], 0), 400).tolist() == [100, 0, 300]


@pytest.mark.parametrize(
    "weights, words",
    [
        ([0.0, 0.0], "every weight is 0"),
        ([1.0, None], "1 of 2 sets"),
        ([1.0, -2.0], r"data.train\[1\].weight=-2.0"),
        ([float("nan"), 1.0], r"data.train\[0\].weight=nan"),
    ],
)
def test_weights_that_say_nothing_are_refused(weights: list, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_weights("data.train", weights)


def test_every_prefix_is_close_to_the_weights() -> None:
    blend = make_blend([1000] * 4, [0.5, 0.3, 0.15, 0.05], seed=1)
    sets, _, _ = blend.locate(np.arange(2000))
    so_far = np.cumsum(sets[:, None] == np.arange(4), axis=0)
    wanted = np.arange(1, 2001)[:, None] * np.array([0.5, 0.3, 0.15, 0.05])
    assert np.abs(so_far - wanted).max() < 2


def test_no_row_comes_twice_before_every_row_of_its_set_has_come() -> None:
    blend = make_blend([7, 3], [0.6, 0.4], seed=1)
    sets, epochs, rows = blend.locate(np.arange(500))
    for number, size in enumerate((7, 3)):
        mine = sets == number
        for epoch in range(5):
            assert sorted(rows[mine & (epochs == epoch)]) == list(range(size))


def test_any_sample_is_found_alone_and_beyond_32_bits() -> None:
    for weights in ([None, None], [0.7, 0.3]):
        blend = make_blend([1000, 77], weights, seed=9)
        ids = 5 * 2**40 + np.arange(300)
        together = np.array(blend.locate(ids))
        alone = np.array([np.array(blend.locate(ids[i : i + 1]))[:, 0] for i in range(300)]).T
        assert (together == alone).all()
        assert together.dtype == np.int64
        assert (together[1] > 2**31).all()  # the epoch's number too


def test_documents_times_epochs_beyond_32_bits_need_no_array() -> None:
    blend = make_blend([1000], [None], seed=0)
    assert blend.count(3_000_000 * 1000 + 1).tolist() == [3_000_000_001]


def test_awkward_weights_are_rounded_but_never_to_nothing() -> None:
    counts = cycle_counts([1 / 3, 1e-9, 0.0, 0.123456789])
    assert counts[1] == 1 and counts[2] == 0
    assert abs(counts[0] / counts.sum() - (1 / 3) / (1 / 3 + 0.123456789)) < 1e-5
    assert cycle_counts([0.1, 0.2, 0.7]).tolist() == [1, 2, 7]
