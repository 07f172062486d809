"""Whether all machines of a run are fit for it and agree, before hours are spent.

`check_agreement` is cheap and part of every start. `preflight` (python -m megaparcae.train
--preflight) also moves data, writes to the disk and computes; it takes some seconds.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist

from megaparcae.checkpoint.ranks import broadcast, gather, together
from megaparcae.config.load import dump_config
from megaparcae.config.schema import RunConfig
from megaparcae.data.dataset import TokenDataset
from megaparcae.data.indexed import quick_fingerprint
from megaparcae.engine.distributed import Process
from megaparcae.errors import UserError
from megaparcae.log import logger
from megaparcae.model.flops import count_parameters
from megaparcae.train.replicas import checksum
from megaparcae.train.safety import TrainingError

PACKAGES = ("megaparcae", "torch", "deepspeed", "numpy")
SKEW_SECONDS = 5.0
"""Clocks further apart are worth a word: logs of several machines no longer fit together."""
LARGE = 1 << 24
"""Elements (64 MiB in fp32) of the sum whose speed is measured."""
DISK_BYTES = 1 << 27
"""Written by the first rank to measure the disk."""
BYTES_PER_PARAMETER = 12
"""Of a checkpoint: an fp32 weight and at most two states."""
SIZE = 1024
"""Rows and columns of the product that all ranks must compute alike."""


@dataclass(frozen=True)
class Facts:
    """What must be equal on all ranks, and where this one is."""

    host: str
    equal: dict[str, str]
    """What it is, such as `torch` -> its value."""


def local_facts(config: RunConfig, datasets: Sequence[TokenDataset]) -> Facts:
    """Versions, configuration and shards as this rank sees them."""
    python = ".".join(platform.python_version_tuple()[:2])
    equal = {name: version(name) for name in PACKAGES} | {"Python": python}
    equal["configuration"] = hashlib.sha256(dump_config(config).encode()).hexdigest()[:12]
    for shard in {one.shard.prefix: one.shard for data in datasets for one in data.sets}.values():
        for path in (shard.bin_path, shard.idx_path):
            equal[str(path)] = f"fingerprint {quick_fingerprint(path)[:12]}"
    return Facts(socket.gethostname(), equal)


def check_agreement(config: RunConfig, datasets: Sequence[TokenDataset]) -> list[str]:
    """The ranks' hosts. Raises UserError on all of them when versions, options or data differ."""
    everyone = gather(local_facts(config, datasets))
    first = everyone[0]
    for rank, facts in enumerate(everyone):
        difference = first_difference(first.equal, facts.equal)
        if difference is not None:
            name, here, there = difference
            raise UserError(
                f"{name} differs: rank 0 ({first.host}) has {here}, rank {rank} ({facts.host}) has "
                f"{there}; make them equal on all machines"
            )
    return [facts.host for facts in everyone]


def first_difference(a: Mapping[str, str], b: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Name and both values of the first entry that differs, or None."""
    for name in [*a, *b]:
        here, there = a.get(name, "none"), b.get(name, "none")
        if here != there:
            return name, here, there
    return None


def preflight(config: RunConfig, process: Process, datasets: Sequence[TokenDataset]) -> None:
    """All checks, one line each. Raises UserError or TrainingError at the first that fails."""
    hosts = check_agreement(config, datasets)
    logger.info("versions, options, shards  equal on %d ranks, %d hosts", *_counts(hosts))
    logger.info("clocks                     %.3f s apart", clock_skew(hosts))
    logger.info("sums over all ranks        right, %.2f GB/s", check_sums(process, hosts))
    slowest = check_products(process, hosts)
    logger.info(
        "matrix products            the same bits everywhere, %.3g TFLOP/s or more", slowest
    )
    logger.info("%s", check_disk(config, process))


def _counts(hosts: list[str]) -> tuple[int, int]:
    return len(hosts), len(set(hosts))


def clock_skew(hosts: Sequence[str]) -> float:
    """Largest difference of two machines' clocks in seconds; a warning when it is large."""
    if dist.is_initialized():
        dist.barrier()
    times = gather(time.time())
    skew = max(times) - min(times)
    if skew > SKEW_SECONDS:
        late, early = (hosts[times.index(pick(times))] for pick in (max, min))
        logger.warning("the clock of %s is %.1f s ahead of that of %s", late, skew, early)
    return skew


def check_sums(process: Process, hosts: Sequence[str]) -> float:
    """All-reduce whole numbers of several sizes; GB/s on the bus for the largest.

    Raises TrainingError when a sum is wrong.
    """
    world = process.world_size
    wanted = world * (world + 1) / 2
    seconds = 0.0
    for count in (1, 4097, LARGE, LARGE):
        values = torch.full((count,), process.rank + 1.0, device=process.device)
        started = time.perf_counter()
        if dist.is_initialized():
            dist.all_reduce(values)
        float(values[0])  # a GPU has summed by then
        seconds = time.perf_counter() - started
        for rank, wrong in enumerate(gather(int((values != wanted).sum()))):
            if wrong:
                raise TrainingError(
                    f"rank {rank} ({hosts[rank]}) got {wrong} wrong ones of {count} sums over "
                    f"{world} ranks; check the network between the machines and its drivers"
                )
    moved = 4 * LARGE * 2 * (world - 1) / world
    return moved / seconds / 1e9


def check_products(process: Process, hosts: Sequence[str]) -> float:
    """A product of the same matrices on all ranks; TFLOP/s of the slowest.

    Raises TrainingError when one has other bits though its device is of the same kind.
    """
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(SIZE, SIZE, generator=generator).to(process.device)
    for _ in range(3):
        started = time.perf_counter()
        result = checksum(a @ a)
        seconds = time.perf_counter() - started
    cuda = process.device.type == "cuda"
    kind = torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine()
    everyone = gather((kind, result))
    for rank, (other, value) in enumerate(everyone):
        if other == everyone[0][0] and value != everyone[0][1]:
            raise TrainingError(
                f"rank {rank} ({hosts[rank]}) computes another matrix product than rank 0 "
                f"({hosts[0]}) on the same kind of device ({kind}); leave one of the machines out"
            )
    return float(2 * SIZE**3 / max(gather(seconds)) / 1e12)


def check_disk(config: RunConfig, process: Process) -> str:
    """checkpoint.dir is one folder for all ranks, can be written, and has room; a line on it."""
    folder = Path(config.checkpoint.dir)
    probe = folder / ".tmp-preflight"
    first = process.rank == 0
    speed = broadcast(together(lambda: _write_probe(probe) if first else 0.0)[0])
    try:
        seen = gather((probe.exists(), socket.gethostname()))
    finally:
        together(lambda: probe.unlink() if first else None)
    blind = next((host for there, host in seen if not there), None)
    if blind is not None:
        raise UserError(
            f"checkpoint.dir={folder} is not the same folder on {blind} and on {seen[0][1]}; "
            "choose one on a file system that all machines share"
        )
    size = BYTES_PER_PARAMETER * count_parameters(config.model).total
    wanted = size * (config.checkpoint.keep + 1)
    free = shutil.disk_usage(folder).free
    line = (
        f"{folder}: {speed / 1e6:.0f} MB/s, {free / 1e9:.1f} GB free; a checkpoint takes "
        f"{size / 1e9:.2f} GB"
    )
    if free < wanted:
        line += f", and checkpoint.keep={config.checkpoint.keep} needs {wanted / 1e9:.2f} GB"
    return line


def _write_probe(path: Path) -> float:
    """Bytes per second that reach the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    block = bytes(1 << 20)
    started = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(DISK_BYTES // len(block)):
            file.write(block)
        os.fsync(file.fileno())
    return DISK_BYTES / (time.perf_counter() - started)
