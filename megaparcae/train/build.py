"""From a config to a run: the only place where model, parallelism, optimizer and data meet."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from megaparcae.config.batch import BatchPlan, solve_batch
from megaparcae.config.schema import OptimizerConfig, RunConfig
from megaparcae.engine.base import Engine
from megaparcae.engine.distributed import Process, set_deterministic
from megaparcae.engine.ds_config import deepspeed_options
from megaparcae.engine.pipeline import PipelineEngine
from megaparcae.engine.plain import PlainEngine
from megaparcae.errors import UserError
from megaparcae.log import logger
from megaparcae.model.attention import Attention
from megaparcae.model.blocks import Block
from megaparcae.model.build import build_model
from megaparcae.model.init import initial_value
from megaparcae.model.language_model import LanguageModel
from megaparcae.model.looped_core import LoopedCore
from megaparcae.ops.apex import nvidia_apex
from megaparcae.optim.recipe import make_recipe
from megaparcae.optim.schedule import Hyperparameters
from megaparcae.parallel.apply import lay_out
from megaparcae.parallel.mesh import Mesh, make_mesh
from megaparcae.parallel.shard import spec_of
from megaparcae.parallel.sharded_optimizer import ShardedOptimizer
from megaparcae.parallel.stages import Stage
from megaparcae.train.pipeline_report import describe_pipeline, plan_stages

MAX_COMPILED_VERSIONS = 64
"""Of one block; PyTorch would go on without compiling after 8, saying so in a warning only."""


@dataclass(frozen=True)
class Run:
    """Everything a training loop needs, on this rank."""

    config: RunConfig
    process: Process
    mesh: Mesh
    plan: BatchPlan
    stages: list[Stage]
    model: nn.Module
    engine: Engine


def build_run(config: RunConfig, process: Process) -> Run:
    """Lay the model out over the processes and wrap it in an engine. All ranks call it together."""
    parallel = config.parallel
    plan = solve_batch(config.train, world=process.world_size, tp=parallel.tp, pp=parallel.pp)
    set_deterministic(config.train.deterministic)
    mesh = make_mesh(pp=parallel.pp, tp=parallel.tp)
    stages = plan_stages(config)
    logger.info(plan.explain())
    if len(stages) > 1:
        logger.info(describe_pipeline(config, plan, stages))
    with torch.device("meta"):
        model = build_model(config.model)
    lay_out(
        model,
        stages=stages,
        mesh=mesh,
        parallel=parallel,
        initial_value=lambda name, shape: initial_value(
            config.model, seed=config.train.seed, name=name, shape=shape
        ),
        device=process.device,
    )
    if config.train.compile:
        check_compiler(process.device)
        compile_blocks(model)
    engine = make_engine(config, plan, mesh, stages, model)
    return Run(config, process, mesh, plan, stages, model, engine)


def make_engine(
    config: RunConfig, plan: BatchPlan, mesh: Mesh, stages: list[Stage], model: LanguageModel
) -> Engine:
    """Optimizer and engine over a model that has been laid out."""
    optimizer = make_optimizer(config, model, mesh)
    options = deepspeed_options(config.parallel, config.train, config.optimizer, plan)
    if mesh.pp.size > 1:
        return PipelineEngine(model, stages[mesh.pp.index].part, optimizer, options, mesh)
    return PlainEngine(
        model,
        optimizer,
        options,
        mesh,
        leaf_modules=(LoopedCore, Attention),
        # A compiled block would take the wait for its weights into its graph.
        run_order=None if config.train.compile else model.run_order(),
    )


def make_optimizer(config: RunConfig, model: nn.Module, mesh: Mesh) -> Optimizer:
    """Ours at ZeRO stage 0; PyTorch's AdamW for DeepSpeed to shard at stages 1 to 3."""
    recipe = make_recipe(config.optimizer, apex=nvidia_apex())
    parameters = list(model.parameters())
    if config.parallel.zero_stage == 0:
        return ShardedOptimizer(parameters, recipe, mesh)

    device = parameters[0].device

    def group(decayed: bool) -> dict[str, object]:
        specs = {p: spec_of(p) for p in parameters}
        chosen = [
            p for p, s in specs.items() if recipe.rule(s.name, s.full_shape).decayed is decayed
        ]
        # A stage may have none, but DeepSpeed adds norms up over the stages group by group.
        placeholder = nn.Parameter(torch.zeros(1, device=device))
        weight_decay = config.optimizer.weight_decay * decayed
        return {"params": chosen or [placeholder], "weight_decay": weight_decay}

    return torch.optim.AdamW(
        [group(True), group(False)],
        lr=config.optimizer.lr,
        betas=config.optimizer.betas,
        eps=config.optimizer.eps,
        fused=device.type == "cuda",
    )


def apply_schedule(optimizer: Optimizer, hyper: Hyperparameters, config: OptimizerConfig) -> None:
    """Set this step's rates on whichever optimizer the run has."""
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.set_hyperparameters(
            lr_factor=hyper.lr_factor,
            muon_momentum=hyper.muon_momentum,
            muon_weight_decay=hyper.muon_weight_decay,
        )
        return
    for group in optimizer.param_groups:
        group["lr"] = hyper.lr_factor * config.lr


def check_compiler(device: torch.device) -> None:
    """UserError where torch.compile would fail at the first step for want of a C++ compiler."""
    candidates = (os.environ.get("CXX", "g++"), "g++", "clang++")
    if device.type == "cpu" and not any(shutil.which(name) for name in candidates):
        raise UserError(
            "train.compile=true needs a C++ compiler on CPU, and neither g++ nor clang++ is on the "
            "PATH; install one, name it in the variable CXX, or use train.compile=false"
        )


def compile_blocks(model: nn.Module, backend: str | Callable[..., Any] = "inductor") -> None:
    """torch.compile every block, for all row counts at once.

    There is one version for each of: with or without gradient, with or without value embedding,
    one row or more, the rows whole or a part of the micro-batch's. All blocks share them.
    """
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = max(limit, MAX_COMPILED_VERSIONS)
    for module in model.modules():
        if isinstance(module, Block):
            module.compile(dynamic=True, backend=backend)
