"""Best-fit packing: every row is S + 1 tokens of whole documents where possible, without padding.

A piece (a document or what is left of one) takes its tokens and a BOS in front. A row takes the
longest piece of the pool that fits, again and again. When none fits, the shortest is cropped to
fill the row; its tail waits in the pool of the next round ("reuse") or is dropped. A gap of one
token takes a lone BOS. A round ends when its pool can fill no further row; what is left, the tails
and the next BUFFER_DOCUMENTS documents are the pool of the next one.

Pieces of equal size are interchangeable, so a round is planned by size: the same composition
repeats until one of its sizes is used up; planning costs by S, not by the number of documents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

BUFFER_DOCUMENTS = 1 << 20
"""Documents that are packed against each other; bounds memory (about 100 bytes each)."""


@dataclass
class Pieces:
    """Stretches of the token file: starts int64 [n], lengths int64 [n], whole bool [n] (uncut)."""

    starts: np.ndarray
    lengths: np.ndarray
    whole: np.ndarray

    @classmethod
    def join(cls, *parts: Pieces) -> Pieces:
        """All pieces, in order."""
        return cls(
            np.concatenate([part.starts for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            np.concatenate([part.whole for part in parts]),
        )

    @classmethod
    def none(cls) -> Pieces:
        """An empty pool."""
        return cls(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, bool))

    def take(self, which: np.ndarray) -> Pieces:
        """The pieces that a mask or index array names."""
        return Pieces(self.starts[which], self.lengths[which], self.whole[which])

    def __len__(self) -> int:
        return len(self.starts)


@dataclass
class Counts:
    """What became of the tokens."""

    num_tokens: int = 0
    """Tokens of all documents."""
    cropped_tokens: int = 0
    """Tokens that were separated from the beginning of their document."""
    dropped_tokens: int = 0
    """Tokens in no row: cropped tails (drop), and the last row's worth that filled none."""


@dataclass
class Plan:
    """Compositions of rows by size. Pattern p is repeated `repeats[p]` times and ends with a lone
    BOS if `lone_bos[p]`. Its entries e are those with `patterns[e]` = p: `copies[e]` pieces a row,
    from place `firsts[e]` on of the pool sorted by size, `crops[e]` tokens of each (0: all)."""

    repeats: list[int] = field(default_factory=list)
    lone_bos: list[bool] = field(default_factory=list)
    patterns: list[int] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)
    crops: list[int] = field(default_factory=list)


def pack_best_fit(
    documents: Iterable[tuple[np.ndarray, np.ndarray]],
    sequence_length: int,
    *,
    reuse: bool,
    counts: Counts,
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Rows of sequence_length + 1 tokens from blocks of (starts, lengths) of non-empty documents.

    Yields (starts int64 [P], lengths int32 [P], pieces per row int64 [R]) and fills in `counts`.
    """
    pool = Pieces.none()
    for starts, lengths in documents:
        counts.num_tokens += int(lengths.sum())
        fresh = _cut_long(starts, lengths, sequence_length, reuse, counts)
        pool, rows = _pack_round(Pieces.join(pool, fresh), sequence_length, reuse, counts)
        yield rows
    while len(pool):
        pool, rows = _pack_round(pool, sequence_length, reuse, counts)
        if not len(rows[2]):
            break
        yield rows
    counts.dropped_tokens += int(pool.lengths.sum())


def _cut_long(
    starts: np.ndarray, lengths: np.ndarray, limit: int, reuse: bool, counts: Counts
) -> Pieces:
    """Documents of more than `limit` tokens as pieces of exactly that many, and their rest."""
    too_long = int(np.maximum(lengths - limit, 0).sum())
    counts.cropped_tokens += too_long
    if not too_long:
        return Pieces(starts, lengths, np.ones(len(starts), bool))
    if not reuse:
        counts.dropped_tokens += too_long
        return Pieces(starts, np.minimum(lengths, limit), lengths <= limit)
    num_pieces = -(-lengths // limit)
    source = np.repeat(np.arange(len(starts)), num_pieces)
    offsets = (
        np.arange(len(source)) - np.repeat(num_pieces.cumsum() - num_pieces, num_pieces)
    ) * limit
    return Pieces(
        starts[source] + offsets,
        np.minimum(lengths[source] - offsets, limit),
        (lengths <= limit)[source],
    )


def _pack_round(
    pool: Pieces, sequence_length: int, reuse: bool, counts: Counts
) -> tuple[Pieces, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Fill as many rows as the pool can; returns (what is left and the tails, the rows)."""
    capacity = sequence_length + 1
    sizes = pool.lengths + 1
    order = np.argsort(sizes.astype(np.uint16) if capacity < 2**16 else sizes, kind="stable")
    plan = plan_rows(np.bincount(sizes, minlength=capacity + 1).tolist(), capacity)
    sources, crops, rows = _carry_out(plan, pool, order)
    left = np.ones(len(pool), bool)
    left[sources] = False
    cropped = pool.take(sources[crops > 0])
    taken = crops[crops > 0]
    tails = Pieces(cropped.starts + taken, cropped.lengths - taken, np.zeros(len(taken), bool))
    counts.cropped_tokens += int(tails.lengths[cropped.whole].sum())
    if reuse:
        return Pieces.join(pool.take(left), tails), rows
    counts.dropped_tokens += int(tails.lengths.sum())
    return pool.take(left), rows


def plan_rows(counts: list[int], capacity: int) -> Plan:
    """Compositions for a pool with counts[size] pieces of each size (BOS included, 2 .. capacity).

    `available` has bit s set while pieces of size s are left, so that the longest that fits and the
    shortest that does not are single big-integer operations. Uses up `counts`.
    """
    plan = Plan()
    firsts = np.cumsum([0] + counts[:-1]).tolist()
    available = sum(1 << size for size, count in enumerate(counts) if count)
    while available:
        picks, gap = _longest_that_fit(available, counts, capacity)
        crop_size = 0
        if gap > 1:
            crop_size = _shortest_above(gap, available, counts, picks)
            if not crop_size:
                break
        needs = dict(picks)
        if crop_size:
            needs[crop_size] = needs.get(crop_size, 0) + 1
        repeats = min(counts[size] // need for size, need in needs.items())
        entries = [(size, copies, 0) for size, copies in picks.items()]
        if crop_size:
            entries.append((crop_size, 1, gap - 1))
        for size, copies, crop in entries:
            plan.patterns.append(len(plan.repeats))
            plan.firsts.append(firsts[size])
            plan.copies.append(copies)
            plan.crops.append(crop)
            firsts[size] += copies * repeats
            counts[size] -= copies * repeats
        plan.repeats.append(repeats)
        plan.lone_bos.append(gap == 1)
        for size in needs:
            if not counts[size]:
                available ^= 1 << size
    return plan


def _longest_that_fit(
    available: int, counts: list[int], capacity: int
) -> tuple[dict[int, int], int]:
    """(size -> pieces of it in a row, gap that is left) by always taking the longest that fits."""
    picks, gap = {}, capacity
    fitting = available & ((1 << (gap + 1)) - 1)
    while fitting:
        size = fitting.bit_length() - 1
        copies = min(gap // size, counts[size])
        picks[size] = copies
        gap -= copies * size
        fitting &= (1 << min(size, gap + 1)) - 1
    return picks, gap


def _shortest_above(gap: int, available: int, counts: list[int], picks: dict[int, int]) -> int:
    """Smallest size above `gap` of which a piece is left beside the picks; 0 when there is none."""
    above = available >> (gap + 1)
    while above:
        size = (above & -above).bit_length() + gap
        if counts[size] > picks.get(size, 0):
            return size
        above &= above - 1
    return 0


def _carry_out(
    plan: Plan, pool: Pieces, order: np.ndarray
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(pool index of every piece used, tokens it is cropped to or 0, the rows) of a plan."""
    repeats, patterns = np.array(plan.repeats, np.int64), np.array(plan.patterns, np.int64)
    copies, crops = np.array(plan.copies, np.int64), np.array(plan.crops, np.int64)
    per_row = np.bincount(patterns, copies, minlength=len(repeats))
    filled = per_row.astype(np.int64)  # pieces of a row
    column = np.cumsum(copies) - copies - (np.cumsum(filled) - filled)[patterns]
    width = filled + np.array(plan.lone_bos, np.int64)  # a lone BOS is a piece without tokens
    pattern_base = np.cumsum(width * repeats) - width * repeats
    num_used = copies * repeats[patterns]
    entry = np.repeat(np.arange(len(copies)), num_used)
    nth = np.arange(len(entry)) - np.repeat(np.cumsum(num_used) - num_used, num_used)
    sources = order[np.array(plan.firsts, np.int64)[entry] + nth]
    row, copy = np.divmod(nth, copies[entry])
    target = (pattern_base[patterns] + column)[entry] + row * width[patterns][entry] + copy
    crop = crops[entry]
    starts = np.zeros(int((width * repeats).sum()), np.int64)
    lengths = np.zeros(len(starts), np.int32)
    starts[target] = pool.starts[sources]
    lengths[target] = np.where(crop, crop, pool.lengths[sources])
    return sources, crop, (starts, lengths, np.repeat(width, repeats))
