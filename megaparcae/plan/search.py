"""All layouts of a run on a cluster: which are legal, which fit, which is fastest, and why.

Legal is what training accepts: the checks are its own. For each division of the GPUs the cheapest
activation checkpointing that fits is taken. Layouts are looked at in the order of a lower bound of
their step time, until no other can be among the best.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from megaparcae.config.batch import BatchPlan, solve_batch
from megaparcae.config.schema import ParallelConfig, RunConfig, divisors
from megaparcae.errors import UserError
from megaparcae.model.flops import Recompute, expected_flops
from megaparcae.parallel.ownership import Item
from megaparcae.parallel.stages import Stage
from megaparcae.plan.depths import Draws, deepest_grad_units
from megaparcae.plan.machines import GIB, Cluster
from megaparcae.plan.memory import Memory, States, all_states, peak_memory
from megaparcae.plan.timing import (
    StepTime,
    Traffic,
    least_time,
    step_time,
)
from megaparcae.plan.weights import stage_items
from megaparcae.train.pipeline_report import plan_stages

MOST_STAGES = 16
"""Longest pipeline that is looked at."""
MOST_TENSOR = 16
MOST_ROWS = 64
"""Largest micro-batch that is looked at."""

OUTSIDE = ("none", "selective", "block")
CORE = ("none", "selective", "block", "loop")


@dataclass(frozen=True)
class Layout:
    """A run's config on this cluster, worked out."""

    config: RunConfig
    batch: BatchPlan
    memory: Memory
    """Of the fullest stage."""
    time: StepTime
    traffic: Traffic

    @property
    def name(self) -> str:
        """Its division of the GPUs."""
        return layout_name(self.config.parallel, self.batch)


def layout_name(parallel: ParallelConfig, batch: BatchPlan) -> str:
    """tp x pp x dp, with what goes with them."""
    sequence = "+sp" if parallel.sequence_parallel else ""
    zero = f" zero{parallel.zero_stage}" if parallel.zero_stage else ""
    return f"tp {parallel.tp}{sequence} pp {parallel.pp} dp {batch.dp}{zero}"


@dataclass(frozen=True)
class Rejected:
    """A layout that is not among the best, and why in one phrase."""

    name: str
    reason: str
    tp: int
    pp: int
    seconds: float | None = None
    """Of a step; None when there is none."""


@dataclass(frozen=True)
class Ranking:
    """The fastest layouts first, and what became of the others."""

    best: list[Layout]
    rejected: list[Rejected]


@dataclass
class Planner:
    """Evaluates layouts of one run on one cluster."""

    config: RunConfig
    cluster: Cluster
    total: int
    """Sequences per optimizer step: the same for all layouts."""
    least_memory: tuple[float, str] | None = None
    """The leanest that did not fit: bytes and name."""
    _stages: dict[tuple[object, ...], tuple[list[Stage], list[list[Item]]]] = field(
        default_factory=dict
    )
    _states: dict[tuple[object, ...], list[States]] = field(default_factory=dict)

    @cached_property
    def draws(self) -> Draws:
        """Depths of this run."""
        return Draws.of(self.config)

    def rank(self, keep: int) -> Ranking:
        """The `keep` fastest divisions of the GPUs, each with its best micro-batch."""
        rejected: list[Rejected] = []
        bounded = []
        for config in self.divisions(rejected):
            try:
                self._parts(config)
                bounded.append((least_time(config, self._batch(config), self.cluster), config))
            except UserError as error:
                rejected.append(self._reject(config, _phrase(error)))
        bounded.sort(key=lambda pair: pair[0].total)
        best: list[Layout] = []
        slower: list[tuple[RunConfig, StepTime]] = []
        for bound, config in bounded:
            if len(best) >= keep and bound.total > best[-1].time.total:
                slower.append((config, bound))
                continue
            found = self._leanest(config)
            if isinstance(found, Rejected):
                rejected.append(found)
                continue
            best = sorted([*best, found], key=_order)
            worse = [b for i, b in enumerate(best) if b.name in [a.name for a in best[:i]]]
            worse += [b for b in best if b not in worse][keep:]
            slower += [(layout.config, layout.time) for layout in worse]
            best = [layout for layout in best if layout not in worse]
        for config, time in slower:
            rejected.append(self._reject(config, why_slower(time, best[0].time), time.total))
        return Ranking(best, rejected)

    def evaluate(self, config: RunConfig) -> Layout:
        """One layout, whether it fits or not. Raises UserError or ValueError if it is not legal."""
        self._check_node(config.parallel)
        batch = self._batch(config)
        memory = self._memory(config, batch)
        stages, _ = self._parts(config)
        states = self._kept(config, batch)
        time, traffic = step_time(config, batch, stages, states, self.cluster, self.draws)
        return Layout(config, batch, memory, time, traffic)

    def fits(self) -> str | None:
        """Name of a layout that fits, with as much checkpointing as there is."""
        for config in self.divisions([]):
            batch = self._batch(config)
            for choice in self._checkpointing(config):
                parallel = choice.parallel
                if "none" in (parallel.recompute_prelude, parallel.recompute_core):
                    continue
                try:
                    if self._memory(choice, batch).total <= self.cluster.usable:
                        return layout_name(choice.parallel, batch)
                except UserError:
                    break
        return None

    def divisions(self, rejected: list[Rejected]) -> Iterator[RunConfig]:
        """Legal divisions of the GPUs, without a choice of checkpointing."""
        gpus = self.cluster.gpus
        zeros = (0, 1, 2, 3) if self.config.optimizer.name == "adamw" else (0,)
        sizes = [n for n in divisors(gpus) if n <= max(MOST_TENSOR, MOST_STAGES)]
        for tp, pp in itertools.product(sizes, sizes):
            if tp > min(MOST_TENSOR, self.cluster.machine.per_node) or pp > MOST_STAGES:
                continue
            if gpus % (tp * pp):
                continue
            dp = gpus // (tp * pp)
            name = f"tp {tp} pp {pp} dp {dp}"
            if self.total % dp:
                reason = f"dp {dp} does not divide the batch of {self.total} sequences"
                rejected.append(Rejected(name, reason, tp, pp))
                continue
            rows = [r for r in divisors(self.total // dp) if r <= MOST_ROWS]
            choices = itertools.product((False, True) if tp > 1 else (False,), zeros, rows)
            for sequence, zero, micro in choices:
                try:
                    yield self._changed(tp, pp, sequence, zero, micro)
                except (UserError, ValueError) as error:
                    rejected.append(Rejected(name, _phrase(error), tp, pp))
                    if not zero:
                        break

    def _changed(self, tp: int, pp: int, sequence: bool, zero: int, micro: int) -> RunConfig:
        parallel = replace(
            self.config.parallel,
            tp=tp,
            pp=pp,
            sequence_parallel=sequence,
            zero_stage=zero,  # type: ignore[arg-type]
            pipeline_layout="balanced",
            recompute_prelude="none",
            recompute_core="none",
            recompute_coda="none",
            deepspeed_config=None,
        )
        train = replace(
            self.config.train,
            global_batch_size=self.total,
            micro_batch_size=micro,
            gradient_accumulation_steps=None,
        )
        self._check_node(parallel)
        return replace(self.config, parallel=parallel, train=train)

    def _check_node(self, parallel: ParallelConfig) -> None:
        if self.cluster.per_node % parallel.tp:
            raise UserError(
                f"parallel.tp={parallel.tp} must divide the {self.cluster.per_node} GPUs of a "
                "node, so that tensor-parallel ranks share a machine; use tp in "
                f"{divisors(self.cluster.per_node)}"
            )

    def _batch(self, config: RunConfig) -> BatchPlan:
        parallel = config.parallel
        return solve_batch(config.train, world=self.cluster.gpus, tp=parallel.tp, pp=parallel.pp)

    def _parts(self, config: RunConfig) -> tuple[list[Stage], list[list[Item]]]:
        """Stages and their parameters."""
        p = config.parallel
        key = (p.tp, p.sequence_parallel, p.pp, p.pipeline_layout, p.pp > 1 and p.repeats_core)
        if key not in self._stages:
            stages = plan_stages(config)
            self._stages[key] = stages, stage_items(config, stages)
        return self._stages[key]

    def _kept(self, config: RunConfig, batch: BatchPlan) -> list[States]:
        p = config.parallel
        repeats = p.pp > 1 and p.repeats_core
        key = (p.tp, p.sequence_parallel, p.pp, p.pipeline_layout, p.zero_stage, repeats)
        if key not in self._states:
            _, items = self._parts(config)
            self._states[key] = all_states(config, items, batch.dp)
        return self._states[key]

    def _memory(self, config: RunConfig, batch: BatchPlan) -> Memory:
        """Of the fullest stage."""
        stages, items = self._parts(config)
        states = self._kept(config, batch)
        units = deepest_grad_units(config, batch, stages, self.draws)
        return max(
            (
                peak_memory(
                    config,
                    batch,
                    stages,
                    items,
                    stage,
                    states=states[stage],
                    grad_units=units[stage],
                )
                for stage in range(len(stages))
            ),
            key=lambda memory: memory.total,
        )

    def _leanest(self, config: RunConfig) -> Layout | Rejected:
        """With the checkpointing that costs least of those that fit."""
        batch = self._batch(config)
        choices = self._checkpointing(config)
        needs: list[tuple[float, Memory]] = []
        for choice in choices:
            memory = self._memory(choice, batch)
            if memory.total <= self.cluster.usable:
                return self.evaluate(choice)
            needs.append((memory.total, memory))
        total, memory = min(needs, key=lambda need: need[0])
        name = layout_name(config.parallel, batch)
        if self.least_memory is None or total < self.least_memory[0]:
            self.least_memory = total, name
        reason = f"needs {total / GIB:.0f} GiB, {_largest(memory)}"
        return Rejected(name, reason, config.parallel.tp, config.parallel.pp)

    def _checkpointing(self, config: RunConfig) -> list[RunConfig]:
        """Choices of checkpointing, those that repeat least first."""
        looped = config.model.architecture == "looped"
        core = CORE if looped else ("none",)
        found = []
        for outside, inside in itertools.product(OUTSIDE, core):
            parallel = replace(
                config.parallel,
                recompute_prelude=outside,  # type: ignore[arg-type]
                recompute_coda=outside if looped else "none",  # type: ignore[arg-type]
                recompute_core=inside,  # type: ignore[arg-type]
            )
            found.append(replace(config, parallel=parallel))
        return sorted(found, key=_repeated)

    def _reject(self, config: RunConfig, reason: str, seconds: float | None = None) -> Rejected:
        parallel = config.parallel
        name = layout_name(parallel, self._batch(config))
        return Rejected(name, reason, parallel.tp, parallel.pp, seconds)


def why_slower(time: StepTime, best: StepTime) -> str:
    """The part of the step that grew most, and by how much the whole did."""
    slower = time.total / best.total - 1
    if abs(slower) < 0.0005:
        return "as fast"
    parts = {
        "recomputed": "recomputation",
        "overhead": "small kernels",
        "waiting": "bubble, uneven ranks",
        "tensor": "tp traffic, stage hops",
        "data": "gradient traffic",
        "update": "weights and update",
    }
    grown = {text: getattr(time, part) - getattr(best, part) for part, text in parts.items()}
    text = max(grown, key=lambda t: grown[t])
    return f"{slower:+.1%}, {text}"


def _order(layout: Layout) -> tuple[float, float]:
    """By time; of equals the one that needs less memory."""
    return round(layout.time.total, 4), layout.memory.total


def _repeated(config: RunConfig) -> float:
    """FLOPs per token that checkpointing executes."""
    return expected_flops(config.model, executed=Recompute.of(config.parallel)).total


def _largest(memory: Memory) -> str:
    parts = {field.name: getattr(memory, field.name) for field in fields(memory)}
    name = max(parts, key=lambda part: parts[part])
    return f"{parts[name] / GIB:.0f} of it {name.replace('_', ' ')}"


def _phrase(error: Exception) -> str:
    """A message without its remedy."""
    return str(error).split(";")[0]
