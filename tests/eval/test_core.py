"""Bundles with planted answers: the score is the one computed by hand, for each kind of task."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from bundles import Imitator, bigram_model, write_bundle
from tiny_models import byte_tokenizer

from harness import run_ranks
from megaparcae.errors import UserError
from megaparcae.eval.bundle import open_bundle
from megaparcae.eval.core import CoreOptions, evaluate_core
from megaparcae.eval.core_tasks import CORE, EXTENDED
from megaparcae.eval.prompts import draw_examples
from megaparcae.eval.ranks import Ranks
from megaparcae.eval.results import ResultFile, TaskResult, result_table, scores
from megaparcae.eval.scoring import Scorer

ALONE = Ranks()
SEEDS = (1, 2, 3)

# After "a" the planted model expects "b", then "c", and so on round to "e".
LIKELY = "abcde: ab"
MC_ITEMS = [
    {"query": "xa", "choices": ["bcd", "cbd", "dcb"], "gold": 0},  # right
    {"query": "xb", "choices": ["bbb", "cde"], "gold": 1},  # right
    {"query": "xc", "choices": ["de", "ed"], "gold": 1},  # wrong
    {"query": "xd", "choices": ["ab", "e: "], "gold": 1},  # right
]
SCHEMA_ITEMS = [
    {"context_options": ["xa", "xd"], "continuation": "bcd", "gold": 0},  # right
    {"context_options": ["xa", "xb"], "continuation": "cde", "gold": 0},  # wrong
]
LM_ITEMS = [
    {"context": "xa ", "continuation": "bcde"},  # right
    {"context": "xa", "continuation": "bcda"},  # wrong: one character
    {"context": " xc", "continuation": "de"},  # right
    {"context": "xe", "continuation": "a"},  # wrong
    {"context": "xb", "continuation": "c"},  # right
]
TASKS = [
    {"label": "choice", "icl_task_type": "multiple_choice", "baseline": 37.5},
    {"label": "schema", "icl_task_type": "schema", "baseline": 50},
    {"label": "words", "icl_task_type": "language_modeling", "baseline": 0},
]
ITEMS = {"choice": MC_ITEMS, "schema": SCHEMA_ITEMS, "words": LM_ITEMS}
ACCURACY = {"choice": 3 / 4, "schema": 1 / 2, "words": 3 / 5}
CENTERED = {"choice": (0.75 - 0.375) / 0.625, "schema": 0.0, "words": 0.6}


def planted_bundle(folder: Path, num_fewshot: int) -> Path:
    more = {"num_fewshot": [num_fewshot], "continuation_delimiter": ""}
    return write_bundle(folder / "bundle", [{**task, **more} for task in TASKS], ITEMS)


def run(folder: Path, scorer, path: Path | None = None, ranks=ALONE, **options):
    file = ResultFile(path, {"model": "planted"}, ranks)
    options = CoreOptions(**{"tasks": "bundle", "seeds": SEEDS, "batch_tokens": 64, **options})
    bundle, tokenizer = open_bundle(folder / "bundle"), byte_tokenizer(folder / "tokenizer")
    return evaluate_core(scorer, tokenizer, bundle, options, file, ranks)


@pytest.mark.parametrize("num_fewshot", [0, 1])
def test_planted_answers_give_the_score_computed_by_hand(tmp_path, num_fewshot):
    planted_bundle(tmp_path, num_fewshot)
    found = run(tmp_path, Scorer(bigram_model(LIKELY), num_loops=[1, 4]))
    assert len(found) == 3 * 2 * (3 if num_fewshot else 1)
    for one in found:
        assert one.accuracy == pytest.approx(ACCURACY[one.task], abs=1e-12), one
        assert one.centered == pytest.approx(CENTERED[one.task], abs=1e-12), one
    total = (CENTERED["choice"] + CENTERED["schema"] + CENTERED["words"]) / 3
    for score in scores(found, SEEDS):
        assert (score.name, score.num_tasks) == ("mean of 3 tasks", 3)
        assert score.mean == pytest.approx(total)
        assert score.spread == pytest.approx(0)


ANIMALS = {"cat": "purr", "dog": "bark", "cow": "mooo"}
KIND_ITEMS = {
    "multiple_choice": lambda a, gold: {
        "query": f"The {a} says",
        "choices": [ANIMALS[a], "zzzz"] if gold == 0 else ["zzzz", ANIMALS[a]],
        "gold": gold,
    },
    "language_modeling": lambda a, gold: {"context": f"The {a} says", "continuation": ANIMALS[a]},
    "schema": lambda a, gold: {
        "context_options": [f"{a} says", "z"] if gold == 0 else ["z", f"{a} says"],
        "continuation": ANIMALS[a],
        "gold": gold,
    },
}


@pytest.mark.parametrize("kind", KIND_ITEMS)
def test_examples_help_exactly_where_they_show_the_answer(tmp_path, kind):
    """The imitator is right where an example shows the same animal; else it takes the first.

    In a schema the delimiter is scored too, and any example shows it behind "says".
    """
    asked = [(animal, i % 2) for i, animal in enumerate([*ANIMALS, *ANIMALS, "cat", "cat"])]
    items = {"animals": [KIND_ITEMS[kind](animal, gold) for animal, gold in asked]}
    for shots in (0, 3):
        folder = tmp_path / str(shots)
        task = {"label": "animals", "icl_task_type": kind, "num_fewshot": [shots]}
        write_bundle(folder / "bundle", [{**task, "continuation_delimiter": " -> "}], items)
        found = run(folder, Imitator())
        for one in found:
            right = 0
            for index, (animal, gold) in enumerate(asked):
                drawn = draw_examples(index, len(asked), shots, one.seed or 0)
                shown = animal in [asked[i][0] for i in drawn] or (drawn and kind == "schema")
                right += bool(shown or (gold == 0 and kind != "language_modeling"))
            assert one.accuracy == right / len(asked), one
        assert len({one.seed for one in found}) == (3 if shots else 1)


def two_ranks(folder: Path) -> list[TaskResult]:
    import torch

    ranks = Ranks(torch.distributed.get_rank(), 2)
    scorer = Scorer(bigram_model(LIKELY), num_loops=[1, 4])
    return run(folder, scorer, folder / "two.jsonl", ranks)


def test_two_ranks_give_the_results_of_one_and_write_them_once(tmp_path):
    planted_bundle(tmp_path, 1)
    first, second = run_ranks(two_ranks, 2, tmp_path)
    alone = run(tmp_path, Scorer(bigram_model(LIKELY), num_loops=[1, 4]))
    assert first == second == alone
    assert len((tmp_path / "two.jsonl").read_text().splitlines()) == 1 + len(alone)


def test_an_interrupted_evaluation_goes_on_where_it_was(tmp_path):
    planted_bundle(tmp_path, 1)
    path = tmp_path / "results.jsonl"
    scorer = Scorer(bigram_model(LIKELY), num_loops=[2])
    whole = run(tmp_path, scorer, path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:5]) + lines[5][:20])  # killed while writing a line

    calls = []

    class Counting(Scorer):
        def score(self, batch):
            calls.append(1)
            return super().score(batch)

    assert run(tmp_path, Counting(bigram_model(LIKELY), num_loops=[2]), path) == whole
    assert path.read_text() == "".join(lines)
    assert calls
    calls.clear()
    assert run(tmp_path, Counting(bigram_model(LIKELY), num_loops=[2]), path) == whole
    assert not calls


def test_results_of_another_model_are_not_mixed_in(tmp_path):
    path = tmp_path / "results.jsonl"
    ResultFile(path, {"model": "one"}, ALONE)
    with pytest.raises(UserError, match="model='one'"):
        ResultFile(path, {"model": "two"}, ALONE)
    path.write_text("nothing of ours\n")
    with pytest.raises(UserError, match="not a file of results"):
        ResultFile(path, {"model": "two"}, ALONE)


def made_result(label: str, seed: int | None, centered: float) -> TaskResult:
    return TaskResult(
        task=label,
        num_loops=4,
        seed=seed,
        num_items=10,
        accuracy=centered,
        baseline=0,
        centered=centered,
    )


def test_core_is_the_mean_of_its_tasks_with_the_spread_over_the_seeds():
    rows = []
    for task in EXTENDED:
        seeds = SEEDS if task.num_fewshot else (None,)
        inside = task in CORE
        rows += [
            made_result(task.label, s, (0.3 if inside else 0.1) + (s or 0) / 100) for s in seeds
        ]
    core, extended = scores(rows, SEEDS)
    few = sum(task.num_fewshot > 0 for task in CORE)
    by_seed = [0.3 + few / 22 * s / 100 for s in SEEDS]
    assert (core.name, core.num_tasks, extended.name, extended.num_tasks) == (
        "CORE",
        22,
        "CORE-Extended",
        46,
    )
    assert core.mean == pytest.approx(statistics.fmean(by_seed))
    assert core.spread == pytest.approx(statistics.stdev(by_seed))
    assert "CORE-Extended" in result_table(rows, SEEDS)


def test_an_incomplete_set_is_not_called_core():
    rows = [made_result(task.label, None, 0.5) for task in CORE[:-1]]
    (score,) = scores(rows, SEEDS)
    assert score.name == "mean of 21 tasks"


def test_fewer_items_are_spread_over_the_file(tmp_path):
    planted_bundle(tmp_path, 1)
    found = run(tmp_path, Scorer(bigram_model(LIKELY), num_loops=[1]), tasks="choice", max_items=2)
    assert {(one.num_items, one.accuracy) for one in found} == {(2, 0.5)}  # items 0 and 2


def test_categories_are_counted_apart(tmp_path):
    items = [{**item, "category": "ab"[i % 2]} for i, item in enumerate(LM_ITEMS)]
    task = {"label": "words", "icl_task_type": "language_modeling", "num_fewshot": 0}
    write_bundle(tmp_path / "bundle", [{**task, "continuation_delimiter": ""}], {"words": items})
    (found,) = run(tmp_path, Scorer(bigram_model(LIKELY), num_loops=[1]))
    assert found.by_category == {"a": 1.0, "b": 0.0}


def test_tasks_come_from_core_yaml_first_and_then_from_the_known_sets(tmp_path):
    task = {"label": "copa", "icl_task_type": "schema", "num_fewshot": [2], "baseline": 50}
    bundle = open_bundle(write_bundle(tmp_path, [task], {"copa": SCHEMA_ITEMS}))
    by_label = {one.label: one for one in bundle.tasks("core")}
    assert (by_label["copa"].kind, by_label["copa"].num_fewshot) == ("schema", 2)
    assert by_label["boolq"].delimiter == "\nAnswer: "
    assert len(bundle.missing(bundle.tasks("extended"))) == 45
    with pytest.raises(UserError, match="'nothing' is no task"):
        bundle.tasks("copa,nothing")


BROKEN = {
    "gold outside": ({"query": "q", "choices": ["a"], "gold": 1}, "line 1: .*gold=1"),
    "no gold": ({"query": "q", "choices": ["a"]}, "KeyError: 'gold'"),
    "numbers": ({"query": "q", "choices": [1, 2], "gold": 1}, "must be strings"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_item_is_named(tmp_path, name):
    item, message = BROKEN[name]
    task = {"label": "broken", "icl_task_type": "multiple_choice", "num_fewshot": [0]}
    write_bundle(tmp_path / "bundle", [task], {"broken": [item]})
    with pytest.raises(UserError, match=message):
        run(tmp_path, Imitator())


def test_a_folder_that_is_no_bundle_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no core.yaml"):
        open_bundle(tmp_path)


def test_a_task_without_baseline_is_refused_before_anything_is_measured(tmp_path):
    planted_bundle(tmp_path, 0)
    path = tmp_path / "bundle" / "eval_meta_data.csv"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(UserError, match="no random baseline of words"):
        run(tmp_path, Imitator())


def test_generation_tasks_are_left_out_and_unknown_kinds_refused(tmp_path):
    kinds = ["question_answering", "schema"]
    tasks = [{"label": k, "icl_task_type": k, "num_fewshot": [0]} for k in kinds]
    items = dict.fromkeys(kinds, SCHEMA_ITEMS)
    bundle = open_bundle(write_bundle(tmp_path, tasks, items))
    assert [task.label for task in bundle.tasks("bundle")] == ["schema"]
    tasks[0]["icl_task_type"] = "poetry"
    with pytest.raises(UserError, match="poetry"):
        open_bundle(write_bundle(tmp_path, tasks, items))


def test_the_file_of_results_is_readable_json(tmp_path):
    planted_bundle(tmp_path, 0)
    run(tmp_path, Imitator(), tmp_path / "deep" / "results.jsonl")
    lines = (tmp_path / "deep" / "results.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {"settings": {"model": "planted"}}
    assert {json.loads(line)["task"] for line in lines[1:]} == set(ACCURACY)
