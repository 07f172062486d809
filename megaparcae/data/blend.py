"""Which sample of which set is sample number i of the run, for any i, without a table of samples.

A weight is the set's share of the drawn samples (not of its tokens or epochs): weights 1 and 1 draw
as many samples from a set of 10 as from one of 20. Weights are relative: 1:1 is 0.5:0.5. With every
weight null the sets are drawn by size: one epoch is every row of every set once, in one random
order. A set of weight 0 is listed but not drawn. Each set is passed through in an order of its own,
new every epoch, and no row comes twice before every row of its set has come once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from megaparcae.data.permutation import epoch_key, order_key, permute
from megaparcae.errors import UserError

MAX_CYCLE = 1 << 20
"""Longest repeating pattern of sets; weights are rounded to multiples of 1/MAX_CYCLE if need be."""
EXACT_COUNT = 1 << 20
"""Samples of a partial epoch that are counted one by one; more are counted in proportion."""

# D sets, n sample ids


class SizeBlend:
    """All weights null: one permutation over the rows of all sets, new every epoch."""

    def __init__(self, sizes: Sequence[int], seed: int) -> None:
        self.sizes = np.array(sizes, np.int64)
        self.seed = seed
        self.borders = np.concatenate([[0], np.cumsum(self.sizes)])
        self.num_samples = int(self.borders[-1])
        """Samples of one epoch: all rows of all sets."""
        self.shares = self.sizes / max(1, self.num_samples)

    def locate(self, sample_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(set, epoch, row of the set) of every sample id, int64 [n] each."""
        epochs, positions = np.divmod(np.asarray(sample_ids, np.int64), self.num_samples)
        one_epoch = len(epochs) > 0 and epochs.min() == epochs.max()
        keys = epoch_key(self.seed, int(epochs[0])) if one_epoch else order_key(self.seed, epochs)
        positions = permute(positions, self.num_samples, keys)
        if len(self.sizes) == 1:
            return np.zeros_like(positions), epochs, positions
        sets = np.searchsorted(self.borders, positions, "right") - 1
        return sets, epochs, positions - self.borders[sets]

    def count(self, num_samples: int) -> np.ndarray:
        """Samples of each set among the first num_samples, int64 [D]."""
        epochs, rest = divmod(num_samples, self.num_samples)
        if rest <= EXACT_COUNT:
            last, _, _ = self.locate(num_samples - rest + np.arange(rest))
            counts = np.bincount(last, minlength=len(self.sizes))
        else:
            counts = _round_to_sum(self.shares, rest)
        return epochs * self.sizes + counts


class WeightBlend:
    """A repeating pattern of sets, in which every set is spread evenly."""

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        self.sizes = np.array(sizes, np.int64)
        self.seed = seed
        self.per_cycle = cycle_counts(weights)
        self.shares = self.per_cycle / self.per_cycle.sum()
        drawn = self.per_cycle > 0
        self.num_samples = int(self.sizes[drawn].sum())
        """Rows of all drawn sets."""
        self.sets = np.repeat(np.arange(len(sizes)), self.per_cycle)
        ends = np.cumsum(self.per_cycle)
        nth = np.arange(len(self.sets)) - (ends - self.per_cycle)[self.sets]
        # Draw j of a set with c draws a cycle is due at (2 j + 1) / 2 c of the cycle.
        order = np.lexsort((self.sets, (2 * nth + 1) / (2 * self.per_cycle[self.sets])))
        self.sets, self.nth = self.sets[order], nth[order]

    def locate(self, sample_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(set, epoch of that set, row of the set) of every sample id, int64 [n] each."""
        cycles, places = np.divmod(np.asarray(sample_ids, np.int64), len(self.sets))
        sets = self.sets[places]
        draws = cycles * self.per_cycle[sets] + self.nth[places]
        epochs, positions = np.divmod(draws, self.sizes[sets])
        keys = order_key(self.seed, epochs, sets)
        return sets, epochs, permute(positions, self.sizes[sets], keys)

    def count(self, num_samples: int) -> np.ndarray:
        """Samples of each set among the first num_samples, int64 [D]."""
        cycles, rest = divmod(num_samples, len(self.sets))
        return cycles * self.per_cycle + np.bincount(self.sets[:rest], minlength=len(self.sizes))


Blend = SizeBlend | WeightBlend


def make_blend(sizes: Sequence[int], weights: Sequence[float | None], seed: int) -> Blend:
    """The blend of sets with these numbers of rows; weights as `check_weights` takes them."""
    given = [weight for weight in weights if weight is not None]
    return WeightBlend(sizes, given, seed) if given else SizeBlend(sizes, seed)


def check_weights(option: str, weights: Sequence[float | None]) -> None:
    """Refuse weights that say nothing, with the option's name."""
    given = [weight for weight in weights if weight is not None]
    if given and len(given) < len(weights):
        raise UserError(
            f"{option}: weight is given for {len(given)} of {len(weights)} sets; give a weight to "
            "every set, or to none (then sets are drawn by size)"
        )
    for number, weight in enumerate(given):
        if not (math.isfinite(weight) and weight >= 0):
            raise UserError(
                f"{option}[{number}].weight={weight} must be 0 or more; 0 leaves it out"
            )
    if given and not any(given):
        raise UserError(
            f"{option}: every weight is 0, so there is nothing to draw; give at least one set a "
            "weight above 0, or null to all (drawn by size)"
        )


def cycle_counts(weights: Sequence[float]) -> np.ndarray:
    """Draws of each set in the shortest pattern that holds the weights' ratio, int64 [D].

    Weights mean the decimals they were written as. A positive weight is drawn at least once.
    """
    exact = [Fraction(repr(float(weight))) for weight in weights]
    total = sum(exact)
    shares = [weight / total for weight in exact]
    length = math.lcm(*(share.denominator for share in shares))
    if length <= MAX_CYCLE:
        return np.array([int(share * length) for share in shares], np.int64)
    counts = _round_to_sum(np.array([float(share) for share in shares]), MAX_CYCLE)
    counts[(counts == 0) & (np.array(weights) > 0)] = 1
    return counts


def _round_to_sum(shares: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers in proportion to the shares that add up to total (largest remainders)."""
    wanted = shares * total
    counts: np.ndarray = np.floor(wanted).astype(np.int64)
    missing = total - int(counts.sum())
    counts[np.argsort(counts - wanted, kind="stable")[:missing]] += 1
    return counts
