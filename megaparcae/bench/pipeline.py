"""How busy the stages of a pipeline are: by the simulator, and by what a real one computed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from megaparcae.bench.measure import on_ranks
from megaparcae.bench.options import PipelineOptions
from megaparcae.bench.report import Report
from megaparcae.bench.runs import BenchRun
from megaparcae.bench.shapes import run_config
from megaparcae.config.batch import solve_batch
from megaparcae.config.schema import RunConfig
from megaparcae.engine.distributed import Process
from megaparcae.engine.pipeline import PipelineEngine
from megaparcae.model.recompute import WorkCounter
from megaparcae.parallel.stages import describe_stages
from megaparcae.scaling.simulate import (
    BACKWARD,
    PipelineTime,
    one_forward_one_backward,
    pass_costs,
    pass_times,
)
from megaparcae.train.pipeline_report import loop_plans, plan_stages

NARROW = (
    "model.hidden_size=32",
    "model.intermediate_size=128",
    "model.num_heads=1",
    "model.vocab_size=640",
    "model.sequence_length=8",
    "train.precision=fp32",
)
"""The real pipeline's model: layers and loops of the run, widths that a CPU is through with soon.
Its head costs about as many blocks as the 1.3B model's does."""


def run(options: PipelineOptions) -> Report:
    """Tables `efficiency`, `simulated` and `counted`: of the 1p3b preset by default."""
    wide, narrow = configured(options), configured(options, NARROW)
    simulated = [simulate(wide, options.stages, n) for n in range(options.simulated_steps)]
    expected = [simulate(narrow, options.stages, n) for n in range(options.real_steps)]
    place: Any = {"threads": options.threads, "device": narrow.train.device}
    counted = on_ranks(count_passes, options.stages, narrow, options.real_steps, **place)
    real = schedule(narrow, np.array(counted, float))
    P, M = options.stages, options.micro_batches
    pairs = {
        "ideal: equal micro-batches, equal stages": M / (M + P - 1),
        f"simulated, {wide.preset or wide.name}": efficiency(simulated),
        "simulated, narrow model": efficiency(expected),
        "counted in the real pipeline, narrow model": efficiency(real),
    }
    tables = {
        "efficiency": [{"what": what, "efficiency": value} for what, value in pairs.items()],
        "simulated": by_stage(wide, simulated),
        "counted": by_stage(narrow, real, counted),
    }
    return Report("pipeline", options, tables)


def configured(options: PipelineOptions, shape: tuple[str, ...] = ()) -> RunConfig:
    """The run on a pipeline of one data-parallel rank."""
    more = [
        *shape,
        "parallel.tp=1",
        f"parallel.pp={options.stages}",
        "parallel.zero_stage=0",
        f"train.micro_batch_size={options.rows}",
        f"train.gradient_accumulation_steps={options.micro_batches}",
        "train.global_batch_size=null",
    ]
    return run_config(options, more=more, preset="1p3b")


def simulate(config: RunConfig, num_stages: int, step: int) -> PipelineTime:
    """A step with the depths that are drawn for it."""
    plan = solve_batch(config.train, world=num_stages, tp=1, pp=num_stages)
    parts = [stage.part for stage in plan_stages(config)]
    costs = pass_costs(config.model, config.parallel)
    loops = loop_plans(config, plan, step)
    return one_forward_one_backward(*pass_times(parts, loops, costs, plan.micro_batch))


def count_passes(process: Process, config: RunConfig, steps: int) -> list[list[tuple[int, int]]]:
    """Blocks times rows, without and with gradient, of every forward pass [steps][M] of this stage
    in a real pipeline."""
    bench = BenchRun.start(config, process)
    engine, work = bench.run.engine, bench.run.model.work
    assert isinstance(engine, PipelineEngine) and isinstance(work, WorkCounter)
    passes: list[list[tuple[int, int]]] = []
    before = WorkCounter()

    def begin(module: nn.Module, inputs: Any) -> None:
        before.no_grad, before.grad = work.no_grad, work.grad

    def end(module: nn.Module, inputs: Any, output: Any) -> None:
        passes[-1].append((work.no_grad - before.no_grad, work.grad - before.grad))

    engine.stage.register_forward_pre_hook(begin)
    engine.stage.register_forward_hook(end)
    for step in range(steps):
        passes.append([])
        bench.train(step)
    return passes


def schedule(config: RunConfig, counted: NDArray[np.float64]) -> list[PipelineTime]:
    """Every step of counted passes [P, steps, M, 2] in the order of 1F1B; the head, which is no
    block, at its planned cost on the last stage."""
    costs, rows = pass_costs(config.model, config.parallel), config.train.micro_batch_size
    assert rows is not None
    counted = counted.copy()
    counted[-1, ..., 1] += costs.head * rows
    forward, backward = counted.sum(axis=-1), BACKWARD * counted[..., 1]
    steps = range(counted.shape[1])
    return [one_forward_one_backward(forward[:, n], backward[:, n]) for n in steps]


def efficiency(steps: list[PipelineTime]) -> float:
    """Mean share of the stages' time that is work."""
    return float(np.mean([step.efficiency for step in steps]))


def by_stage(
    config: RunConfig, steps: list[PipelineTime], counted: Any = None
) -> list[dict[str, Any]]:
    """What each stage runs and how long it waits; with the blocks that it was seen to run."""
    stages = plan_stages(config)
    lines = describe_stages(stages).split("\n")
    idle = np.mean([1 - step.busy / step.makespan for step in steps], axis=0)
    table = []
    for number, stage in enumerate(stages):
        what = " ".join(lines[number].split(":", 1)[1].split()[:-4])
        row: dict[str, Any] = {
            "stage": number,
            "runs": what,
            "work_share": stage.cost / sum(other.cost for other in stages),
            "idle_share": float(idle[number]),
        }
        if counted is not None:
            no_grad, grad = np.sum(counted[number], axis=(0, 1)).tolist()
            row |= {"layer_rows_no_grad": no_grad, "layer_rows_grad": grad}
        table.append(row)
    return table
