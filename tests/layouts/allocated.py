"""Bytes that a real training step takes from PyTorch's allocator, on every rank."""

from __future__ import annotations

import gc
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tiny import start, steps
from torch.profiler import ProfilerActivity, profile

from megaparcae.config.load import build_config
from megaparcae.config.schema import RunConfig


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
    """Bytes of this rank: `resident` after a step, and at most `passing` more in the next.

    The profiler records every allocation, temporaries included.
    """
    config = build_config(options, where="test")
    gc.collect()
    before = live_bytes()
    run, batches = start(config, RandomRows(config))
    steps(run, batches, 0, 1)
    gc.collect()
    resident = live_bytes() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        steps(run, batches, 1, 2)
    events = record.profiler.kineto_results.events()  # type: ignore[union-attr]
    memory = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    passing = int(np.cumsum([change for _, change in memory]).max())
    return {"resident": resident, "passing": passing}


def live_bytes() -> int:
    """Of all storages that a tensor of this process refers to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
