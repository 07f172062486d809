"""The training step with finished rows that drop out, against the same step with masked rows."""

from __future__ import annotations

import statistics
from typing import Any

from megaparcae.bench.ceilings import ceilings
from megaparcae.bench.comparison import MASKED, OURS, compare
from megaparcae.bench.loop_work import NARROW, loop_work
from megaparcae.bench.loss import loss_costs
from megaparcae.bench.measure import on_ranks
from megaparcae.bench.options import StepOptions
from megaparcae.bench.report import Report
from megaparcae.bench.scaling import scaling
from megaparcae.bench.shapes import ALONE, run_config
from megaparcae.config.schema import RunConfig
from megaparcae.errors import UserError

SHAPE = (
    "model.hidden_size=256",
    "model.intermediate_size=1024",
    "model.num_heads=4",
    "model.num_prelude_layers=4",
    "model.num_core_layers=4",
    "model.num_coda_layers=4",
    "model.vocab_size=8192",
    "model.sequence_length=512",
    "model.init=scaled",
    "validation.interval=0",
)


def run(options: StepOptions) -> Report:
    """The tables of the parts that were asked for."""
    tables: dict[str, list[dict[str, Any]]] = {}
    base = run_config(options, SHAPE)
    if base.model.architecture != "looped":
        raise UserError(
            f"model.architecture={base.model.architecture}: suite step is about the loop; give a "
            "looped model"
        )
    place: Any = {"threads": options.threads, "device": base.train.device}
    if {"step", "scaling"} & set(options.parts):
        (tables["ceilings"],) = on_ranks(ceilings, 1, options.dtypes, options.repeats, **place)
    ceiling = {row["what"]: row.get("tflops", 0.0) for row in tables.get("ceilings", [])}
    if "step" in options.parts:
        tables["step"] = [
            row
            for dtype in options.dtypes
            for mean in options.means
            for rows in options.rows
            for row in step_rows(options, dtype, mean, rows, ceiling[f"product, {dtype}"])
        ]
    if "loss" in options.parts:
        (tables["loss"],) = on_ranks(loss_costs, 1, base.model, options, **place)
    if "work" in options.parts:
        (tables["work"],) = on_ranks(
            loop_work, 1, run_config(options, SHAPE, NARROW), options.work_steps, **place
        )
    if "scaling" in options.parts:
        tables["scaling"] = scaling(options, SHAPE)
    return Report("step", options, tables)


def configured(options: StepOptions, dtype: str, mean: int, rows: int) -> RunConfig:
    """One micro-batch a step."""
    more = [
        f"train.precision={dtype}",
        f"train.micro_batch_size={rows}",
        "train.gradient_accumulation_steps=1",
        *ALONE,
        f"model.recurrence.mean_recurrence={mean}",
        "model.recurrence.backprop_depth=null",
    ]
    return run_config(options, SHAPE, more)


def step_rows(
    options: StepOptions, dtype: str, mean: int, rows: int, ceiling: float
) -> list[dict[str, Any]]:
    """Both ways at one shape. `predicted` is the speed-up by counted FLOPs, `share` how much of it
    is there; `mfu` counts the FLOPs that are needed against one large matrix product."""
    config = configured(options, dtype, mean, rows)
    place: Any = {"threads": options.threads, "device": config.train.device}
    (found,) = on_ranks(compare, 1, config, options.repeats, **place)
    table = []
    tokens = rows * config.model.sequence_length
    for row in found.timings.rows(MASKED, tokens=tokens):
        name = row["variant"]
        is_ours = name == OURS
        rates = [f / s for f, s in zip(found.needed, found.timings.seconds[name], strict=True)]
        tflops = statistics.median(rates) / 1e12
        table.append(
            {"dtype": dtype, "mean": mean, "rows": rows}
            | row
            | {
                "predicted": statistics.median(found.predicted) if is_ours else 1.0,
                "share": found.share() if is_ours else 1.0,
                "tflops": tflops,
                "mfu": tflops / ceiling,
                "peak_megabytes": found.peaks[name] / 1e6,
                "loss": found.losses[name][-1],
            }
        )
    return table
