"""Loop work: executed by a real model against needed, and how evenly the deal spreads it."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from megaparcae.bench.runs import BenchRun
from megaparcae.bench.shapes import ALONE
from megaparcae.config.schema import RunConfig
from megaparcae.data.sampler import deal, imbalance, step_sample_ids
from megaparcae.engine.distributed import Process
from megaparcae.model.draws import sample_depths
from megaparcae.model.loop_plan import GRAD_COST

RANKS, MICRO_BATCHES, ROWS = 8, 4, 8
NARROW = (
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_heads=2",
    "model.vocab_size=64",
    "model.sequence_length=8",
    "train.precision=fp32",
    f"train.micro_batch_size={ROWS}",
    f"train.gradient_accumulation_steps={MICRO_BATCHES}",
    *ALONE,
)
"""The counted model: depths and rows are what matters."""


def loop_work(process: Process, config: RunConfig, steps: int) -> list[dict[str, Any]]:
    """`executed / needed` from the blocks that ran, in forward passes without gradient; and by how
    much the busiest of RANKS simulated ranks exceeds their average, dealt evenly and in order."""
    table: list[dict[str, Any]] = [
        {
            "what": "loop work executed / needed",
            "value": executed_over_needed(BenchRun.start(config, process), steps),
            "of": f"{steps} steps, micro-batches of {ROWS} rows",
        }
    ]
    for mode in ("balanced", "none"):
        found = imbalances(config, steps, mode)  # type: ignore[arg-type]
        table.append(
            {
                "what": f"busiest rank / average - 1, deal {mode}",
                "value": float(np.mean(found)),
                "largest": float(np.max(found)),
                "of": f"{steps} steps, {RANKS} ranks x {MICRO_BATCHES} micro-batches x {ROWS} rows",
            }
        )
    return table


def executed_over_needed(bench: BenchRun, steps: int) -> float:
    """Counted in the model, against the depths of the rows."""
    config, work, needed = bench.run.config.model, bench.model.work, 0
    for step in range(steps):
        bench.train(step)
        needed += sum(sum(b.num_no_grad) + GRAD_COST * sum(b.num_grad) for b in bench.read(step))
    outside = (
        steps * bench.run.plan.global_batch * (config.num_prelude_layers + config.num_coda_layers)
    )
    executed = (work.no_grad + GRAD_COST * (work.grad - outside)) / config.num_core_layers
    return executed / needed


def imbalances(config: RunConfig, steps: int, mode: Literal["balanced", "none"]) -> list[float]:
    """Of each step."""
    found = []
    for step in range(steps):
        ids = step_sample_ids(step, RANKS * MICRO_BATCHES * ROWS)
        n, k = sample_depths(
            config.model.recurrence, seed=config.train.seed, step=step, sample_ids=ids
        )
        costs = n + GRAD_COST * k
        positions = deal(costs, dp=RANKS, micro_batches=MICRO_BATCHES, rows=ROWS, mode=mode)
        found.append(imbalance(costs, positions))
    return found
