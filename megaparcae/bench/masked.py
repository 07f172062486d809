"""The loop in which nothing drops out: every row runs as often as the deepest (the authors' way).

A row that has finished is computed and thrown away. Same state, same loss, more work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType

import torch
from torch import Tensor

from megaparcae.config.schema import RunConfig
from megaparcae.model.flops import Recompute, step_flops
from megaparcae.model.injection import Drive
from megaparcae.model.looped_core import LoopedCore, LoopInputs
from megaparcae.model.recompute import checkpointed
from megaparcae.train.batches import HostBatch


@contextmanager
def masked(core: LoopedCore) -> Iterator[None]:
    """Inside, `core` masks rows."""
    core.run_units = MethodType(_run_units, core)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del core.run_units


def _run_units(
    core: LoopedCore,
    h: Tensor,
    rows: tuple[int, ...],
    units: tuple[int, int],
    drive: Drive,
    inputs: LoopInputs,
) -> Tensor:
    """All loops of one phase, for all rows."""
    assert units == (0, len(rows) * len(core)), "masking is for a model that is not cut in stages"
    layers = range(len(core))
    for count in rows:
        after = checkpointed(core.recompute == "loop", core.run_loop, h, layers, drive, inputs)
        active = torch.arange(len(h), device=h.device) < count
        h = torch.where(active[:, None, None], after, h)
    return h


def executed_flops(config: RunConfig, batches: list[HostBatch], *, masked: bool) -> float:
    """FLOPs of these micro-batches, by the depths of their rows."""
    modes, total = Recompute.of(config.parallel), 0.0
    for batch in batches:
        rows = len(batch.num_grad)
        depths = batch.num_no_grad, batch.num_grad
        no_grad, grad = (rows * max(d) if masked else sum(d) for d in depths)
        total += step_flops(
            config.model,
            rows_no_grad=no_grad,
            rows_grad=grad,
            rows=rows,
            sequence_length=config.model.sequence_length,
            executed=modes,
        ).total
    return total
