"""All alternatives of an item as one row: what they share is computed once.

The row is the stem (the inputs that all alternatives begin with), then each alternative's rest.
A rest sees the stem and itself, at the positions it would have alone, so every score is what it
would be in a row of its own. Alternatives that differ in their last token only are the stem alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megaparcae.eval.batching import padded
from megaparcae.eval.prompts import Alternative, shared_start
from megaparcae.eval.scoring import ScoredBatch, Targets

WORTHWHILE = 0.25
"""Share of the longest alternative that must be common, for alternatives to stand in one row."""


@dataclass(frozen=True)
class PackedRow:
    """One row and whose alternatives it scores; L inputs, n scored tokens."""

    item: int
    """Number of the item in its task."""
    alternatives: tuple[int, ...]
    tokens: np.ndarray
    """int64 [L]: inputs."""
    branches: np.ndarray
    """int64 [L]: 0 for the stem, i for the i-th rest."""
    positions: np.ndarray
    """int64 [L]."""
    target_positions: np.ndarray
    """int64 [n]: where in the row the scored tokens are predicted."""
    target_ids: np.ndarray
    """int64 [n]."""
    target_owners: np.ndarray
    """int64 [n]: the alternative each belongs to."""


def pack_item(item: int, alternatives: Sequence[Alternative]) -> list[PackedRow]:
    """One row, or one for each alternative when they have little in common."""
    inputs = [one.tokens[:-1] for one in alternatives]
    stem = shared_start(inputs)
    if stem >= WORTHWHILE * max(map(len, inputs)):
        return [_pack(item, list(enumerate(alternatives)), stem)]
    return [_pack(item, [(i, one)], len(one.tokens) - 1) for i, one in enumerate(alternatives)]


def _pack(item: int, alternatives: list[tuple[int, Alternative]], stem: int) -> PackedRow:
    tokens, branches, positions = list(alternatives[0][1].tokens[:stem]), [0] * stem, [*range(stem)]
    targets: list[tuple[int, int, int]] = []  # place in the row, id, alternative
    branch = 0
    for owner, one in alternatives:
        rest = one.tokens[stem:-1]
        offset = len(tokens) - stem  # of this rest's places in the row from its positions
        for scored in range(one.begin, len(one.tokens)):
            before = scored - 1
            targets.append((before + offset * (before >= stem), one.tokens[scored], owner))
        branch += bool(rest)
        tokens += rest
        branches += [branch] * len(rest)
        positions += range(stem, stem + len(rest))
    places, ids, owners = np.array(targets, np.int64).T
    return PackedRow(
        item,
        tuple(owner for owner, _ in alternatives),
        np.array(tokens, np.int64),
        np.array(branches, np.int64),
        np.array(positions, np.int64),
        places,
        ids,
        owners,
    )


def make_batch(rows: Sequence[PackedRow], device: torch.device) -> ScoredBatch:
    """Rows side by side, their targets row after row."""

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    branching = any(row.branches.any() for row in rows)
    counts = [len(row.target_ids) for row in rows]
    return ScoredBatch(
        ids=tensor(padded([row.tokens for row in rows], 0)),
        targets=Targets(
            rows=tensor(np.repeat(np.arange(len(rows)), counts)),
            positions=tensor(np.concatenate([row.target_positions for row in rows])),
            ids=tensor(np.concatenate([row.target_ids for row in rows])),
        ),
        numbers=np.array([row.item for row in rows], np.int64),
        # padding is a branch of its own: it must see something, and nobody sees it
        branches=tensor(padded([row.branches for row in rows], -1)) if branching else None,
        positions=tensor(padded([row.positions for row in rows], 0)) if branching else None,
    )
