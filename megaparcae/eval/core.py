"""CORE and CORE-Extended of a model: all tasks of a set, several seeds, any depths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megaparcae.data.tokenizer import Tokenizer
from megaparcae.errors import UserError
from megaparcae.eval.bundle import Bundle, Item
from megaparcae.eval.core_tasks import Task
from megaparcae.eval.ranks import Ranks
from megaparcae.eval.results import ResultFile, TaskResult
from megaparcae.eval.scoring import Scorer
from megaparcae.eval.tasks import evaluate_task
from megaparcae.log import logger

SEEDS = (1234, 10_001_234, 20_001_234)
"""An item's examples come from seed + item number: farther apart than any task is long."""


@dataclass(frozen=True, kw_only=True)
class CoreOptions:
    """What to ask, and how."""

    tasks: str = "core"
    """core, extended, bundle (all of core.yaml) or comma-separated labels."""
    seeds: tuple[int, ...] = SEEDS
    max_items: int | None = None
    """Ask this many items of each task, evenly spread; null asks all."""
    batch_tokens: int = 16384


def evaluate_core(
    scorer: Scorer,
    tokenizer: Tokenizer,
    bundle: Bundle,
    options: CoreOptions,
    file: ResultFile,
    ranks: Ranks | None = None,
) -> list[TaskResult]:
    """All results, task by task; what `file` holds already is not measured again.

    A set is measured as far as the bundle has it, and what is missing is said. Raises UserError
    when it has none of it.
    """
    tasks = bundle.tasks(options.tasks)
    missing = bundle.missing(tasks)
    tasks = [task for task in tasks if task.label not in missing]
    if not tasks:
        raise UserError(
            f"--tasks={options.tasks}: {bundle.folder / 'eval_data'} has no file of these tasks, "
            f"such as {missing[0]}; give the complete bundle"
        )
    if missing:
        logger.warning("the bundle lacks %d tasks: %s", len(missing), ", ".join(missing))
    for task in tasks:
        bundle.baseline(task)  # what is wrong with the last task is said before the first
    found = []
    for number, task in enumerate(tasks, 1):
        logger.info("%s (%d of %d)", task.label, number, len(tasks))
        found += _evaluate_seeds(scorer, tokenizer, bundle, task, options, file, ranks)
    return found


def _evaluate_seeds(
    scorer: Scorer,
    tokenizer: Tokenizer,
    bundle: Bundle,
    task: Task,
    options: CoreOptions,
    file: ResultFile,
    ranks: Ranks | None,
) -> list[TaskResult]:
    seeds: Sequence[int | None] = options.seeds if task.num_fewshot else (None,)
    found: list[TaskResult] = []
    items: list[Item] = []
    for seed in seeds:
        done = file.find(task, seed, scorer.num_loops)
        if done is None:
            items = items or bundle.items(task)
            chosen = _spread(len(items), options.max_items)
            answers = evaluate_task(
                scorer,
                tokenizer,
                task,
                items,
                seed=seed or 0,
                batch_tokens=options.batch_tokens,
                chosen=chosen,
                ranks=ranks,
            )
            asked = [items[i] for i in chosen]
            baseline = bundle.baseline(task)
            done = [_result(task, t, seed, asked, right, baseline) for t, right in answers.items()]
            file.add(done)
        found += done
    return found


def _spread(count: int, most: int | None) -> Sequence[int]:
    if most is None or most >= count:
        return range(count)
    return [int(i) for i in np.arange(most) * count // most]


def _result(
    task: Task,
    num_loops: int,
    seed: int | None,
    asked: Sequence[Item],
    right: Sequence[bool],
    baseline: float,
) -> TaskResult:
    accuracy = sum(right) / len(right)
    by_category: dict[str, list[bool]] = {}
    for item, answer in zip(asked, right, strict=True):
        if item.category is not None:
            by_category.setdefault(item.category, []).append(answer)
    return TaskResult(
        task=task.label,
        num_loops=num_loops,
        seed=seed,
        num_items=len(asked),
        accuracy=accuracy,
        baseline=baseline,
        centered=(accuracy - baseline) / (1 - baseline),
        by_category={k: sum(v) / len(v) for k, v in by_category.items()} or None,
    )
