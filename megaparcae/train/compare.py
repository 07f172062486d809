"""How far two runs are apart: loss and gradient norm of each step, and every parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from megaparcae.checkpoint.model_tensors import read_model_tensors
from megaparcae.errors import UserError
from megaparcae.log import read_records

SERIES = ("loss", "grad_norm")
"""Figures of log.jsonl that do not depend on the layout."""


@dataclass(frozen=True)
class Difference:
    """The largest difference of one quantity, relative to the second run."""

    name: str
    largest: float
    """|a - b| / |b| of a number, ||a - b|| / ||b|| of a tensor; NaN counts as infinitely far."""
    where: str
    """The step of a series, the shape of a tensor."""


def compare_series(name: str, a: Mapping[int, float], b: Mapping[int, float]) -> Difference:
    """Step -> value of both runs, over the steps that both have."""
    apart = {step: _relative(abs(a[step] - b[step]), abs(b[step])) for step in a if step in b}
    step = max(apart, key=apart.__getitem__)
    return Difference(name, apart[step], f"step {step}")


def compare_tensors(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[Difference]:
    """Every parameter, the furthest first. Raises UserError when names or shapes differ."""
    if a.keys() != b.keys():
        raise UserError(
            f"the runs have different parameters, such as {min(a.keys() ^ b.keys())}; "
            "compare runs of one model"
        )
    found = [_compare_tensor(name, a[name], b[name]) for name in a]
    return sorted(found, key=lambda difference: -difference.largest)


def _compare_tensor(name: str, a: Tensor, b: Tensor) -> Difference:
    if a.shape != b.shape:
        raise UserError(
            f"{name} is {tuple(a.shape)} in one run and {tuple(b.shape)} in the other; "
            "compare runs of one model"
        )
    apart = _relative(float((a.double() - b.double()).norm()), float(b.double().norm()))
    return Difference(name, apart, " x ".join(map(str, a.shape)))


def _relative(apart: float, size: float) -> float:
    if apart == 0:
        return 0.0
    return apart / size if size and math.isfinite(apart / size) else math.inf


def compare_runs(first: Path, second: Path, step: int | None = None) -> list[Difference]:
    """Loss and gradient norm over all common steps, and the parameters at `step`.

    `step` None takes the last one that both runs have saved. Raises UserError when there is none.
    """
    saved = [{int(path.parent.name[5:]) for path in _checkpoints(run)} for run in (first, second)]
    common = saved[0] & saved[1]
    step = max(common, default=None) if step is None else step
    if step is None or step not in common:
        wanted = "" if step is None else f"of step {step} "
        raise UserError(
            f"{first} and {second} have no checkpoint {wanted}in common: they hold steps "
            f"{sorted(saved[0])} and {sorted(saved[1])}; use the same checkpoint.interval"
        )
    logs = [read_steps(run) for run in (first, second)]
    names = [name for name in SERIES if all(log.get(name) for log in logs)]
    if not names or not logs[0][names[0]].keys() & logs[1][names[0]].keys():
        raise UserError(f"{first} and {second} have no logged step in common; compare longer runs")
    series = [compare_series(name, logs[0][name], logs[1][name]) for name in names]
    folders = [run / f"step_{step:08d}" for run in (first, second)]
    a, b = (read_model_tensors(folder) for folder in folders)
    return series + compare_tensors(a, b)


def _checkpoints(run: Path) -> Sequence[Path]:
    if not run.is_dir():
        raise UserError(f"{run} is not a folder; name the checkpoint.dir of a run")
    return sorted(run.glob("step_[0-9]*/.metadata"))


def read_steps(run: Path) -> dict[str, dict[int, float]]:
    """Name -> step -> value from log.jsonl; of a step that was run again, the last. null is NaN."""
    path = run / "log.jsonl"
    if not path.is_file():
        raise UserError(f"{run} has no log.jsonl; name the checkpoint.dir of a run")
    series: dict[str, dict[int, float]] = {name: {} for name in SERIES}
    for record in read_records(path):
        if record["kind"] == "step":
            for name in SERIES:
                value = record.get(name)
                series[name][record["step"]] = math.nan if value is None else value
    return series
