"""A keyed permutation of [0, n) without an array: any element at any time, the same everywhere.

x = left * b + right with left in [0, a), right in [0, b) and a b just above n. Adding to each half,
in turn, a hash of the other (a Feistel network with sums instead of xor, Black and Rogaway 2002)
permutes [0, a b); the few values that leave [0, n) go through it again until they come back.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from megaparcae.data.hashing import hash_u64

NUM_ROUNDS = 4  # even; from four on a Feistel network passes for a random permutation
_SHIFT = np.uint64(32)
_MULTIPLIER_1 = np.uint64(0xFF51AFD7ED558CCD)
_MULTIPLIER_2 = np.uint64(0xC4CEB9FE1A85EC53)


def permute(positions: np.ndarray, sizes: int | np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Image of every position under the permutation of [0, size) that its key names.

    positions int64 [n] in [0, size); sizes (int64) and keys (uint64) are scalars or [n].
    Returns int64 [n].
    """
    positions = np.asarray(positions, np.int64)
    keys = np.atleast_1d(keys)
    image: np.ndarray = _rounds(positions, sizes, keys)
    outside = np.flatnonzero(image >= sizes)
    while len(outside):
        own_sizes = sizes[outside] if isinstance(sizes, np.ndarray) else sizes
        own_keys = keys[outside] if len(keys) > 1 else keys
        image[outside] = _rounds(image[outside], own_sizes, own_keys)
        outside = outside[image[outside] >= own_sizes]
    return image


def order_key(seed: int, *numbers: int | np.ndarray) -> np.ndarray:
    """Key of the order in which the samples of an epoch (and a set) are drawn."""
    return hash_u64(seed, "sample order", *numbers)


@lru_cache
def epoch_key(seed: int, epoch: int) -> np.ndarray:
    """order_key of one epoch, remembered: most batches lie in the epoch of the one before."""
    return order_key(seed, epoch)


def _rounds(values: np.ndarray, sizes: int | np.ndarray, keys: np.ndarray) -> np.ndarray:
    """NUM_ROUNDS over [0, a b), a = ceil(sqrt(n)), b = ceil(n / a)."""
    a = np.ceil(np.sqrt(np.asarray(sizes, np.float64))).astype(np.int64)
    b = -(-np.asarray(sizes, np.int64) // a)
    a, b = a.astype(np.uint64), b.astype(np.uint64)
    left, right = np.divmod(values.astype(np.uint64), b)
    for round_number in range(0, NUM_ROUNDS, 2):
        left = (left + _noise(right, keys + np.uint64(round_number << 56))) % a
        right = (right + _noise(left, keys + np.uint64(round_number + 1 << 56))) % b
    image: np.ndarray = (left * b + right).astype(np.int64)
    return image


def _noise(half: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """32 bits of a hash of (half, key): MurmurHash3's finaliser without its last steps."""
    mixed: np.ndarray = (half ^ keys) * _MULTIPLIER_1
    mixed ^= mixed >> _SHIFT
    mixed *= _MULTIPLIER_2
    mixed >>= _SHIFT
    return mixed
