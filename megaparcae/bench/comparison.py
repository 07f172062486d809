"""Steps of one run with rows that drop out and with rows that are masked, in turn."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from megaparcae.bench.masked import executed_flops, masked
from megaparcae.bench.measure import PeakMemory, Timings, Variant, take_turns
from megaparcae.bench.runs import BenchRun
from megaparcae.config.schema import RunConfig
from megaparcae.engine.distributed import Process

OURS, MASKED = "ours", "masked"
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}
"""Relative: both ways compute the same, in products of other sizes."""


class Comparison:
    """What `compare` found: per repeat, except for the peaks."""

    def __init__(self) -> None:
        self.timings = Timings({})
        self.predicted: list[float] = []
        self.needed: list[float] = []
        self.losses: dict[str, list[float]] = {OURS: [], MASKED: []}
        self.peaks: dict[str, int] = {}

    def share(self) -> float:
        """Measured over predicted speed-up, in the middle of the repeats."""
        times = self.timings.seconds
        speedups = [slow / fast for slow, fast in zip(times[MASKED], times[OURS], strict=True)]
        return statistics.median(s / p for s, p in zip(speedups, self.predicted, strict=True))


def compare(process: Process, config: RunConfig, repeats: int) -> Comparison:
    """Steps 0, 1, ... of one run both ways in turn, from the same weights; both must have the same
    loss. Step 0 is to warm up and to see the memory."""
    bench, found = BenchRun.start(config, process), Comparison()
    core = bench.model.core
    ways: dict[str, Callable[[], AbstractContextManager[None]]] = {
        MASKED: lambda: masked(core),
        OURS: nullcontext,
    }
    bench.train(0)
    for name, way in ways.items():
        gc.collect()
        memory = PeakMemory()
        with way():
            bench.train(0)
        found.peaks[name] = memory.bytes()

    def variant(name: str) -> Variant:
        numbers = iter(range(1, repeats + 1))

        def step() -> float:
            with ways[name]():
                seconds, loss = bench.train(next(numbers))
            found.losses[name].append(loss)
            return seconds

        return step

    found.timings = take_turns({name: variant(name) for name in ways}, repeats, warmups=0)
    for ours, theirs in zip(found.losses[OURS], found.losses[MASKED], strict=True):
        if abs(ours - theirs) > LOSS_TOLERANCE[config.train.precision] * abs(theirs):
            raise RuntimeError(f"the loss is {ours} when rows drop out and {theirs} when masked")
    for number in range(1, repeats + 1):
        read = bench.read(number)
        costs = [executed_flops(config, read, masked=how) for how in (True, False)]
        found.predicted.append(costs[0] / costs[1])
        found.needed.append(bench.needed_flops(number))
    return found
