"""Rows of unequal length into batches of about equal size."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from megaparcae.log import logger

Item = TypeVar("Item")

SECONDS_BETWEEN_REPORTS = 10.0


def by_length(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Row numbers in batches, longest first, each at most `batch_tokens` with padding (or one row).

    Longest first: when memory does not suffice, the first batch says so.
    """
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist()
    batches: list[list[int]] = []
    room = 0
    for row in order:
        if not room:
            batches.append([])
            room = max(1, batch_tokens // max(1, lengths[row]))
        batches[-1].append(row)
        room -= 1
    return batches


def padded(rows: Sequence[np.ndarray], fill: int) -> np.ndarray:
    """[B, S] of the rows' type, filled up on the right."""
    width = max(len(row) for row in rows)
    out = np.full((len(rows), width), fill, rows[0].dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def reported(items: Sequence[Item] | Iterable[Item], total: int, what: str) -> Iterator[Item]:
    """The items; every ten seconds a line says how many of `total` are done."""
    begin = last = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        if done and now - last > SECONDS_BETWEEN_REPORTS:
            left = (now - begin) / done * (total - done)
            logger.info("%s: %d of %d pieces, about %.0f s left", what, done, total, left)
            last = now
        yield item
