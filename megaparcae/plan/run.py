"""From a config and a cluster to the best layout, or to what would be needed. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megaparcae.config.batch import solve_batch
from megaparcae.config.load import dump_config
from megaparcae.config.schema import RunConfig
from megaparcae.errors import UserError
from megaparcae.plan.machines import GIB, MACHINES, Cluster
from megaparcae.plan.search import Layout, Planner, Ranking

MOST_GPUS = 4096


@dataclass(frozen=True)
class Plan:
    """What came out."""

    cluster: Cluster
    ranking: Ranking
    own: Layout | None
    """The config's own layout, when it is legal here."""
    steps: int

    @property
    def best(self) -> Layout:
        """The fastest that fits."""
        return self.ranking.best[0]

    @property
    def tokens(self) -> int:
        """Of the whole run."""
        batch, model = self.best.batch, self.best.config.model
        return self.steps * batch.global_batch * model.sequence_length

    def days(self, layout: Layout) -> float:
        """Of training, without validation and checkpoints."""
        return self.steps * layout.time.total / 86400

    def run_yaml(self) -> str:
        """The run with the best layout, for `python -m megaparcae.train --config`."""
        train = replace(self.best.config.train, num_steps=self.steps)
        head = (
            f"# {self.best.name}, planned for {self.cluster.gpus} x {self.cluster.name}: "
            f"{self.best.memory.total / GIB:.1f} GiB per GPU,\n"
            f"# {self.best.time.total:.3f} s per step, {self.days(self.best):.1f} days at "
            f"{self.cluster.mfu:.0%} of the peak (predicted).\n"
        )
        return head + dump_config(replace(self.best.config, train=train))


def make_plan(
    config: RunConfig, cluster: Cluster, *, tokens: float | None, keep: int, as_is: bool
) -> Plan:
    """Rank the layouts. Raises UserError, with the nearest thing that would do, when none fits."""
    if keep < 1:
        raise UserError(f"--top={keep} must be at least 1")
    total = batch_size(config, cluster)
    planner = Planner(config, cluster, total)
    own: Layout | None
    if as_is:
        own = planner.evaluate(config)
        if own.memory.total > cluster.usable:
            raise refusal(planner, own.memory.total, own.name)
        ranking = Ranking([own], [])
    else:
        own = own_layout(planner)
        ranking = planner.rank(keep)
    if not ranking.best:
        raise refusal(planner, *(planner.least_memory or (math.inf, "")))
    per_step = total * config.model.sequence_length
    steps = config.train.num_steps if tokens is None else math.ceil(tokens / per_step)
    if steps < 1:
        raise UserError(f"--tokens={tokens:g} must be positive, such as 1e11")
    return Plan(cluster, ranking, own, steps)


def batch_size(config: RunConfig, cluster: Cluster) -> int:
    """Sequences of an optimizer step: they are the run's, not the plan's to choose."""
    if config.train.global_batch_size is not None:
        return config.train.global_batch_size
    parallel = config.parallel
    return solve_batch(
        config.train, world=cluster.gpus, tp=parallel.tp, pp=parallel.pp
    ).global_batch


def own_layout(planner: Planner) -> Layout | None:
    """The config as it stands, if these GPUs can be divided that way and it fits."""
    try:
        own = planner.evaluate(planner.config)
    except UserError:
        return None
    return own if own.memory.total <= planner.cluster.usable else None


def refusal(planner: Planner, needed: float, name: str) -> UserError:
    """Why nothing fits, and the nearest that would."""
    cluster, config = planner.cluster, planner.config
    here = f"{cluster.gpus} x {cluster.name}"
    if math.isinf(needed):
        near = nearest_gpus(planner)
        return UserError(
            f"no layout of {here} divides the batch of {planner.total} sequences and this model; "
            f"use --gpus={near}"
        )
    remedies = [*more_gpus(planner), *larger_gpus(planner)]
    if not remedies:
        remedies = ["a shorter model.sequence_length, or a smaller model"]
    return UserError(
        f"{config.name if config.preset is None else config.preset} does not fit on {here}: "
        f"{name} needs {needed / GIB:.1f} GiB per GPU, and {cluster.usable / GIB:.1f} of "
        f"{cluster.machine.memory} may be filled; use {', or '.join(remedies)}"
    )


def more_gpus(planner: Planner) -> list[str]:
    """The smallest doubling of the cluster that has room."""
    gpus = planner.cluster.gpus * 2
    while gpus <= MOST_GPUS:
        found = _try(planner, replace(planner.cluster, gpus=gpus))
        if found:
            return [f"--gpus={gpus} ({found})"]
        gpus *= 2
    return []


def larger_gpus(planner: Planner) -> list[str]:
    """The machine of the table with the least memory that has room."""
    machines = sorted(MACHINES.items(), key=lambda entry: entry[1].memory)
    for name, machine in machines:
        if machine.memory <= planner.cluster.machine.memory:
            continue
        try:
            found = _try(planner, replace(planner.cluster, name=name, machine=machine))
        except UserError:  # the GPUs fill no whole nodes
            continue
        if found:
            return [f"--machine={name} ({found})"]
    return []


def nearest_gpus(planner: Planner) -> int:
    """A number of GPUs near the given one that can be divided."""
    gpus = planner.cluster.gpus
    for distance in range(1, gpus):
        for near in (gpus - distance, gpus + distance):
            try:
                cluster = replace(planner.cluster, gpus=near)
            except UserError:
                continue
            if any(True for _ in Planner(planner.config, cluster, planner.total).divisions([])):
                return near
    return 1


def _try(planner: Planner, cluster: Cluster) -> str | None:
    return Planner(planner.config, cluster, planner.total).fits()
