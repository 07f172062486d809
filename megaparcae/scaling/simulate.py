"""How long a pipeline's step takes: the 1F1B schedule with the depths that were drawn. No torch.

Times are forward passes of one block on one row. Every stage first runs as many forward passes as
there are stages behind it, then one forward and one backward in turn, then the backward passes that
are left; a pass begins when its stage is free and its input has come. Sending takes no time.
"""

# P stages, M micro-batches of a step
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megaparcae.config.layout import Part
from megaparcae.config.schema import REPEATS_BLOCKS, ModelConfig, ParallelConfig
from megaparcae.model.flops import expected_flops

Times = NDArray[np.float64]
BACKWARD = 2.0
"""A backward pass in forward passes; checkpointing adds what it computes again."""


class UnrolledLoop(Protocol):
    """The loops of one micro-batch, and where a share of their work ends (a `LoopPlan`)."""

    @property
    def no_grad(self) -> tuple[int, ...]:
        """Rows of each loop without gradient."""
        ...

    @property
    def grad(self) -> tuple[int, ...]:
        """Rows of each loop with gradient."""
        ...

    def cut(self, fraction: float, num_layers: int) -> int:
        """Index into the (loop, layer) sequence."""
        ...


@dataclass(frozen=True, kw_only=True)
class PassCosts:
    """What the pieces of a model cost, in forward passes of one block on one row."""

    num_core_layers: int
    head: float
    """Forward pass of the head."""
    again_outside: float = 0.0
    """Share of a forward pass that checkpointing repeats in prelude and coda."""
    again_core: float = 0.0
    """The same in the core."""
    backward: float = BACKWARD
    """A backward pass without what is repeated."""
    least_rows: float = 0.0
    """Fewer rows than this take as long: kernels have to be started."""


def pass_costs(model: ModelConfig, parallel: ParallelConfig) -> PassCosts:
    """Costs by FLOPs; selective checkpointing repeats what is small, and is taken as free."""
    flops = expected_flops(model)
    if model.architecture == "transformer":
        layers, core_layers = model.num_layers, 0
    else:
        layers, core_layers = model.num_prelude_layers, model.num_core_layers
    return PassCosts(
        num_core_layers=core_layers,
        head=flops.head / flops.prelude * layers,
        again_outside=float(parallel.recompute_prelude in REPEATS_BLOCKS),
        again_core=float(parallel.recompute_core in REPEATS_BLOCKS),
    )


def pass_times(
    parts: Sequence[Part],
    loops: Sequence[UnrolledLoop | None],
    costs: PassCosts,
    rows: int,
) -> tuple[Times, Times]:
    """Forward and backward times [P, M] of every stage and micro-batch of `rows` rows.

    `loops` has one entry per micro-batch; None for a Transformer.
    """
    forward, backward = (np.zeros((len(parts), len(loops))) for _ in range(2))
    again = costs.backward + costs.again_outside
    for stage, part in enumerate(parts):
        layers = max(rows, costs.least_rows) * (len(part.prelude) + len(part.coda))
        head = rows * costs.head * part.head
        for micro, loop in enumerate(loops):
            no_grad, grad = _loop_work(part, loop, costs)
            forward[stage, micro] = layers + head + no_grad + grad
            backward[stage, micro] = (
                layers * again + head * costs.backward + grad * (costs.backward + costs.again_core)
            )
    return forward, backward


def _loop_work(part: Part, loop: UnrolledLoop | None, costs: PassCosts) -> tuple[float, float]:
    """Rows times blocks of a stage's share of the loop, without and with gradient."""
    if part.loop is None or loop is None:
        return 0.0, 0.0
    begin, end = (loop.cut(fraction, costs.num_core_layers) for fraction in part.loop)
    rows = np.maximum(np.array(loop.no_grad + loop.grad), costs.least_rows)
    rows = np.repeat(rows, costs.num_core_layers)
    border = len(loop.no_grad) * costs.num_core_layers
    no_grad = float(rows[begin : min(end, border)].sum())
    return no_grad, float(rows[begin:end].sum()) - no_grad


@dataclass(frozen=True)
class PipelineTime:
    """One step of a pipeline."""

    makespan: float
    """From the first pass to the last."""
    busy: Times
    """[P] working time of each stage."""

    @property
    def efficiency(self) -> float:
        """Share of the stages' time that is work."""
        return float(self.busy.sum() / (len(self.busy) * self.makespan))


def one_forward_one_backward(forward: Times, backward: Times) -> PipelineTime:
    """Run the schedule with these times [P, M]."""
    num_stages, num_micro = forward.shape
    order = [list(stage_order(stage, num_stages, num_micro)) for stage in range(num_stages)]
    return run_order(order, forward, backward)


Pass = tuple[bool, int]
"""(is it a forward pass, micro-batch)"""


def stage_order(stage: int, num_stages: int, num_micro: int) -> Iterator[Pass]:
    """The passes of a stage, one after the other."""
    ahead = min(num_stages - stage - 1, num_micro)
    yield from ((True, micro) for micro in range(ahead))
    for micro in range(num_micro - ahead):
        yield True, ahead + micro
        yield False, micro
    yield from ((False, micro) for micro in range(num_micro - ahead, num_micro))


def run_order(order: Sequence[Sequence[Pass]], forward: Times, backward: Times) -> PipelineTime:
    """Every stage runs its passes in this order, each as soon as its input is there."""
    num_stages, num_micro = forward.shape
    done = {True: np.full((num_stages, num_micro), np.nan), False: np.full_like(forward, np.nan)}
    clock = [0.0] * num_stages
    position = [0] * num_stages
    left = sum(map(len, order))
    while left:
        before = left
        for stage in range(num_stages):
            while position[stage] < len(order[stage]):
                is_forward, micro = order[stage][position[stage]]
                source = stage - 1 if is_forward else stage + 1
                inside = 0 <= source < num_stages
                ready = float(done[is_forward][source, micro]) if inside else 0.0
                if ready != ready:  # not there yet
                    break
                times = forward if is_forward else backward
                clock[stage] = max(clock[stage], ready) + float(times[stage, micro])
                done[is_forward][stage, micro] = clock[stage]
                position[stage] += 1
                left -= 1
        assert left < before, "the order of passes makes stages wait for each other"
    return PipelineTime(max(clock), (forward + backward).sum(axis=1))
