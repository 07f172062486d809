"""The keyed permutation and the hash under it."""

from __future__ import annotations

import numpy as np
import pytest

from megaparcae.data.hashing import hash_u64
from megaparcae.data.permutation import order_key, permute

FIRST_OF_1000 = [36, 65, 536, 420, 684, 600, 303, 857]
HASH_OF_7 = 9197822106685548824


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 65, 1000, 4097, 100_003])
def test_every_position_has_one_image(size: int) -> None:
    image = permute(np.arange(size), size, order_key(1, 0))
    assert (np.sort(image) == np.arange(size)).all()


def test_sizes_and_keys_may_differ_by_position() -> None:
    sizes = np.array([3, 1000, 2**40, 2**62])
    keys = order_key(7, np.arange(4))
    together = permute(np.array([2, 999, 5, 2**61]), sizes, keys)
    for i, position in enumerate((2, 999, 5, 2**61)):
        alone = permute(np.array([position]), int(sizes[i]), keys[i])
        assert together[i] == alone[0] < sizes[i]


def test_each_place_is_equally_likely_and_orders_differ_by_key() -> None:
    seen = np.zeros((10, 10), int)
    orders = set()
    for seed in range(2000):
        image = permute(np.arange(10), 10, order_key(seed, 0))
        seen[np.arange(10), image] += 1
        orders.add(tuple(image))
    assert seen.min() > 140 and seen.max() < 270
    assert len(orders) > 1900


def test_neighbours_are_torn_apart() -> None:
    image = permute(np.arange(200_000), 200_000, order_key(3, 1))
    assert abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 0.01
    assert abs(np.corrcoef(image, np.arange(200_000))[0, 1]) < 0.01


def test_the_order_never_changes_between_versions() -> None:
    """A resumed run must find the same samples: these numbers are a promise."""
    assert permute(np.arange(8), 1000, order_key(42, 0)).tolist() == FIRST_OF_1000
    assert int(hash_u64(42, "validation split", 7)) == HASH_OF_7


def test_negative_seeds_and_arrays_hash_like_numbers() -> None:
    many = hash_u64(-1, "x", np.arange(3))
    assert [int(hash_u64(-1, "x", i)) for i in range(3)] == many.tolist()
    assert hash_u64(-1, "x", 0) != hash_u64(1, "x", 0) != hash_u64(1, "y", 0)
