"""A keyed permutation of [0, n) without an array: any element at any time, the same everywhere.

A Feistel network permutes [0, 2^bits) with 2^bits >= n; where it leads outside [0, n) it is applied
again until it comes back (cycle walking, Black and Rogaway 2002), less than twice on average.
"""

from __future__ import annotations

import numpy as np

from megaparcae.data.hashing import hash_u64, mix64

NUM_ROUNDS = 6  # even, so that the two halves end where they began
MIN_BITS = 6  # tiny domains mix badly and cost nothing to walk through


def permute(
    positions: np.ndarray, sizes: int | np.ndarray, keys: np.ndarray | np.uint64
) -> np.ndarray:
    """Image of every position under the permutation of [0, size) that its key names.

    positions int64 in [0, size); sizes and keys (uint64) broadcast to them. Returns int64.
    """
    positions = np.asarray(positions, np.int64)
    sizes = np.broadcast_to(np.asarray(sizes, np.int64), positions.shape)
    keys = np.broadcast_to(np.asarray(keys, np.uint64), positions.shape)
    bits = num_bits(sizes)
    image = _feistel(positions.astype(np.uint64), bits, keys).astype(np.int64)
    outside = np.flatnonzero(image >= sizes)
    while len(outside):
        walked = _feistel(image[outside].astype(np.uint64), bits[outside], keys[outside])
        image[outside] = walked.astype(np.int64)
        outside = outside[image[outside] >= sizes[outside]]
    return image


def num_bits(sizes: np.ndarray) -> np.ndarray:
    """Bits of the domain around [0, size), uint64; sizes below 2^53 get the least that will do."""
    _, exponents = np.frexp((sizes - 1).astype(np.float64))
    return np.maximum(exponents, MIN_BITS).astype(np.uint64)


def order_key(seed: int, *numbers: int | np.ndarray) -> np.ndarray:
    """Key of the order in which the samples of (for example) a set and an epoch are drawn."""
    return hash_u64(seed, "sample order", *numbers)


def _feistel(values: np.ndarray, bits: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """NUM_ROUNDS of (left, right) -> (right, left xor F(right)); halves of bits//2 and the rest."""
    widths = (bits - bits // np.uint64(2), bits // np.uint64(2))  # right, left
    right_mask = (np.uint64(1) << widths[0]) - np.uint64(1)
    left, right = values >> widths[0], values & right_mask
    for round_number in range(NUM_ROUNDS):
        # `left` has its own width in even rounds and the right's in odd ones.
        width = widths[1] if round_number % 2 == 0 else widths[0]
        noise = mix64(right ^ (keys + np.uint64(round_number << 56)))
        left, right = right, left ^ (noise >> (np.uint64(64) - width))
    return (left << widths[0]) | right
