"""Randomness as a pure function: (seed, purpose, numbers) -> 64 bits, the same everywhere."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np

Numbers = int | np.ndarray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


def mix64(values: np.ndarray) -> np.ndarray:
    """SplitMix64's step (Steele et al. 2014): a bijection of uint64 that spreads every bit."""
    mixed = values + _GOLDEN
    mixed ^= mixed >> np.uint64(30)
    mixed *= _MULTIPLIER_1
    mixed ^= mixed >> np.uint64(27)
    mixed *= _MULTIPLIER_2
    mixed ^= mixed >> np.uint64(31)
    return mixed


def hash_u64(seed: int, purpose: str, *numbers: Numbers) -> np.ndarray:
    """uint64 bits for (seed, purpose, numbers); numbers are ints or arrays that broadcast.

    Every number is taken modulo 2^64, so negative seeds are seeds like any other.
    """
    state = _start(seed, purpose)
    for number in numbers:
        state = mix64(state ^ mix64(_as_u64(number)))
    return state if any(np.ndim(number) for number in numbers) else state[0]


@lru_cache
def _start(seed: int, purpose: str) -> np.ndarray:
    digest = hashlib.blake2b(purpose.encode(), digest_size=8).digest()
    return mix64(_as_u64(seed) ^ np.frombuffer(digest, "<u8"))


def _as_u64(number: Numbers) -> np.ndarray:
    if isinstance(number, np.ndarray):
        return number.astype(np.uint64, copy=False)
    return np.array([int(number) % 2**64], dtype=np.uint64)
