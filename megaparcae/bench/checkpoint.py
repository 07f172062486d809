"""Saving and loading a run: what training waits for, and what it loses to a save beside it."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from megaparcae.bench.measure import Timings, on_ranks
from megaparcae.bench.options import CheckpointOptions
from megaparcae.bench.report import Report
from megaparcae.bench.runs import BenchRun
from megaparcae.bench.shapes import ALONE, run_config
from megaparcae.checkpoint.manager import CheckpointManager
from megaparcae.config.schema import RunConfig
from megaparcae.engine.distributed import Process

SHAPE = (
    "model.hidden_size=768",
    "model.num_heads=6",
    "model.vocab_size=16384",
    "model.sequence_length=64",
    "model.init_orthogonal=false",
    "train.micro_batch_size=1",
    "train.gradient_accumulation_steps=1",
    "model.recurrence.sampler=fixed",
    "model.recurrence.mean_recurrence=2",
    "validation.interval=0",
)
"""2/2/2, 94 million parameters with AdamW's states; few tokens, so that steps are short,
and a start that costs little."""
SYNC, STALL, BESIDE, LOAD = "save", "save beside: wait", "save beside: on disk", "load"
WARMUP_STEPS = 2


def run(options: CheckpointOptions) -> Report:
    """Tables `save` and `training`."""
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=options.dir) as folder:
        more = [*ALONE, f"checkpoint.dir={folder}/run", "checkpoint.keep=2"]
        config = run_config(options, SHAPE, more)
        place: Any = {"threads": options.threads, "device": config.train.device}
        (found,) = on_ranks(measure, 1, config, options.repeats, **place)
    timings, steps, num_bytes = found
    saves = timings.rows(SYNC, megabytes=num_bytes / 1e6)
    for row in saves:
        row["of_save"] = 1 / row.pop("speedup")
        del row["speedup_low"], row["speedup_high"]
    return Report("checkpoint", options, {"save": saves, "training": [steps]})


def measure(
    process: Process, config: RunConfig, repeats: int
) -> tuple[Timings, dict[str, Any], int]:
    """A save that is waited for, one beside the training, a load; in turn."""
    bench = BenchRun.start(config, process)
    engine = bench.run.engine
    manager = CheckpointManager(config, bench.run.plan.global_batch)
    manager.resume(engine)
    for step in range(WARMUP_STEPS):
        bench.train(step)
    seconds: dict[str, list[float]] = {name: [] for name in (SYNC, STALL, BESIDE, LOAD)}
    alone: list[float] = []
    beside: list[float] = []
    number = 0
    for round_number in range(1 + repeats):
        number += 2
        saved = manager.save(number - 1, engine)
        alone_now = [bench.train(0)[0] for _ in range(3)]
        manager.begin(number, engine)
        beside_now = []
        while not manager.over():
            beside_now.append(bench.train(0)[0])
        result = manager.wait()
        assert result is not None and result.problem is None and saved.problem is None
        began = time.perf_counter()
        manager.restore(number, engine)
        if round_number:  # the first one makes the copies' memory
            seconds[LOAD].append(time.perf_counter() - began)
            seconds[SYNC].append(saved.seconds)
            seconds[STALL].append(result.stall_seconds)
            seconds[BESIDE].append(result.seconds)
            alone += alone_now
            beside += beside_now
    assert result is not None and result.folder is not None
    usual = statistics.median(alone)
    lost = (sum(beside) - usual * len(beside)) / repeats
    steps = {
        "step_seconds": usual,
        "step_seconds_beside_a_save": statistics.median(beside),
        "steps_beside_a_save": len(beside) / repeats,
        "lost_to_a_save_beside": lost + statistics.median(seconds[STALL]),
        "of_save": (lost + statistics.median(seconds[STALL])) / statistics.median(seconds[SYNC]),
    }
    return Timings(seconds), steps, _size(result.folder)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
