"""Ranks that make the others wait: who, how much, and whether deeper samples are the reason."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megaparcae.checkpoint.ranks import gather
from megaparcae.config.schema import ModelConfig
from megaparcae.log import logger
from megaparcae.parallel.mesh import Mesh
from megaparcae.train.batches import HostBatch
from megaparcae.train.sinks import Record

SLOW = 1.3
"""A rank whose forward passes take this many times those of its peers is a straggler."""
QUIET = 50
"""Reports before the same rank is named on the console again."""


class ForwardTimer:
    """Seconds of a model's own forward passes in training. They wait for no data-parallel rank, so
    they tell who is slow where the time of a step is the same for all."""

    def __init__(self, module: nn.Module) -> None:
        self.seconds = 0.0
        self.began = 0.0
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end)

    def _begin(self, module: nn.Module, _inputs: Any) -> None:
        if torch.cuda.is_initialized():
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            self.events.append(pair)
        self.began = time.perf_counter()

    def _end(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        if not module.training:
            del self.events[-1:]
        elif self.events:
            self.events[-1][1].record()
        else:
            self.seconds += time.perf_counter() - self.began

    def take(self) -> float:
        """Seconds since the last call."""
        for begin, end in self.events:
            end.synchronize()
            self.seconds += begin.elapsed_time(end) / 1000
        seconds, self.seconds = self.seconds, 0.0
        self.events.clear()
        return seconds


@dataclass(frozen=True)
class Straggler:
    """The slowest rank, measured by the median of its peers: ranks that run the same layers."""

    rank: int
    slower: float
    """Its forward seconds, in those of its peers."""
    deeper: float
    """Its layers to run, in those of its peers."""

    @property
    def cause(self) -> str | None:
        """None when nobody is slow; depth when half of what is lost, or more, is its samples'."""
        if self.slower < SLOW:
            return None
        return "depth" if self.deeper - 1 >= (self.slower - 1) / 2 else "machine"


def find_straggler(
    seconds: Sequence[float], work: Sequence[float], peers: Sequence[Sequence[int]]
) -> Straggler | None:
    """The rank that is slowest among its peers; None when no rank has one."""
    found = []
    for group in peers:
        for rank in group if len(group) > 1 else ():
            others = [other for other in group if other != rank]
            ratios = [
                values[rank] / max(statistics.median(values[o] for o in others), 1e-9)
                for values in (seconds, work)
            ]
            found.append(Straggler(rank, *ratios))
    return max(found, key=lambda s: s.slower, default=None)


class StragglerReport:
    """Compares all ranks at an interval. Every rank takes part."""

    def __init__(self, module: nn.Module, model: ModelConfig, mesh: Mesh) -> None:
        self.timer = ForwardTimer(module)
        self.model, self.mesh = model, mesh
        self.work = 0.0
        self.hosts = gather(socket.gethostname())
        per_stage = mesh.world_size // mesh.pp.size
        self.peers = [
            range(stage * per_stage, (stage + 1) * per_stage) for stage in range(mesh.pp.size)
        ]
        self.said: dict[tuple[int, str], int] = {}
        self.reports = 0
        self.is_warm_up = True

    def note(self, batches: Sequence[HostBatch]) -> None:
        """A step's micro-batches have run: their layers, counted once for every row."""
        m = self.model
        for batch in batches:
            loops = sum(batch.num_no_grad) + sum(batch.num_grad)
            around = m.num_prelude_layers + m.num_coda_layers
            self.work += len(batch.sample_ids) * around + loops * m.num_core_layers

    def record(self, step: int) -> Record | None:
        """Since the last call; None when no rank has a peer, and the first time: that is slow
        everywhere, for reasons of its own."""
        mine = self.timer.take(), self.work
        self.work = 0.0
        if self.is_warm_up:
            self.is_warm_up = False
            return None
        seconds, work = zip(*gather(mine), strict=True)
        slowest = find_straggler(seconds, work, self.peers)
        if slowest is None:
            return None
        self.reports += 1
        host = self.hosts[slowest.rank]
        if slowest.cause is not None:
            self._say(slowest, host, step)
        return {
            "kind": "ranks",
            "step": step,
            "slowest_rank": slowest.rank,
            "host": host,
            "forward_seconds": seconds[slowest.rank],
            "slower": slowest.slower,
            "deeper": slowest.deeper,
            "cause": slowest.cause,
        }

    def _say(self, slowest: Straggler, host: str, step: int) -> None:
        assert slowest.cause is not None
        key = slowest.rank, slowest.cause
        if self.reports < self.said.get(key, 0):
            return
        self.said[key] = self.reports + QUIET
        why = (
            f"its samples are {slowest.deeper:.2f} times as deep"
            if slowest.cause == "depth"
            else f"its samples are not ({slowest.deeper:.2f} times): look at that machine"
        )
        logger.info(
            "step %d: rank %d (%s) is slow, %.2f times its peers; %s",
            step,
            slowest.rank,
            host,
            slowest.slower,
            why,
        )
