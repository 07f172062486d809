"""One optimizer step of several ranks: each updates its share, against each updating all."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megaparcae.bench.measure import Timings, Variant, on_ranks, take_turns, timed
from megaparcae.bench.options import OptimizerOptions
from megaparcae.bench.report import Report
from megaparcae.bench.shapes import run_config
from megaparcae.config.schema import RunConfig
from megaparcae.engine.distributed import Process
from megaparcae.model.build import build_model
from megaparcae.optim.recipe import Recipe, make_recipe
from megaparcae.parallel.apply import lay_out
from megaparcae.parallel.mesh import Axis, Mesh, make_mesh
from megaparcae.parallel.sharded_optimizer import ShardedOptimizer
from megaparcae.train.pipeline_report import plan_stages

SHARDED, WHOLE = "sharded", "every rank all of it"


def run(options: OptimizerOptions) -> Report:
    """Tables `step` and `states`: of the 140m preset unless another run is given."""
    config = run_config(options, preset="140m")
    place: Any = {"threads": options.threads, "device": config.train.device}
    found = on_ranks(compare, options.ranks, config, options.repeats, **place)
    times = [timings.seconds for timings, _ in found]
    slowest = Timings(
        {n: [max(t[n][i] for t in times) for i in range(options.repeats)] for n in times[0]}
    )
    table = slowest.rows(WHOLE)
    for row in table:
        row["of_whole"] = 1 / row["speedup"]
    states = [
        {"rank": rank, "variant": name, "megabytes": size / 1e6}
        for rank, (_, sizes) in enumerate(found)
        for name, size in sizes.items()
    ]
    return Report("optimizer", options, {"step": table, "states": states})


def compare(process: Process, config: RunConfig, repeats: int) -> tuple[Timings, dict[str, int]]:
    """Seconds of this rank's steps, and bytes of its states. Both ways sum the gradients over the
    ranks; only the sharded one sends weights back."""
    mesh = make_mesh(pp=1, tp=1)
    variants: dict[str, Variant] = {}
    sizes: dict[str, int] = {}
    for name in (WHOLE, SHARDED):
        model = _model(config, mesh, process.device)
        kind = _Whole if name == WHOLE else ShardedOptimizer
        optimizer = kind(model.parameters(), make_recipe(config.optimizer), mesh)
        optimizer.set_hyperparameters(lr_factor=0.0, muon_momentum=0.95, muon_weight_decay=0.0)
        variants[name] = _stepper(model, optimizer)
        sizes[name] = sum(t.numel() * t.element_size() for _, _, t in optimizer.named_states())
    return take_turns(variants, repeats), sizes


class _Whole(ShardedOptimizer):
    """Gradients are summed over all ranks, then each does the whole update, as without sharding."""

    def __init__(self, parameters: Iterable[nn.Parameter], recipe: Recipe, mesh: Mesh) -> None:
        alone = Axis(size=1, index=0, group=None, ranks=(mesh.rank,))
        super().__init__(parameters, recipe, replace(mesh, dp=alone, world_size=1))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        self._buffer.collect()
        dist.all_reduce(self._buffer.full)
        super().step(closure)


def _model(config: RunConfig, mesh: Mesh, device: torch.device) -> nn.Module:
    """Weights that cost nothing to draw: they are not looked at."""
    with torch.device("meta"):
        model = build_model(config.model)

    def value(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.full(shape, 1 / math.sqrt(shape[-1]))

    lay_out(
        model,
        stages=plan_stages(config),
        mesh=mesh,
        parallel=config.parallel,
        initial_value=value,
        device=device,
    )
    return model


def _stepper(model: nn.Module, optimizer: ShardedOptimizer) -> Variant:
    """Seconds of a step with fresh gradients, all ranks starting together."""
    parameters = list(model.parameters())

    def step() -> float:
        torch.autograd.backward(parameters, [torch.randn_like(p) for p in parameters])
        gc.collect()
        dist.barrier()
        return timed(optimizer.step)()

    return step
