"""Bytes that PyTorch's allocator hands out in a real training step, on every rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tiny import steps
from torch.profiler import ProfilerActivity, profile, record_function

from megaparcae.config.load import build_config
from megaparcae.config.schema import RunConfig
from megaparcae.engine.distributed import Process
from megaparcae.train.batches import BatchMaker
from megaparcae.train.build import build_run


class RandomRows:
    """Tokens of any length."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def rows(self, sample_ids: np.ndarray) -> SimpleNamespace:
        shape = (len(sample_ids), self.config.model.sequence_length + 1)
        tokens = np.random.default_rng(0).integers(0, self.config.model.vocab_size, shape)
        documents = np.arange(shape[1] - 1)[None, :].repeat(len(sample_ids), 0) // 50
        masked = self.config.data.document_mask
        return SimpleNamespace(
            tokens=tokens, document_ids=documents.astype(np.int32) if masked else None
        )


def allocated_bytes(options: dict[str, Any]) -> dict[str, int]:
    """Live bytes of this rank: `built` after building, `resident` after a step, `peak` of the next.

    Counts every tensor and temporary on the CPU, through the profiler's allocation records.
    """
    config = build_config(options, where="test")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        process = Process(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
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
        with record_function("first step"):
            steps(run, batches, 0, 1)
        with record_function("second step"):
            steps(run, batches, 1, 2)
    events = record.profiler.kineto_results.events()  # type: ignore[union-attr]
    memory = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    begins = {e.name(): e.start_ns() for e in events if e.name().endswith(" step")}
    times = np.array([time for time, _ in memory])
    live = np.cumsum([change for _, change in memory])
    return {
        "built": int(live[times < begins["first step"]][-1]),
        "resident": int(live[times < begins["second step"]][-1]),
        "peak": int(live[times >= begins["second step"]].max()),
    }
