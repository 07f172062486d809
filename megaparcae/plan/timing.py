"""How long a step takes: arithmetic, waiting for each other, communication, the update. No torch.

Passes are simulated with the depths that training draws and deals (`scaling.simulate`); a step ends
when the slowest data-parallel rank is done. Arithmetic runs at the peak times --mfu, but no block
is faster than its kernels can be started.
"""

# D data-parallel ranks, P stages, M micro-batches, R rows of a micro-batch, S positions
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megaparcae.config.batch import BatchPlan
from megaparcae.config.schema import RunConfig
from megaparcae.model.expected_depth import expected_loops
from megaparcae.model.flops import Recompute, count_parameters, expected_flops, step_flops
from megaparcae.parallel.stages import Stage
from megaparcae.plan.activations import FP32, Activations
from megaparcae.plan.depths import NUM_STEPS, RANKS, Draws, Ints
from megaparcae.plan.machines import Cluster
from megaparcae.plan.memory import States
from megaparcae.scaling.simulate import PassCosts, one_forward_one_backward, pass_times

KERNELS = 45
"""Kernels of a block's forward pass on CUDA, and half of those of its backward pass (counted)."""
MICRO_BYTES = 18
"""Memory traffic of a micro-batch per weight: cast to bf16, its gradient written and added up."""
UPDATE_BYTES = 40
"""Memory traffic of the update per owned element: gradient, states and weight, read and written."""

Numbers = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step, one after the other."""

    needed: float
    """Arithmetic of the model, equally spread over all GPUs."""
    recomputed: float
    """What activation checkpointing and fused attention compute twice."""
    overhead: float
    """Blocks that wait for their kernels to be started."""
    waiting: float
    """Stages for each other (bubble), and ranks for the one with the most work."""
    tensor: float
    """Tensor and sequence parallelism, and hops from stage to stage."""
    data: float
    """Gradients to their owners, weights back, tied copies."""
    update: float
    """Weights cast and gradients added up for every micro-batch, and the optimizer."""

    @property
    def total(self) -> float:
        """The whole step."""
        return sum(astuple(self))


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that a rank sends in a step."""

    gradients: float
    weights: float
    tied: float
    tensor: float
    pipeline: float


def pass_shares(config: RunConfig) -> PassCosts:
    """Costs of passes in forward passes of a block, with the FLOPs that checkpointing repeats."""
    model = config.model
    once = expected_flops(model, executed=Recompute())
    again = expected_flops(model, executed=Recompute.of(config.parallel))
    looped = model.architecture == "looped"
    layers = model.num_prelude_layers + model.num_coda_layers if looped else model.num_layers
    outside = once.prelude + once.coda
    return PassCosts(
        num_core_layers=model.num_core_layers if looped else 0,
        head=once.head / outside * layers if outside else 0.0,
        again_outside=3 * (again.prelude + again.coda - outside) / outside if outside else 0.0,
        again_core=3 * (again.core_grad / once.core_grad - 1) if looped else 0.0,
    )


def step_time(
    config: RunConfig,
    batch: BatchPlan,
    stages: Sequence[Stage],
    states: Sequence[States],
    cluster: Cluster,
    draws: Draws,
) -> tuple[StepTime, Traffic]:
    """Seconds of a step and what a rank sends in it; `states` of every stage."""
    return _Timer(config, batch, stages, states, cluster, draws).run()


def least_time(config: RunConfig, batch: BatchPlan, cluster: Cluster) -> StepTime:
    """What a step takes at least: equal work for all, nothing recomputed, every byte at full speed.

    Also less than `step_time` in every part, so that layouts can be ruled out by it.
    """
    model, tp, pp = config.model, batch.tp, batch.pp
    no_grad, grad = expected_loops(model.recurrence)
    looped = model.architecture == "looped"
    core = model.num_core_layers if looped else 0
    layers = model.num_stored_layers - core
    tokens = batch.global_batch * model.sequence_length
    needed = (
        tokens * expected_flops(model).total / (cluster.speed(config.train.precision) * batch.world)
    )
    once = layers + core * (no_grad + grad)  # blocks of a forward pass
    backward = layers + core * grad
    launches = KERNELS * cluster.launch * batch.accumulation * (once + 2 * backward) / pp
    rows = batch.accumulation * batch.micro_batch * (once + backward) / pp
    tensor = rows * tensor_bytes(config) / cluster.bandwidth(tp, 1) if tp > 1 else 0.0
    share = (batch.dp - 1) / batch.dp
    weights = count_parameters(model).total / (tp * pp)
    moved = FP32 * weights * share
    hidden = config.parallel.zero_stage >= 2
    arithmetic = max(needed, launches)
    return StepTime(
        needed=needed,
        recomputed=0.0,
        overhead=arithmetic - needed,
        waiting=(pp - 1) / batch.accumulation * arithmetic,
        tensor=tensor,
        data=0.0 if hidden else 2 * moved / cluster.bandwidth(batch.dp, tp),
        update=MICRO_BYTES * batch.accumulation * weights / (cluster.machine.memory_speed * 1e9),
    )


def tensor_bytes(config: RunConfig) -> float:
    """Sent per block, row and forward pass: an all-reduce after attention and one after MLP, or the
    gathers and scatters that they are made of."""
    model, tp = config.model, config.parallel.tp
    product = 2 if config.train.precision == "bf16" else FP32
    return 4 * (tp - 1) / tp * model.sequence_length * model.hidden_size * product


@dataclass(frozen=True)
class _Timer:
    config: RunConfig
    batch: BatchPlan
    stages: Sequence[Stage]
    states: Sequence[States]
    cluster: Cluster
    draws: Draws

    def run(self) -> tuple[StepTime, Traffic]:
        shares = pass_shares(self.config)
        steps = [self._simulate(step, shares) for step in range(NUM_STEPS)]
        needed, recomputed, overhead, waiting, tensor = np.mean(steps, axis=0)
        traffic = self._traffic()
        arithmetic = needed + recomputed + overhead
        time = StepTime(
            needed=float(needed),
            recomputed=float(recomputed),
            overhead=float(overhead),
            waiting=float(waiting),
            tensor=float(tensor),
            data=self._exposed(traffic, arithmetic),
            update=self._update(),
        )
        return time, traffic

    def _simulate(self, step: int, shares: PassCosts) -> tuple[float, ...]:
        """Seconds needed, recomputed, lost to launches, to waiting, and to tensor parallelism."""
        repeats = self.config.parallel.repeats_core
        n, k = self.draws.depths(self.batch, repeats, step)
        needed, executed = (
            step_flops(
                self.config.model,
                rows_no_grad=float(n.sum()),
                rows_grad=float(k.sum()),
                rows=self.batch.global_batch,
                sequence_length=self.config.model.sequence_length,
                executed=recompute,
            ).total
            / (self.cluster.speed(self.config.train.precision) * self.batch.world)
            for recompute in (None, Recompute.of(self.config.parallel))
        )
        units = self._all_units(n, k, shares)
        unit = executed * self.batch.dp * len(self.stages) / units
        launches = replace(shares, least_rows=KERNELS * self.cluster.launch / unit)
        sent = self._tensor_seconds()
        moving = replace(shares, head=0.0, backward=1.0, least_rows=sent[1])
        ranks = range(min(RANKS, self.batch.dp)) if len(self.stages) > 1 else [None]
        spans, computing, sending = [], [], []
        for rank in ranks:
            compute = [unit * t for t in self._passes(step, rank, launches)]
            move = [sent[0] * t + self._hop() for t in self._passes(step, rank, moving)]
            computing.append(sum(t.sum() for t in compute))
            sending.append(sum(t.sum() for t in move))
            if rank is None:  # every rank is a row: no pipeline
                spans.append(float((compute[0] + compute[1] + move[0] + move[1]).sum(1).max()))
            else:
                both = (c + m for c, m in zip(compute, move, strict=True))
                spans.append(one_forward_one_backward(*both).makespan)
        lanes = len(spans) * len(self.stages) if ranks != [None] else self.batch.dp
        busy, moved = sum(computing) / lanes, sum(sending) / lanes
        overhead = max(0.0, busy - executed)
        waiting = max(0.0, max(spans) - busy - moved)
        return needed, executed - needed, overhead, waiting, moved

    def _passes(self, step: int, rank: int | None, costs: PassCosts) -> tuple[Numbers, Numbers]:
        """Forward and backward passes [P, M] of a rank's pipeline, or [D, M] without one."""
        repeats = self.config.parallel.repeats_core
        if rank is not None:
            loops = self.draws.loops(self.batch, repeats, step, rank)
            parts = [stage.part for stage in self.stages]
            return pass_times(parts, loops, costs, self.batch.micro_batch)
        n, k = self.draws.depths(self.batch, repeats, step)
        rows, part = self.batch.micro_batch, self.stages[0].part
        layers = max(rows, costs.least_rows) * (len(part.prelude) + len(part.coda))
        no_grad, grad = (_loop_rows(x, costs.least_rows) * costs.num_core_layers for x in (n, k))
        head, back = rows * costs.head, costs.backward
        forward = layers + head + no_grad + grad
        return forward, (
            layers * (back + costs.again_outside) + head * back + grad * (back + costs.again_core)
        )

    def _all_units(self, n: Ints, k: Ints, shares: PassCosts) -> float:
        """Forward passes of a block on a row in the whole batch."""
        layers = sum(len(s.part.prelude) + len(s.part.coda) for s in self.stages)
        both = 1 + shares.backward
        per_row = layers * (both + shares.again_outside) + both * shares.head
        loops = float(n.sum()) + (both + shares.again_core) * float(k.sum())
        return self.batch.global_batch * per_row + shares.num_core_layers * loops

    def _tensor_seconds(self) -> tuple[float, float]:
        """Seconds per block and row, and the rows below which it takes no less time."""
        if self.batch.tp == 1:
            return 0.0, 0.0
        seconds = tensor_bytes(self.config) / self.cluster.bandwidth(self.batch.tp, 1)
        return seconds, 4 * self.cluster.wait(self.batch.tp, 1) / seconds

    def _carry(self) -> float:
        """Bytes that cross a border of the pipeline, per micro-batch and direction."""
        per_token = 2 * Activations.of(self.config).stream
        return per_token * self.batch.micro_batch * self.config.model.sequence_length

    def _hop(self) -> float:
        """Seconds of a micro-batch from stage to stage."""
        if len(self.stages) == 1:
            return 0.0
        stride = self.batch.dp * self.batch.tp
        speed = self.cluster.bandwidth(2, stride)
        return self.cluster.wait(2, stride) + self._carry() / speed

    def _traffic(self) -> Traffic:
        parallel, batch = self.config.parallel, self.batch
        share = (batch.dp - 1) / batch.dp
        most = max(self.states, key=lambda s: s.moved)
        rounds = batch.accumulation if parallel.zero_stage >= 2 else 1
        once = FP32 * most.moved * share
        owners = batch.dp if parallel.zero_stage == 0 else 1
        tied = max(s.tied for s in self.states) * FP32 / owners * 2
        moving = replace(pass_shares(self.config), head=0.0, backward=1.0)
        n, k = self.draws.depths(batch, parallel.repeats_core, 0)
        passes = self._all_units(n, k, moving) / batch.dp / len(self.stages)
        return Traffic(
            gradients=once * rounds,
            weights=once * (2 * rounds if parallel.zero_stage == 3 else 1),
            tied=tied,
            tensor=passes * tensor_bytes(self.config),
            pipeline=2 * self._carry() * batch.accumulation * (len(self.stages) > 1),
        )

    def _exposed(self, traffic: Traffic, arithmetic: float) -> float:
        """Seconds of data-parallel traffic that nothing hides. ZeRO 2 and 3 of DeepSpeed reduce and
        gather beside the passes; what the other stages hide is not counted on."""
        batch, cluster = self.batch, self.cluster
        speed = cluster.bandwidth(batch.dp, batch.tp)
        wait = cluster.wait(batch.dp, batch.tp) if batch.dp > 1 else 0.0
        gradients, weights = (sent / speed + wait for sent in (traffic.gradients, traffic.weights))
        ties = 0.0
        if traffic.tied:
            stride = batch.dp * batch.tp
            ties = traffic.tied / cluster.bandwidth(len(self.stages), stride)
        match self.config.parallel.zero_stage:
            case 2:
                return ties + weights + max(0.0, gradients - 2 / 3 * arithmetic)
            case 3:
                return ties + max(0.0, gradients + weights - arithmetic)
            case _:
                return ties + gradients + weights

    def _update(self) -> float:
        """Seconds of the busiest owner: Muon's products, and memory traffic of everything else."""
        cluster, tp = self.cluster, self.batch.tp
        per_weight = 4 + MICRO_BYTES / FP32 * self.batch.accumulation
        seconds = 0.0
        for states in self.states:
            gathered = FP32 * states.matrices * (tp - 1)
            seconds = max(
                seconds,
                states.muon_flops / cluster.speed(self.config.optimizer.muon_dtype)
                + (gathered / cluster.bandwidth(tp, 1) if tp > 1 else 0.0)
                + (UPDATE_BYTES * states.owned + per_weight * states.weights)
                / (cluster.machine.memory_speed * 1e9),
            )
        return seconds


def _loop_rows(depths: Ints, least: float) -> Numbers:
    """Rows times loops [D, M] of depths [D, M, R]; a loop that runs counts `least` rows or more."""
    loops = np.arange(int(depths.max(initial=0)))
    rows = (depths[..., None] > loops).sum(axis=2)  # [D, M, T]
    return np.where(rows > 0, np.maximum(rows, least), 0.0).sum(axis=2)  # type: ignore[no-any-return]
