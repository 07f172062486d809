"""From an item to token rows: worked examples, the question, and which tokens are scored."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from megaparcae.data.tokenizer import Tokenizer
from megaparcae.errors import UserError
from megaparcae.eval.bundle import Item
from megaparcae.eval.core_tasks import Task

SEPARATOR = "\n\n"
"""Between an example and what follows."""


@dataclass(frozen=True)
class Alternative:
    """One way to complete an item: tokens[begin:] are scored, each from the tokens before it."""

    tokens: tuple[int, ...]
    begin: int


def draw_examples(index: int, num_items: int, count: int, seed: int) -> list[int]:
    """`count` other items than `index`, a pure function of (seed, index)."""
    # random.sample on the list without the item itself gives the same numbers
    drawn = random.Random(seed + index).sample(range(num_items - 1), count)
    return [i + (i >= index) for i in drawn]


def check_examples(task: Task, num_items: int) -> None:
    """UserError when a task has too few items to draw its examples from."""
    if task.num_fewshot >= num_items:
        raise UserError(
            f"{task.label} draws {task.num_fewshot} examples for each item, but it has {num_items} "
            "items; lower its num_fewshot in core.yaml or give the complete file"
        )


class Prompter:
    """Renders and tokenizes the items of one task.

    An example is context + delimiter + answer, followed by a blank line; every row begins with BOS.
    Scored is: for multiple choice what follows the tokens that all alternatives share; for a schema
    the tokens that all alternatives end with; for language modelling what the answer adds to the
    tokens of the prompt. At least one token of every alternative is scored. A row longer than
    `max_length` loses its beginning.
    """

    def __init__(self, task: Task, tokenizer: Tokenizer, *, max_length: int) -> None:
        self.task = task
        self.tokenizer = tokenizer
        self.max_length = max_length
        start = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
        self.opening = [] if start is None else [start]

    def alternatives(self, item: Item, examples: Sequence[Item]) -> list[Alternative]:
        """The item's rows: one per alternative."""
        shots = "".join(one.worked(self.task.delimiter) + SEPARATOR for one in examples)
        texts = [
            shots + context + self.task.delimiter + answer
            for context in item.contexts
            for answer in item.answers
        ]
        rows = [self._encode(text) for text in texts]
        match self.task.kind:
            case "multiple_choice":
                # an alternative that another one continues still needs a token of its own
                begins = [min(shared_start(rows), min(map(len, rows)) - 1)] * len(rows)
            case "schema":
                shared = shared_start([row[::-1] for row in rows])
                begins = [len(row) - shared for row in rows]
            case "language_modeling":
                # the blank before an answer belongs to the answer's first token
                prompt = self._encode((shots + item.contexts[0] + self.task.delimiter).rstrip())
                begins = [shared_start([rows[0], prompt])]
        return [self._cut(row, begin) for row, begin in zip(rows, begins, strict=True)]

    def _encode(self, text: str) -> list[int]:
        return self.opening + self.tokenizer.encode(text)

    def _cut(self, row: list[int], begin: int) -> Alternative:
        """At least one token scored, each with at least one before it, and no more than fit."""
        surplus = max(0, len(row) - self.max_length - 1)  # the last token is a target only
        begin = min(begin, len(row) - 1) - surplus
        return Alternative(tuple(row[surplus:]), max(begin, 1))


def shared_start(rows: Sequence[Sequence[int]]) -> int:
    """Number of tokens that all rows begin with."""
    columns = zip(*rows, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
