"""The accuracy of a model on one in-context task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megaparcae.data.tokenizer import Tokenizer
from megaparcae.eval.batching import by_length, reported
from megaparcae.eval.bundle import Item
from megaparcae.eval.core_tasks import Kind, Task
from megaparcae.eval.prompts import Prompter, check_examples, draw_examples
from megaparcae.eval.ranks import Ranks
from megaparcae.eval.scoring import Scorer, Scores
from megaparcae.eval.tree import PackedRow, make_batch, pack_item

ITEMS_AT_ONCE = 512
"""Items that are tokenized, sorted by length and scored together."""


@dataclass(frozen=True)
class Verdict:
    """What one alternative of an item scored at one depth."""

    num_loops: int
    item: int
    alternative: int
    loss: float
    """Mean -log p of its scored tokens, in nats."""
    greedy: bool
    """Every scored token was the likeliest."""


def evaluate_task(
    scorer: Scorer,
    tokenizer: Tokenizer,
    task: Task,
    items: Sequence[Item],
    *,
    seed: int,
    batch_tokens: int,
    chosen: Sequence[int] | None = None,
    ranks: Ranks | None = None,
) -> dict[int, list[bool]]:
    """Whether each item was answered right, by number of loops; equal on every rank.

    `chosen` are the items to ask, all by default; examples are drawn from all of them.
    """
    ranks = ranks or Ranks()
    check_examples(task, len(items))
    chosen = range(len(items)) if chosen is None else chosen
    prompter = Prompter(task, tokenizer, max_length=scorer.config.sequence_length)
    verdicts: list[Verdict] = []
    mine = ranks.share(chosen)
    pieces = [mine[begin : begin + ITEMS_AT_ONCE] for begin in range(0, len(mine), ITEMS_AT_ONCE)]
    for piece in reported(pieces, len(pieces), task.label):
        rows = [row for i in piece for row in _rows(prompter, items, i, seed)]
        for numbers in by_length([len(row.tokens) for row in rows], batch_tokens):
            verdicts += _judge(scorer, [rows[number] for number in numbers])
    verdicts = ranks.gather(verdicts)
    return {
        loops: _answers(task.kind, items, chosen, [v for v in verdicts if v.num_loops == loops])
        for loops in scorer.num_loops
    }


def _rows(prompter: Prompter, items: Sequence[Item], index: int, seed: int) -> list[PackedRow]:
    drawn = draw_examples(index, len(items), prompter.task.num_fewshot, seed)
    return pack_item(index, prompter.alternatives(items[index], [items[i] for i in drawn]))


def _judge(scorer: Scorer, rows: Sequence[PackedRow]) -> list[Verdict]:
    found = []
    borders = np.cumsum([0, *(len(row.target_ids) for row in rows)])
    for loops, scores in scorer.score(make_batch(rows, scorer.device)).items():
        for row, begin in zip(rows, borders, strict=False):
            part = slice(begin, begin + len(row.target_ids))
            own = Scores(scores.losses[part], scores.hits[part])
            found += _verdicts(loops, row, own)
    return found


def _verdicts(loops: int, row: PackedRow, scores: Scores) -> list[Verdict]:
    found = []
    for alternative in row.alternatives:
        mine = row.target_owners == alternative
        loss, greedy = float(scores.losses[mine].mean()), bool(scores.hits[mine].all())
        found.append(Verdict(loops, row.item, alternative, loss, greedy))
    return found


def _answers(
    kind: Kind, items: Sequence[Item], chosen: Sequence[int], verdicts: Sequence[Verdict]
) -> list[bool]:
    """Language modelling: greedy match. Otherwise the lowest mean loss; a tie goes to the first."""
    if kind == "language_modeling":
        greedy = {verdict.item: verdict.greedy for verdict in verdicts}
        return [greedy[i] for i in chosen]
    best: dict[int, tuple[float, int]] = {}
    for verdict in verdicts:
        claim = (verdict.loss, verdict.alternative)
        best[verdict.item] = min(best.get(verdict.item, claim), claim)
    return [best[i][1] == items[i].gold for i in chosen]
