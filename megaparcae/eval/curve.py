"""A run's log.jsonl as a loss curve: for the terminal, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megaparcae.errors import UserError
from megaparcae.log import read_records


@dataclass(frozen=True)
class Curve:
    """Losses in nats per token. A step that was logged twice (a resumed run) counts once."""

    steps: dict[int, float]
    """Training loss by step."""
    validation: dict[int, dict[str, float]]
    """Validation loss by step and number of loops."""

    def final_validation(self) -> tuple[int, dict[str, float]] | None:
        """(step, loss by number of loops) of the last validation."""
        return max(self.validation.items(), default=None, key=lambda item: item[0])


def read_curve(run_dir: Path) -> Curve:
    """Raises UserError when the run has no log or no step yet."""
    path = run_dir / "log.jsonl"
    if not path.is_file():
        raise UserError(f"{path} is missing; give the folder of a run (its checkpoint.dir)")
    records = read_records(path)
    steps = {r["step"]: r["loss"] for r in records if r["kind"] == "step" and r["loss"] is not None}
    if not steps:
        raise UserError(f"{path} has no step with a loss yet; let the run go on for a while")
    validation = {r["step"]: r["loss"] for r in records if r["kind"] == "validation"}
    return Curve(dict(sorted(steps.items())), dict(sorted(validation.items())))


def terminal_chart(curve: Curve, *, width: int = 72, height: int = 14, level: float | None) -> str:
    """The training loss over the steps, as mean per column; `level` becomes a dashed line."""
    steps, losses = np.array(list(curve.steps)), np.array(list(curve.steps.values()))
    columns = np.array_split(losses, min(width, len(losses)))
    means = np.array([column.mean() for column in columns])
    low = float(min(means.min(), np.inf if level is None else level))
    high = float(max(means.max(), -np.inf if level is None else level))
    scale = (height - 1) / max(high - low, 1e-9)

    def row_of(value: float) -> int:
        return round((high - value) * scale)

    grid = [[" "] * len(means) for _ in range(height)]
    if level is not None:
        grid[row_of(level)] = ["╌"] * len(means)
    for x, mean in enumerate(means):
        grid[row_of(float(mean))][x] = "●"
    labels = [f"{high - y / scale:6.2f}" for y in range(height)]
    lines = [f"{label} ┤{''.join(row)}" for label, row in zip(labels, grid, strict=True)]
    first, last = f"step {steps[0]}", str(steps[-1])
    lines.append(" " * 8 + first + last.rjust(max(len(means) - len(first), len(last) + 1)))
    return "\n".join(lines)


def write_picture(curve: Curve, path: Path, *, title: str, level: float | None) -> None:
    """PNG (or SVG, PDF by the name's ending) of training and validation losses."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    axes.plot(list(curve.steps), list(curve.steps.values()), lw=0.7, color="0.6", label="training")
    for loops in _depths(curve):
        points = [(step, loss[loops]) for step, loss in curve.validation.items() if loops in loss]
        axes.plot(*zip(*points, strict=True), marker="o", ms=3, label=f"validation, T={loops}")
    if level is not None:
        axes.axhline(level, ls="--", lw=1, color="k", label="unigram entropy")
    axes.set(xlabel="optimizer step", ylabel="loss in nats per token", title=title)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _depths(curve: Curve) -> Sequence[str]:
    found = {loops for losses in curve.validation.values() for loops in losses}
    return sorted(found, key=int)


def validation_table(curve: Curve, level: float | None) -> str:
    """The last validation beside the unigram entropy."""
    final = curve.final_validation()
    lines = []
    if final is not None:
        step, losses = final
        lines.append(f"validation loss after step {step}, in nats per token")
        lines += [f"  T = {loops:>2}  {losses[loops]:.4f}" for loops in sorted(losses, key=int)]
    if level is not None:
        lines.append(f"unigram entropy of the validation text: {level:.4f} nats per token")
    return "\n".join(lines)
