"""Who owns what at the sizes of the paper; and the norm that counts everything once."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest
import torch

from megaparcae.checkpoint.names import canonical_shapes
from megaparcae.config.load import build_config
from megaparcae.optim.param_groups import parameter_rule
from megaparcae.parallel.grad_norm import clip_factor, counts_here, square_sum
from megaparcae.parallel.ownership import Item, Plan, plan_ownership
from megaparcae.parallel.shard import ShardSpec


def stage_items(preset: str, pp: int = 1) -> list[list[Item]]:
    """Core, tables and injection on every stage; the rest on the first or last."""
    stages: list[list[Item]] = [[] for _ in range(pp)]
    for name, shape in canonical_shapes(
        build_config({"preset": preset}, where="test").model
    ).items():
        where = {"prelude": (0,), "coda": (pp - 1,)}.get(name.split(".")[0], tuple(range(pp)))
        rule = parameter_rule(name, shape, "muon_adamw")
        item = Item(ShardSpec(name=name, full_shape=shape, stages=where), rule.kind, rule.decayed)
        for stage in where:
            stages[stage].append(item)
    return stages


def loads(plan: Plan, ranks: int, kind: str) -> list[int]:
    return [sum(p.numel for p in plan.owned_by(r) if p.kind == kind) for r in range(ranks)]


@pytest.mark.parametrize("preset, ranks", [("140m", 2), ("140m", 8), ("1p3b", 16), ("1p3b", 64)])
def test_memory_and_matrices_are_spread_evenly(preset, ranks):
    items = stage_items(preset)
    plan = plan_ownership(items, 0, ranks)
    total = sum(prod(item.spec.full_shape) for item in items[0])
    assert sum(p.numel for p in plan.pieces) == total
    assert plan.segment <= 1.08 * total / ranks
    muon = loads(plan, ranks, "muon")
    assert max(muon) <= 1.5 * sum(muon) / ranks + 6144 * 1536


def test_pieces_do_not_overlap_and_cover_every_parameter():
    plan = plan_ownership(stage_items("140m"), 0, 8)
    for rank in range(8):
        own = plan.owned_by(rank)
        assert all(a.end <= b.begin for a, b in pairwise(own))
        assert own[-1].end <= plan.segment
    rows: dict[str, int] = {}
    for piece in plan.pieces:
        rows[piece.spec.name] = rows.get(piece.spec.name, 0) + piece.spec.local_shape[0]
    assert rows == {item.spec.name: item.spec.full_shape[0] for item in stage_items("140m")[0]}


def test_tables_stay_whole_where_that_is_even_enough():
    assert all(p.spec.rows is None for p in plan_ownership(stage_items("140m"), 0, 2).pieces)


def test_muon_matrices_stay_whole():
    plan = plan_ownership(stage_items("1p3b"), 0, 64)
    assert all(piece.spec.rows is None for piece in plan.pieces if piece.kind == "muon")
    assert any(piece.spec.rows is not None for piece in plan.pieces)


def test_tied_parameters_have_the_same_owner_and_block_on_all_their_stages():
    stages = stage_items("140m", pp=3)
    plans = [plan_ownership(stages, stage, 4) for stage in range(3)]
    for rank in range(4):
        tied = [[p for p in plan.owned_by(rank) if len(p.spec.stages) > 1] for plan in plans]
        names = [[(p.spec.name, p.spec.rows, p.begin - t[0].begin) for p in t] for t in tied]
        assert names[0] == names[1] == names[2]
        blocks = [[b.end - b.begin for b in p.blocks_of(rank) if len(b.stages) > 1] for p in plans]
        assert blocks[0] == blocks[1] == blocks[2]


def test_norm_of_a_long_tensor_is_exact_to_six_digits():
    gradient = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0)) * 1e-3
    exact = gradient.double().square().sum().item()
    assert square_sum([gradient], gradient.device).item() == pytest.approx(exact, rel=1e-6)


def test_norm_of_nothing_is_zero():
    assert square_sum([], torch.device("cpu")).item() == 0


def test_slices_count_on_every_rank_and_copies_and_replicas_once():
    copy = ShardSpec(name="norm", full_shape=(4,), stages=(0, 1))
    sliced = ShardSpec(name="matrix", full_shape=(4, 4), dim=0, num_slices=2, stages=(0, 1))
    places = [(stage, tp) for stage in (0, 1) for tp in (0, 1)]

    def counting(spec: ShardSpec) -> list[tuple[int, int]]:
        return [(s, t) for s, t in places if counts_here(spec, stage=s, tp_index=t)]

    assert counting(copy) == [(0, 0)]
    assert counting(sliced) == [(0, 0), (0, 1)]


def test_clipping_scales_down_only_and_zero_is_off():
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(4.0, 1.0) == pytest.approx(0.25)
    assert clip_factor(4.0, 0.0) == 1.0
