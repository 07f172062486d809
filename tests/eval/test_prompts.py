"""What a model is shown and which tokens count, for each kind of task."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tiny_models import byte_tokenizer

from megaparcae.errors import UserError
from megaparcae.eval.bundle import Item
from megaparcae.eval.core_tasks import CORE, EXTENDED, Task
from megaparcae.eval.prompts import Alternative, Prompter, check_examples, draw_examples

MC = Item(("Cats",), ("purr", "purple", "bark"), 0)
SCHEMA = Item(("The dog", "A cat"), ("barks",), 0)
LM = Item(("One two",), ("three",), 0)


def shown(alternative: Alternative) -> tuple[str, str]:
    """(what is before the scored characters, the scored characters); BOS is ^."""
    text = "".join("^" if i == 0 else chr(i - 3) for i in alternative.tokens)
    return text[: alternative.begin], text[alternative.begin :]


def prompter(folder: Path, kind: str, delimiter: str = " ", max_length: int = 100) -> Prompter:
    task = Task("made", "made.jsonl", 0, kind, delimiter)
    return Prompter(task, byte_tokenizer(folder), max_length=max_length)


def test_multiple_choice_scores_what_follows_the_common_start(tmp_path):
    found = prompter(tmp_path, "multiple_choice", "\nAnswer: ").alternatives(MC, [])
    assert [shown(one) for one in found] == [
        ("^Cats\nAnswer: ", "purr"),
        ("^Cats\nAnswer: ", "purple"),
        ("^Cats\nAnswer: ", "bark"),
    ]


def test_alternatives_that_start_alike_are_scored_from_where_they_part(tmp_path):
    item = Item(("Cats",), ("purr", "purple"), 0)
    found = prompter(tmp_path, "multiple_choice").alternatives(item, [])
    assert [shown(one) for one in found] == [("^Cats pur", "r"), ("^Cats pur", "ple")]


def test_an_alternative_that_another_continues_keeps_a_scored_token(tmp_path):
    item = Item(("Cats",), ("purr", "purrs"), 0)
    found = prompter(tmp_path, "multiple_choice").alternatives(item, [])
    assert [shown(one) for one in found] == [("^Cats pur", "r"), ("^Cats pur", "rs")]


def test_a_schema_scores_the_common_end(tmp_path):
    found = prompter(tmp_path, "schema").alternatives(SCHEMA, [])
    assert [shown(one) for one in found] == [("^The dog", " barks"), ("^A cat", " barks")]


def test_language_modelling_scores_the_answer_with_its_blank(tmp_path):
    (found,) = prompter(tmp_path, "language_modeling").alternatives(LM, [])
    assert shown(found) == ("^One two", " three")


@pytest.mark.parametrize(
    "kind, item, start",
    [
        ("multiple_choice", MC, "^Cats: purr\n\nCats: purr\n\nCats: "),
        ("schema", SCHEMA, "^The dog: barks\n\nThe dog: barks\n\nThe dog"),
        ("language_modeling", LM, "^One two: three\n\nOne two: three\n\nOne two:"),
    ],
)
def test_examples_stand_before_the_question_with_their_right_answers(tmp_path, kind, item, start):
    found = prompter(tmp_path, kind, ": ").alternatives(item, [item, item])
    assert shown(found[0])[0] == start


def test_a_row_that_is_too_long_loses_its_beginning(tmp_path):
    found = prompter(tmp_path, "multiple_choice", max_length=10).alternatives(MC, [MC])
    assert [shown(one) for one in found] == [
        ("\n\nCats ", "purr"),
        ("Cats ", "purple"),
        ("\n\nCats ", "bark"),
    ]
    (long,) = prompter(tmp_path, "language_modeling", max_length=3).alternatives(LM, [])
    assert shown(long) == ("h", "ree")


def test_examples_are_other_items_and_depend_on_seed_and_item_only():
    for index in range(6):
        drawn = draw_examples(index, 6, 5, seed=1)
        assert sorted([*drawn, index]) == list(range(6))
        others = [i for i in range(6) if i != index]
        assert drawn == random.Random(1 + index).sample(others, 5)
    assert draw_examples(3, 1000, 5, 1) != draw_examples(3, 1000, 5, 2)


def test_too_few_items_for_the_examples_are_refused():
    task = Task("few", "few.jsonl", 10, "schema")
    check_examples(task, 11)
    with pytest.raises(UserError, match="few draws 10 examples"):
        check_examples(task, 10)


def test_the_sets_have_the_tasks_of_the_paper():
    assert len({task.label for task in CORE}) == len(CORE) == 22
    assert len({task.label for task in EXTENDED}) == len(EXTENDED) == 46
    assert set(CORE) < set(EXTENDED)
    assert sum(task.label.startswith("bigbench_") for task in EXTENDED) == 15
