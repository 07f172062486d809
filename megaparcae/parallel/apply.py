"""From a one-device model on the meta device to this rank's weights: the only place with the order.

1. drop what other stages run     2. split over tp     3. record which stages share a weight
4. activation checkpointing       5. real weights from (seed, name)
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from megaparcae.config.schema import ParallelConfig
from megaparcae.parallel.materialize import materialize
from megaparcae.parallel.mesh import Mesh
from megaparcae.parallel.shard import set_spec, spec_of
from megaparcae.parallel.stages import Stage
from megaparcae.parallel.tensor import apply_tp


def lay_out(
    model: nn.Module,
    *,
    stages: list[Stage],
    mesh: Mesh,
    parallel: ParallelConfig,
    initial_value: Callable[[str, tuple[int, ...]], Tensor],
    device: torch.device,
) -> None:
    """Turn `model` (whole, on the meta device) into this rank's part of it, in place."""
    holders = _holders(model, stages)
    model.keep(stages[mesh.pp.index].part)  # type: ignore[operator]
    apply_tp(
        model,
        model.tp_plan,  # type: ignore[arg-type]
        mesh,
        sequence_parallel=parallel.sequence_parallel,
    )
    for parameter in model.parameters():
        spec = spec_of(parameter)
        set_spec(parameter, replace(spec, stages=holders[spec.name]))
    model.set_recompute(  # type: ignore[operator]
        prelude=parallel.recompute_prelude,
        core=parallel.recompute_core,
        coda=parallel.recompute_coda,
    )
    materialize(model, initial_value, device)


def _holders(model: nn.Module, stages: list[Stage]) -> dict[str, tuple[int, ...]]:
    """Parameter name -> the stages that hold it."""
    holders: dict[str, tuple[int, ...]] = {}
    for index, stage in enumerate(stages):
        other = copy.deepcopy(model)  # weights on the meta device cost nothing
        other.keep(stage.part)  # type: ignore[operator]
        for name, _ in other.named_parameters():
            holders[name] = (*holders.get(name, ()), index)
    return holders
