"""Alternatives in one row score what each scores in a row of its own, at every depth."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import LOOPED, RDM, TRANSFORMER, random_model

from megaparcae.eval.prompts import Alternative
from megaparcae.eval.scoring import Scorer
from megaparcae.eval.tree import make_batch, pack_item

STEM = tuple(range(10, 40))
CASES = {
    "rests of several tokens": [(*STEM, 1, 2, 3), (*STEM, 4, 5), (*STEM, 1, 7, 8, 9)],
    "single tokens": [(*STEM, 1), (*STEM, 2), (*STEM, 3)],
    "one ends where another goes on": [(*STEM, 1), (*STEM, 1, 2), (*STEM, 3, 3, 3)],
    "one alone": [(*STEM, 1, 2)],
    "little in common": [(1, *STEM, 5), (2, *STEM, 5)],
}


def losses(scorer: Scorer, items: list[list[Alternative]], *, together: bool) -> dict:
    """{depth: {(item, alternative): losses}}, packed or one row each."""
    if together:
        rows = [row for i, item in enumerate(items) for row in pack_item(i, item)]
        owners = [(row.item, int(j)) for row in rows for j in row.target_owners]
    else:
        rows = [row for i, item in enumerate(items) for one in item for row in pack_item(i, [one])]
        alternatives = [j for item in items for j in range(len(item))]
        owners = [
            (row.item, j)
            for row, j in zip(rows, alternatives, strict=True)
            for _ in row.target_owners
        ]
    found: dict = {}
    for depth, scores in scorer.score(make_batch(rows, torch.device("cpu"))).items():
        for owner, loss in zip(owners, scores.losses, strict=True):
            found.setdefault(depth, {}).setdefault(owner, []).append(loss)
    return found


@pytest.mark.parametrize("config, start", [(LOOPED, "zero"), (RDM, "zero"), (TRANSFORMER, "zero")])
def test_packed_scores_are_those_of_separate_rows(config, start):
    depths = [1] if config.architecture == "transformer" else [1, 3]
    scorer = Scorer(random_model(config), num_loops=depths, start=start)
    items = [
        [Alternative(tokens, min(30, len(tokens) - 1)) for tokens in case]
        for case in CASES.values()
    ]
    packed = losses(scorer, items, together=True)
    apart = losses(scorer, items, together=False)
    assert packed.keys() == apart.keys() == set(depths)
    for depth in depths:
        assert packed[depth].keys() == apart[depth].keys()
        for owner, values in apart[depth].items():
            np.testing.assert_allclose(packed[depth][owner], values, rtol=2e-5, atol=1e-5)


def test_single_token_alternatives_cost_one_row_of_the_stem():
    (row,) = pack_item(0, [Alternative(tokens, 30) for tokens in CASES["single tokens"]])
    assert row.tokens.tolist() == list(STEM)
    assert row.target_positions.tolist() == [29, 29, 29]
    assert row.target_ids.tolist() == [1, 2, 3]


def test_rests_restart_their_positions_behind_the_stem():
    case = CASES["rests of several tokens"]
    (row,) = pack_item(0, [Alternative(tokens, 30) for tokens in case])
    assert row.tokens[30:].tolist() == [1, 2, 4, 1, 7, 8]
    assert row.branches[29:].tolist() == [0, 1, 1, 2, 3, 3, 3]
    assert row.positions[29:].tolist() == [29, 30, 31, 30, 30, 31, 32]


def test_alternatives_with_little_in_common_stay_apart():
    rows = pack_item(7, [Alternative(tokens, 31) for tokens in CASES["little in common"]])
    assert [(row.item, row.alternatives) for row in rows] == [(7, (0,)), (7, (1,))]
    assert not any(row.branches.any() for row in rows)
