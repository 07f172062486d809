"""How the speed of a step changes with rows, sequence length, mean loops and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from megaparcae.bench.measure import on_ranks
from megaparcae.bench.options import StepOptions
from megaparcae.bench.runs import step_seconds
from megaparcae.bench.shapes import ALONE, run_config
from megaparcae.config.schema import RunConfig
from megaparcae.engine.distributed import choose_device
from megaparcae.model.flops import expected_flops

BASE = {"rows": 4, "length": 256, "mean": 8}
LABELS = {
    "rows": "rows of a micro-batch",
    "length": "sequence length",
    "mean": "mean loops",
    "ranks": "ranks, one thread each",
}
BLUE, GREY = "#2b6cb0", "#718096"


def scaling(options: StepOptions, shape: Sequence[str]) -> list[dict[str, Any]]:
    """Tokens/s where one thing changes and the others stay at BASE, and the same in FLOP/s, which
    is flat where the cost is linear. All rows run the mean; ranks have one thread each."""
    sweeps = {
        "rows": options.scale_rows,
        "length": options.scale_lengths,
        "mean": options.scale_means,
    }
    points = [(axis, value) for axis, values in sweeps.items() for value in values]
    configs = [configured(options, shape, BASE | {axis: value}) for axis, value in points]
    base = configured(options, shape, BASE)
    device, repeats = base.train.device, options.repeats
    (found,) = on_ranks(step_seconds, 1, configs, repeats, threads=options.threads, device=device)
    table = [
        {"axis": axis, "value": value} | _figures(config, 1, *times)
        for (axis, value), config, times in zip(points, configs, found, strict=True)
    ]
    two = choose_device(device) == "cpu" or torch.cuda.device_count() > 1
    for world in (1, 2) if two else (1,):
        (times,) = on_ranks(step_seconds, world, [base], repeats, threads=1, device=device)[0]
        table.append({"axis": "ranks", "value": world} | _figures(base, world, *times))
    draw(table, Path(options.png))
    return table


def configured(options: StepOptions, shape: Sequence[str], point: dict[str, int]) -> RunConfig:
    """One micro-batch a step."""
    more = [
        f"train.precision={options.dtypes[0]}",
        f"train.micro_batch_size={point['rows']}",
        "train.gradient_accumulation_steps=1",
        *ALONE,
        f"model.sequence_length={point['length']}",
        f"model.recurrence.mean_recurrence={point['mean']}",
        "model.recurrence.backprop_depth=null",
        "model.recurrence.sampler=fixed",
    ]
    return run_config(options, shape, more)


def _figures(config: RunConfig, world: int, seconds: float, spread: float) -> dict[str, Any]:
    rows = config.train.micro_batch_size
    assert rows is not None
    tokens = world * rows * config.model.sequence_length
    return {
        "seconds": seconds,
        "spread": spread,
        "tokens_per_second": tokens / seconds,
        "tflops": tokens * expected_flops(config.model).total / seconds / 1e12,
    }


def draw(table: list[dict[str, Any]], path: Path) -> None:
    """Tokens/s, and FLOP/s as a share of the largest, over each axis."""
    figure = Figure(figsize=(4.2 * len(LABELS), 3.6), layout="constrained")
    for axis, (name, label) in zip(figure.subplots(1, len(LABELS)), LABELS.items(), strict=True):
        rows = [row for row in table if row["axis"] == name]
        values = [row["value"] for row in rows]
        axis.plot(values, [row["tokens_per_second"] for row in rows], "o-", color=BLUE)
        axis.set_xscale("log", base=2)
        axis.set_xticks(values, [str(value) for value in values])
        axis.set_ylim(bottom=0)
        axis.set_xlabel(label)
        axis.set_ylabel("tokens/s", color=BLUE)
        other = axis.twinx()
        other.plot(values, [1e3 * row["tflops"] for row in rows], "s--", color=GREY)
        other.set_ylim(bottom=0)
        other.set_ylabel("GFLOP/s needed", color=GREY)
        axis.spines[["top"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
