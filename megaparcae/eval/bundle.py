"""A folder with in-context tasks, in the layout of DCLM and the Eval Gauntlet.

core.yaml             icl_tasks: label, dataset_uri, num_fewshot, icl_task_type, ...
eval_data/**.jsonl    the items, one JSON object a line
eval_meta_data.csv    among others `Eval Task` and `Random baseline` (in per cent)
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megaparcae.errors import UserError
from megaparcae.eval.core_tasks import CORE, EXTENDED, KINDS, Kind, Task
from megaparcae.log import logger

GENERATION = ("question_answering", "generation_task_with_answers", "code_evaluation")
"""Kinds of tasks that no part of CORE or of the paper's CORE-Extended has."""


@dataclass(frozen=True)
class Item:
    """One question. The alternatives differ in what is scored (multiple choice) or before it."""

    contexts: tuple[str, ...]
    """One; for a schema one per alternative."""
    answers: tuple[str, ...]
    """One per alternative; one for a schema and for language modelling."""
    gold: int
    """The right alternative."""
    category: str | None = None

    def worked(self, delimiter: str) -> str:
        """The question with its right answer, as an example for others."""
        context = self.contexts[self.gold if len(self.contexts) > 1 else 0]
        return context + delimiter + self.answers[self.gold if len(self.answers) > 1 else 0]


@dataclass(frozen=True)
class Bundle:
    """An opened folder; items are read task by task."""

    folder: Path
    listed: dict[str, Task]
    """The tasks of core.yaml by label."""
    baselines: dict[str, float]
    """Random accuracy by label, between 0 and 1."""

    def tasks(self, which: str) -> list[Task]:
        """Tasks of `core`, `extended`, `bundle` (all of core.yaml) or comma-separated labels.

        A task that core.yaml describes is taken from there. Raises UserError for a label that
        neither core.yaml nor CORE-Extended has.
        """
        known = {task.label: task for task in EXTENDED} | self.listed
        match which:
            case "core":
                labels = [task.label for task in CORE]
            case "extended":
                labels = [task.label for task in EXTENDED]
            case "bundle":
                labels = list(self.listed)
            case _:
                labels = which.split(",")
        unknown = [label for label in labels if label not in known]
        if unknown:
            raise UserError(
                f"--tasks: {unknown[0]!r} is no task of {self.folder / 'core.yaml'} nor of "
                "CORE-Extended; use core, extended, bundle or labels from there"
            )
        return [known[label] for label in labels]

    def path(self, task: Task) -> Path:
        """The task's file."""
        return self.folder / "eval_data" / task.uri

    def missing(self, tasks: Sequence[Task]) -> list[str]:
        """Labels of the tasks whose file is not there."""
        return [task.label for task in tasks if not self.path(task).is_file()]

    def baseline(self, task: Task) -> float:
        """Random accuracy of a task; UserError when the table has none."""
        if task.label not in self.baselines:
            raise UserError(
                f"{self.folder / 'eval_meta_data.csv'} has no random baseline of {task.label}; add "
                "a line for it"
            )
        return self.baselines[task.label]

    def items(self, task: Task) -> list[Item]:
        """All items of a task; UserError for a line that is not one of its kind."""
        found = []
        with self.path(task).open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    found.append(_item(json.loads(line), task.kind))
                except (ValueError, KeyError, TypeError, IndexError) as error:
                    raise UserError(
                        f"{self.path(task)}, line {number}: not an item of a {task.kind} task "
                        f"({type(error).__name__}: {error}); correct icl_task_type or the file"
                    ) from None
        if not found:
            raise UserError(f"{self.path(task)} holds no items; copy the bundle again")
        return found


def open_bundle(folder: str | Path) -> Bundle:
    """Read core.yaml and eval_meta_data.csv; UserError for what is missing or malformed."""
    folder = Path(folder)
    for name in ("core.yaml", "eval_data", "eval_meta_data.csv"):
        if not (folder / name).exists():
            raise UserError(
                f"--core {folder} has no {name}; give the folder of an evaluation bundle "
                "(core.yaml, eval_data/, eval_meta_data.csv)"
            )
    content = yaml.safe_load((folder / "core.yaml").read_text(encoding="utf-8"))
    entries = content.get("icl_tasks") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{folder / 'core.yaml'} has no list icl_tasks; copy the bundle again")
    tasks = [_listed_task(entry, folder / "core.yaml") for entry in entries]
    listed = {task.label: task for task in tasks if task is not None}
    if len(listed) < len(tasks):
        left_out = len(tasks) - len(listed)
        logger.warning("core.yaml: %d tasks are scored by generation and left out", left_out)
    return Bundle(folder, listed, _baselines(folder))


def _listed_task(entry: dict[str, Any], path: Path) -> Task | None:
    """None for a task that is scored by generation."""
    try:
        shots = entry["num_fewshot"]
        if isinstance(shots, list):
            (shots,) = shots
        label, uri, kind = entry["label"], entry["dataset_uri"], entry["icl_task_type"]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: an entry of icl_tasks needs label, dataset_uri, one num_fewshot and "
            f"icl_task_type, but is {entry!r} ({error})"
        ) from None
    if kind in GENERATION:
        return None
    if kind not in KINDS:
        raise UserError(
            f"{path}: {label} has icl_task_type={kind!r}; known are {', '.join(KINDS)}, remove it"
        )
    uri = str(uri).removeprefix("eval_data/").removeprefix("local_data/")
    return Task(str(label), uri, int(shots), kind, str(entry.get("continuation_delimiter", " ")))


def _baselines(folder: Path) -> dict[str, float]:
    path = folder / "eval_meta_data.csv"
    found = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            try:
                label, value = row["Eval Task"], float(row["Random baseline"]) / 100
            except (KeyError, TypeError, ValueError):
                raise UserError(
                    f"{path} needs the columns 'Eval Task' and 'Random baseline' (per cent), but "
                    f"has the line {list(row.values())[:3]}; copy the bundle again"
                ) from None
            if not 0 <= value < 1:
                raise UserError(
                    f"{path}: the random baseline of {label} is {100 * value:g}; it must be in per "
                    "cent, from 0 to below 100"
                )
            found[label] = value
    return found


def _item(entry: dict[str, Any], kind: Kind) -> Item:
    category = entry.get("category")
    match kind:
        case "multiple_choice":
            item = Item((entry["query"],), tuple(entry["choices"]), int(entry["gold"]), category)
            count = len(item.answers)
        case "schema":
            contexts = tuple(entry["context_options"])
            item = Item(contexts, (entry["continuation"],), int(entry["gold"]), category)
            count = len(item.contexts)
        case "language_modeling":
            item = Item((entry["context"].strip(),), (entry["continuation"],), 0, category)
            count = 1
    if not 0 <= item.gold < count:
        raise ValueError(f"gold={item.gold} of {count} alternatives")
    if not all(isinstance(text, str) for text in (*item.contexts, *item.answers)):
        raise TypeError("its texts must be strings")
    return item
