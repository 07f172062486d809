"""Results of in-context tasks: on disk as soon as a task is done, and what they add up to."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megaparcae.errors import UserError
from megaparcae.eval.core_tasks import CORE, EXTENDED, Task
from megaparcae.eval.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """One task at one depth with one seed."""

    task: str
    num_loops: int
    seed: int | None
    """Of the examples; null when the task has none, so that every seed gives the same."""
    num_items: int
    accuracy: float
    baseline: float
    centered: float
    """(accuracy - baseline) / (1 - baseline)."""
    by_category: dict[str, float] | None = None
    """Accuracy by category, where the items have one."""


class ResultFile:
    """A .jsonl: what was measured on (first line), then a TaskResult per line.

    Rank 0 reads and writes. Raises UserError for a file of another model or other settings.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, object], ranks: Ranks) -> None:
        self.path = path
        self.ranks = ranks
        problems: list[str] = []
        found: list[TaskResult] = []
        if path is not None and ranks.index == 0:
            try:
                found = _open(path, json.loads(json.dumps(settings)))
            except UserError as error:
                problems.append(str(error))
        for problem in ranks.gather(problems):
            raise UserError(problem)
        self.results = ranks.gather(found)

    def find(
        self, task: Task, seed: int | None, num_loops: Iterable[int]
    ) -> list[TaskResult] | None:
        """The finished results of a task at all these depths, else None."""
        done = {r.num_loops: r for r in self.results if (r.task, r.seed) == (task.label, seed)}
        return [done[t] for t in num_loops] if set(num_loops) <= set(done) else None

    def add(self, results: Sequence[TaskResult]) -> None:
        """Remember and write."""
        self.results += results
        if self.path is not None and self.ranks.index == 0:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(one)) + "\n" for one in results)


def _open(path: Path, settings: Mapping[str, object]) -> list[TaskResult]:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"settings": settings}) + "\n", encoding="utf-8")
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    try:
        written = json.loads(lines[0])["settings"]
        # the last line of a run that was killed may be half a line
        found = [TaskResult(**json.loads(line)) for line in lines[1:-1]]
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"--results {path} is not a file of results; choose another name or remove it"
        ) from None
    for name, value in settings.items():
        if written.get(name) != value:
            raise UserError(
                f"--results {path} was measured with {name}={written.get(name)!r}, not {value!r}; "
                "choose another file for other settings"
            )
    if lines[-1]:
        path.write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")
    return found


@dataclass(frozen=True, kw_only=True)
class Score:
    """The mean of the centred accuracies of a set of tasks at one depth."""

    name: str
    num_loops: int
    num_tasks: int
    mean: float
    """Over the seeds."""
    spread: float | None
    """Sample standard deviation over the seeds; null with one seed."""
    by_seed: dict[int, float]


def scores(results: Sequence[TaskResult], seeds: Sequence[int]) -> list[Score]:
    """CORE and CORE-Extended where all their tasks are there, else the mean of what is there."""
    found = []
    sets = {"CORE": CORE, "CORE-Extended": EXTENDED}
    measured = {result.task for result in results}
    complete = {
        name: labels
        for name, tasks in sets.items()
        if (labels := {task.label for task in tasks}) <= measured
    }
    if measured not in complete.values():
        complete[f"mean of {len(measured)} tasks"] = measured
    for loops in sorted({result.num_loops for result in results}):
        at_depth = [result for result in results if result.num_loops == loops]
        for name, labels in complete.items():
            found.append(_score(name, loops, [r for r in at_depth if r.task in labels], seeds))
    return found


def _score(name: str, loops: int, results: Sequence[TaskResult], seeds: Sequence[int]) -> Score:
    by_seed = {}
    for seed in seeds:
        values = [r.centered for r in results if r.seed in (None, seed)]
        by_seed[seed] = math.fsum(values) / len(values)
    values = list(by_seed.values())
    return Score(
        name=name,
        num_loops=loops,
        num_tasks=len({r.task for r in results}),
        mean=statistics.fmean(values),
        spread=statistics.stdev(values) if len(values) > 1 else None,
        by_seed=by_seed,
    )


def result_table(results: Sequence[TaskResult], seeds: Sequence[int]) -> str:
    """For the terminal: every task, then the sets, in per cent; ± is the spread over the seeds."""
    lines = [f"{'task':<34} {'T':>4} {'items':>6} {'accuracy':>14} {'centred':>14}"]
    keys = dict.fromkeys((r.num_loops, r.task) for r in results)
    for loops, task in keys:
        some = [r for r in results if (r.num_loops, r.task) == (loops, task)]
        accuracy = percent([r.accuracy for r in some])
        centered = percent([r.centered for r in some])
        lines.append(f"{task:<34} {loops:>4} {some[0].num_items:>6} {accuracy:>14} {centered:>14}")
    for one in scores(results, seeds):
        value = percent(list(one.by_seed.values()))
        lines.append(f"{one.name:<34} {one.num_loops:>4} {'':>6} {'':>14} {value:>14}")
    return "\n".join(lines)


def percent(values: Sequence[float]) -> str:
    """Mean and sample standard deviation in per cent."""
    mean = f"{100 * statistics.fmean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ± {100 * statistics.stdev(values):.2f}"
