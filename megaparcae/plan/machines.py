"""Well-known GPU machines and what is assumed of them. No torch.

Peaks are dense bf16 products, links and memories are per GPU and one direction, from the makers'
data sheets; memory is what the driver reports. Everything can be changed on the command line.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from megaparcae.errors import UserError

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A kind of GPU and the node it comes in."""

    device: str
    """What its name contains, as PyTorch reports it."""
    memory: float
    """GiB."""
    peak: float
    """TFLOP/s in bf16, without sparsity."""
    fp32: float
    """TFLOP/s in fp32, without TF32."""
    memory_speed: float
    """GB/s."""
    intra: float
    """GB/s to the other GPUs of the node (NVLink or PCIe)."""
    inter: float
    """GB/s of this GPU's share of the network cards."""
    per_node: int = 8


MACHINES = {
    "a100-40": Machine(
        device="A100", memory=39.4, peak=312, fp32=19.5, memory_speed=1555, intra=300, inter=25
    ),
    "a100-80": Machine(
        device="A100", memory=79.2, peak=312, fp32=19.5, memory_speed=2039, intra=300, inter=25
    ),
    "h100": Machine(
        device="H100", memory=79.6, peak=989, fp32=67, memory_speed=3350, intra=450, inter=50
    ),
    "h200": Machine(
        device="H200", memory=139.8, peak=989, fp32=67, memory_speed=4800, intra=450, inter=50
    ),
    "b200": Machine(
        device="B200", memory=179.0, peak=2250, fp32=80, memory_speed=8000, intra=900, inter=50
    ),
    "l40s": Machine(
        device="L40S",
        memory=44.7,
        peak=362,
        fp32=91.6,
        memory_speed=864,
        intra=32,
        inter=6.25,
        per_node=4,
    ),
    "rtx4090": Machine(
        device="RTX 4090", memory=23.6, peak=165, fp32=82.6, memory_speed=1008, intra=32, inter=3.1
    ),
}
"""By name. A share of a network card: one 200 or 400 Gb/s card per GPU in DGX and HGX nodes."""


def peak_tflops(device: str) -> float | None:
    """Of a device as PyTorch names it; None when the table does not have it."""
    return next((m.peak for m in MACHINES.values() if m.device in device), None)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPUs of one kind, and how much of their data sheet is expected."""

    name: str
    machine: Machine
    gpus: int
    mfu: float = 0.4
    """Share of the peak while a GPU computes; communication and waiting come on top."""
    link_share: float = 0.8
    """Share of a link's speed that a large transfer reaches."""
    launch: float = 5e-6
    """Seconds to start a kernel: what small tensors cost at least."""
    latency: float = 20e-6
    """Seconds of a collective of no bytes, and of each further node it reaches."""
    reserve: float = 0.1
    """Share of the memory that is left free: CUDA, NCCL's buffers, fragmentation, our error."""
    dollars: float | None = None
    """Price of a GPU-hour."""

    def __post_init__(self) -> None:
        for name, value in (("gpus", self.gpus), ("per-node", self.machine.per_node)):
            if value < 1:
                raise UserError(f"--{name}={value} must be at least 1")
        if self.gpus > self.machine.per_node and self.gpus % self.machine.per_node:
            raise UserError(
                f"--gpus={self.gpus} fill no whole number of nodes of {self.machine.per_node}; "
                f"use a multiple of {self.machine.per_node}, or change --per-node"
            )
        for name, share in (("mfu", self.mfu), ("link-share", self.link_share)):
            if not 0 < share <= 1:
                raise UserError(f"--{name}={share} must be above 0 and at most 1, such as 0.4")
        if not 0 <= self.reserve < 1:
            raise UserError(f"--reserve={self.reserve} must be in [0, 1), such as 0.1")

    @property
    def per_node(self) -> int:
        """GPUs of a node that are used."""
        return min(self.gpus, self.machine.per_node)

    @property
    def usable(self) -> float:
        """Bytes of a GPU that a run may fill."""
        return self.machine.memory * (1 - self.reserve) * GIB

    def speed(self, precision: Literal["bf16", "fp32"]) -> float:
        """FLOP/s of a GPU while it computes."""
        peak = self.machine.peak if precision == "bf16" else self.machine.fp32
        return peak * 1e12 * self.mfu

    def bandwidth(self, ranks: int, stride: int) -> float:
        """Bytes/s of a rank in a ring over `ranks` GPUs that lie `stride` apart.

        Between nodes the ring uses the network cards of all its ranks in a node: NCCL runs as many
        rings side by side. The other GPUs' cards serve the rings of other groups.
        """
        if ranks * stride <= self.per_node:
            return self.machine.intra * 1e9 * self.link_share
        cards = max(1, self.per_node // stride)
        return min(self.machine.intra, self.machine.inter * cards) * 1e9 * self.link_share

    def wait(self, ranks: int, stride: int) -> float:
        """Seconds of a collective before its first byte."""
        nodes = -(-ranks * stride // self.per_node)
        return self.latency * min(ranks, nodes)


def find_machine(name: str, changes: dict[str, float | int | None]) -> Machine:
    """An entry of the table with the given changes; UserError when there is no such name."""
    if name not in MACHINES:
        raise UserError(f"--machine={name}: choose {', '.join(MACHINES)}, and change what differs")
    machine = replace(MACHINES[name], **{k: v for k, v in changes.items() if v is not None})  # type: ignore[arg-type]
    for option in ("memory", "peak", "memory_speed", "intra", "inter"):
        if getattr(machine, option) <= 0:
            raise UserError(f"--{option.replace('_', '-')} must be positive")
    return machine
