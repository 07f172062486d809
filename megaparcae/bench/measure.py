"""Timing side by side, peak memory, and functions run in processes of their own."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, TypeVar

import torch

from megaparcae.engine.distributed import choose_device, init_distributed
from megaparcae.errors import UserError
from megaparcae.log import setup_logging

Result = TypeVar("Result")
Variant = Callable[[], float]
"""Does the work once; the seconds it took."""


@dataclass(frozen=True)
class Ratio:
    """How often one number goes into another, over the pairs of the repeats."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Timings:
    """Seconds of each repeat, by variant; the variants took turns: A B A B ..."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        """Of the repeats."""
        return statistics.median(self.seconds[name])

    def spread(self, name: str) -> float:
        """(largest - smallest) / median."""
        times = self.seconds[name]
        return (max(times) - min(times)) / self.median(name)

    def speedup(self, name: str, baseline: str) -> Ratio:
        """Seconds of `baseline` over those of `name`; neighbours in time are compared, so that a
        machine that becomes slower in between doesn't count."""
        pairs = zip(self.seconds[baseline], self.seconds[name], strict=True)
        ratios = sorted(slow / fast for slow, fast in pairs)
        return Ratio(statistics.median(ratios), ratios[0], ratios[-1])

    def rows(self, baseline: str, **amounts: float) -> list[dict[str, Any]]:
        """A table: each variant's seconds, its `amounts` per second and speed-up over baseline."""
        table = []
        for name in self.seconds:
            speedup = self.speedup(name, baseline)
            row: dict[str, Any] = {"variant": name, "seconds": self.median(name)}
            row |= {f"{unit}_per_second": n / self.median(name) for unit, n in amounts.items()}
            row |= {"spread": self.spread(name), "speedup": speedup.median}
            table.append(row | {"speedup_low": speedup.low, "speedup_high": speedup.high})
        return table


def take_turns(variants: Mapping[str, Variant], repeats: int, warmups: int = 1) -> Timings:
    """Run the variants in turn; the first `warmups` rounds don't count."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for round_number in range(warmups + repeats):
        for name, variant in variants.items():
            took = variant()
            if round_number >= warmups:
                seconds[name].append(took)
    return Timings(seconds)


def timed(work: Callable[[], object]) -> Variant:
    """The wall time of `work`, what it started on a GPU included."""

    def run() -> float:
        synchronize()
        begin = time.perf_counter()
        work()
        synchronize()
        return time.perf_counter() - begin

    return run


def synchronize() -> None:
    """Wait for the GPU, where one is in use."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class PeakMemory:
    """Highest memory in use since it was made, above what was in use then: bytes.

    Of the GPU's allocator where one is in use, else the resident memory of this process.
    """

    def __init__(self) -> None:
        self.on_gpu = torch.cuda.is_initialized()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
            return
        ctypes.CDLL(None).malloc_trim(0)  # what is free goes back, or it would hide what is used
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again at VmRSS
        self.before = _resident("VmRSS")

    def bytes(self) -> int:
        """So far."""
        peak = torch.cuda.max_memory_allocated() if self.on_gpu else _resident("VmHWM")
        return peak - self.before


def _resident(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def in_processes(
    function: Callable[..., Result], arguments: Sequence[tuple[Any, ...]], preload: str = __name__
) -> list[Result]:
    """function(*arguments[i]) in a new process each, at the same time; what each returned.

    `function` is a module's. Raises what the first to fail raised. On CPU the processes are forked
    from one that has imported `preload` and nothing else; CUDA doesn't survive a fork.
    """
    if torch.cuda.is_available():
        context: BaseContext = multiprocessing.get_context("spawn")
    else:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([preload])
    with ProcessPoolExecutor(len(arguments), context) as pool:
        futures = [pool.submit(function, *some) for some in arguments]
        for done in wait(futures, return_when=FIRST_EXCEPTION).done:
            done.result()
        return [future.result() for future in futures]


def on_ranks(
    function: Callable[..., Result],
    world: int,
    *arguments: Any,
    threads: int = 0,
    device: str = "auto",
) -> list[Result]:
    """function(process, *arguments) on every rank of a process group; by rank.

    `threads` 0 shares the cores out among the ranks; `device` is the run's train.device. Raises
    UserError when there are fewer GPUs than ranks.
    """
    if choose_device(device) == "cuda" and torch.cuda.device_count() < world:
        raise UserError(
            f"{world} ranks need as many GPUs, this machine shows {torch.cuda.device_count()}; use "
            "--set train.device=cpu to measure on the CPU"
        )
    threads = threads or max(1, (os.cpu_count() or 1) // world)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    return in_processes(
        _on_rank,
        [(rank, place, threads, device, function, arguments) for rank in range(world)],
        preload="megaparcae.bench.runs",
    )


def _on_rank(
    rank: int,
    place: dict[str, str],
    threads: int,
    device: str,
    function: Callable[..., Any],
    arguments: Any,
) -> Any:
    setup_logging(rank, "WARNING")
    torch.set_num_threads(threads)
    os.environ |= place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    process = init_distributed(device)
    try:
        return function(process, *arguments)
    finally:  # and if this rank has failed, the others notice
        torch.distributed.destroy_process_group()
