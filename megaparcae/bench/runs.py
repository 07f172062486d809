"""A training run on made-up tokens whose weights stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from megaparcae.bench.measure import take_turns, timed
from megaparcae.config.schema import RunConfig
from megaparcae.data.dataset import Rows
from megaparcae.engine.distributed import Process
from megaparcae.model.flops import needed_flops
from megaparcae.model.looped_lm import LoopedLM
from megaparcae.optim.schedule import Hyperparameters
from megaparcae.train.batches import BatchMaker, HostBatch
from megaparcae.train.build import Run, apply_schedule, build_run


class RandomRows:
    """Uniform tokens as a function of the sample id."""

    def __init__(self, config: RunConfig) -> None:
        self.vocab_size = config.model.vocab_size
        self.width = config.model.sequence_length + 1

    def rows(self, sample_ids: np.ndarray) -> Rows:
        """Rows [n, S + 1]."""
        draws = [np.random.default_rng(int(i)).integers(self.vocab_size, size=self.width)
                 for i in sample_ids]  # fmt: skip
        return Rows(sample_ids, np.stack(draws), None)


@dataclass(frozen=True)
class BenchRun:
    """Steps of a run at learning rate 0: all the work, and the next step starts where this did."""

    run: Run
    batches: BatchMaker

    @classmethod
    def start(cls, config: RunConfig, process: Process) -> BenchRun:
        """On this rank; all ranks together."""
        run = build_run(config, process)
        rows = RandomRows(config)
        batches = BatchMaker(
            config,
            run.plan,
            dp_index=run.mesh.dp.index,
            train=rows,
            validation=None,
            device=process.device,
        )
        still = Hyperparameters(lr_factor=0.0, muon_momentum=0.95, muon_weight_decay=0.0)
        apply_schedule(run.engine.optimizer, still, config.optimizer)
        return cls(run, batches)

    @property
    def model(self) -> LoopedLM:
        """Whole: benchmarks of a step have no pipeline."""
        assert isinstance(self.run.model, LoopedLM)
        return self.run.model

    def read(self, step: int) -> list[HostBatch]:
        """This rank's micro-batches."""
        return self.batches.read(step)

    def needed_flops(self, step: int) -> float:
        """Model FLOPs of this rank's micro-batches, by the depths drawn."""
        read, model = self.read(step), self.run.config.model
        return needed_flops(
            model,
            rows_no_grad=sum(sum(batch.num_no_grad) for batch in read),
            rows_grad=sum(sum(batch.num_grad) for batch in read),
            rows=sum(len(batch.num_grad) for batch in read),
            sequence_length=model.sequence_length,
        )

    def train(self, step: int) -> tuple[float, float]:
        """(seconds, mean loss) of forward, backward and update; reading the tokens is not timed."""
        batches = self.batches.to_device(self.read(step), step)
        tokens = self.run.plan.global_batch * self.run.config.model.sequence_length
        losses = []
        seconds = timed(lambda: losses.append(self.run.engine.train_batch(batches, 1 / tokens)))()
        return seconds, float(losses[0])


def step_seconds(
    process: Process, configs: Sequence[RunConfig], repeats: int
) -> list[tuple[float, float]]:
    """Of each run: median and spread, of the same step each time."""
    found = []
    for config in configs:
        bench = BenchRun.start(config, process)
        timings = take_turns({"step": partial(_seconds, bench)}, repeats)
        found.append((timings.median("step"), timings.spread("step")))
    return found


def _seconds(bench: BenchRun) -> float:
    return bench.train(0)[0]
