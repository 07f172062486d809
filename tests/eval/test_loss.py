"""Loss, perplexity and bits per byte: the right number, whatever the batch, depth list or rank."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import LOOPED, RDM, TRANSFORMER, byte_tokenizer, random_model

from harness import run_ranks
from megaparcae.errors import UserError
from megaparcae.eval.loss import evaluate_loss, loss_table
from megaparcae.eval.ranks import Ranks
from megaparcae.eval.rows import LossRows, Row, text_rows
from megaparcae.eval.scoring import Scorer
from megaparcae.model.batch import Batch, fixed_depth

CONFIGS = {"looped": LOOPED, "rdm": RDM}


def made_rows(lengths: list[int], seed: int = 0, *, documents: bool = False) -> LossRows:
    generator = np.random.default_rng(seed)
    rows = []
    for length in lengths:
        borders = np.sort(generator.integers(0, 3, length)).astype(np.int32) if documents else None
        rows.append(Row(generator.integers(0, 259, length + 1), borders))
    return LossRows(lengths, lambda numbers: [rows[i] for i in numbers], np.ones(259, np.int64))


def loss_by_hand(model: torch.nn.Module, rows: LossRows, num_loops: int) -> float:
    """One row at a time through the model's own forward pass and loss."""
    total = 0.0
    for row in rows.read(range(len(rows.lengths))):
        tokens = torch.from_numpy(row.tokens)[None]
        ids, labels = tokens[:, :-1], tokens[:, 1:]
        documents = None if row.documents is None else torch.from_numpy(row.documents)[None]
        more = {"labels": labels, "documents": documents}
        zero = torch.zeros(*ids.shape, model.config.hidden_size)
        if model.config.architecture == "transformer":
            batch = Batch(ids=ids, **more)
        else:
            batch = fixed_depth(ids, num_loops, zero, **more)
        with torch.no_grad():
            total += float(model(batch))
    return total / sum(rows.lengths)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("documents", [False, True])
def test_the_loss_at_every_depth_is_that_of_the_model_itself(name, documents):
    model = random_model(CONFIGS[name])
    rows = made_rows([20, 20, 20], documents=documents)
    found = evaluate_loss(Scorer(model, num_loops=[4, 1, 2]), rows, batch_tokens=64)
    assert [one.num_loops for one in found] == [1, 2, 4]
    for one in found:
        assert one.loss == pytest.approx(loss_by_hand(model, rows, one.num_loops), rel=1e-6)
        assert one.perplexity == pytest.approx(math.exp(one.loss))
        assert (one.num_tokens, one.num_rows) == (60, 3)
    assert len({one.loss for one in found}) == 3


def test_a_transformer_has_one_depth_and_refuses_others():
    model = random_model(TRANSFORMER)
    rows = made_rows([9, 17])
    (found,) = evaluate_loss(Scorer(model, num_loops=[1]), rows, batch_tokens=64)
    assert found.loss == pytest.approx(loss_by_hand(model, rows, 1), rel=1e-6)
    with pytest.raises(UserError, match="no loop"):
        Scorer(model, num_loops=[1, 4])


@pytest.mark.parametrize("start", ["zero", "drawn"])
def test_batches_do_not_change_the_number(start):
    scorer = Scorer(random_model(LOOPED), num_loops=[1, 3], start=start)
    rows = made_rows([5, 60, 33, 1, 48, 17, 64])
    few, many, one = (
        [found.loss for found in evaluate_loss(scorer, rows, batch_tokens=size)]
        for size in (100, 1000, 1)
    )
    assert few == pytest.approx(one, rel=1e-6)
    assert many == pytest.approx(one, rel=1e-6)


def two_rank_losses(config, start: str) -> list[float]:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    scorer = Scorer(random_model(config), num_loops=[1, 3], start=start)
    rows = made_rows([5, 60, 33, 1, 48, 17, 64])
    found = evaluate_loss(scorer, rows, batch_tokens=100, ranks=Ranks(rank, world))
    return [one.loss for one in found]


def test_two_ranks_give_the_number_of_one():
    first, second = run_ranks(two_rank_losses, 2, LOOPED, "drawn")
    assert first == second
    scorer = Scorer(random_model(LOOPED), num_loops=[1, 3], start="drawn")
    rows = made_rows([5, 60, 33, 1, 48, 17, 64])
    assert first == pytest.approx(
        [one.loss for one in evaluate_loss(scorer, rows, batch_tokens=4096)], rel=1e-6
    )


def test_drawn_start_states_follow_the_seed_and_nothing_else():
    model, rows = random_model(LOOPED), made_rows([30, 30])

    def loss(**options) -> float:
        scorer = Scorer(model, num_loops=[1], **options)
        return evaluate_loss(scorer, rows, batch_tokens=64)[0].loss

    assert loss(start="drawn", seed=1) == loss(start="drawn", seed=1)
    assert len({loss(start="drawn", seed=1), loss(start="drawn", seed=2), loss()}) == 3


def test_text_is_scored_once_per_byte_of_it(tmp_path: Path):
    texts = ["The sea.", "Été — 海", "x" * 200, ""]
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    rows = text_rows([str(path)], byte_tokenizer(tmp_path / "tokenizer"), 64, "text")
    size = sum(len(text.encode()) for text in texts)
    assert sum(rows.lengths) == rows.text_bytes == size
    assert max(rows.lengths) == 64
    labels = np.concatenate([row.tokens[1:] for row in rows.read(range(len(rows.lengths)))])
    assert bytes((labels - 3).tolist()).decode() == "".join(texts)
    (found,) = evaluate_loss(Scorer(random_model(LOOPED), num_loops=[2]), rows, batch_tokens=128)
    assert found.bits_per_byte == pytest.approx(found.loss / math.log(2))  # a token is a byte


def test_tokens_that_are_no_text_cost_no_bits():
    rows = made_rows([20, 20])
    sizes = np.full(259, 3, np.int64)
    sizes[rows.read([0])[0].tokens[1:].tolist()] = 0  # everything the first row predicts
    rows = dataclasses.replace(rows, bytes_of_token=sizes)
    scorer = Scorer(random_model(LOOPED), num_loops=[1])
    (found,) = evaluate_loss(scorer, rows, batch_tokens=64)
    assert found.num_bytes == 3 * sum(sizes[i] > 0 for i in rows.read([1])[0].tokens[1:])
    assert found.bits_per_byte is not None
    assert found.bits_per_byte < found.loss / math.log(2) * 40 / found.num_bytes


def test_the_table_names_every_depth():
    scorer = Scorer(random_model(LOOPED), num_loops=[1, 12])
    table = loss_table(evaluate_loss(scorer, made_rows([5]), batch_tokens=64))
    assert [line.split()[0] for line in table.splitlines()] == ["T", "1", "12", "5"]


def test_a_tokenizer_that_is_too_large_is_refused():
    rows = dataclasses.replace(made_rows([5]), bytes_of_token=np.ones(300, np.int64))
    with pytest.raises(UserError, match="300 tokens"):
        evaluate_loss(Scorer(random_model(LOOPED), num_loops=[1]), rows, batch_tokens=64)


@pytest.mark.parametrize("depths", [[], [0], [-1, 2]])
def test_depths_below_one_are_refused(depths):
    with pytest.raises(UserError, match="at least 1"):
        Scorer(random_model(LOOPED), num_loops=depths)
