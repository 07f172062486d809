"""Joining the other processes: the one place that looks at a launcher's environment."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import NoReturn

import torch

from megaparcae.errors import UserError


@dataclass(frozen=True)
class Process:
    """This process among all of the run."""

    rank: int
    world_size: int
    device: torch.device


def choose_device(wanted: str) -> str:
    """`cpu` or `cuda` from train.device; UserError when there is no GPU to use."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise UserError(
            "train.device=cuda, but this machine shows no GPU to PyTorch; "
            "use train.device=cpu, or install a CUDA build of PyTorch"
        )
    return "cuda" if available and wanted != "cpu" else "cpu"


def init_distributed(wanted_device: str) -> Process:
    """Join the process group that RANK, LOCAL_RANK, WORLD_SIZE and MASTER_* describe."""
    kind = choose_device(wanted_device)
    os.environ.setdefault("DS_ACCELERATOR", kind)
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)

    import deepspeed  # after DS_ACCELERATOR, which it reads on import
    import deepspeed.ops

    if kind == "cpu":  # its shared-memory collectives would be compiled on first use
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not torch.distributed.is_initialized():
        deepspeed.init_distributed("nccl" if kind == "cuda" else "gloo", verbose=False)
    return Process(rank, int(os.environ["WORLD_SIZE"]), device)


def leave_together(code: int) -> NoReturn:
    """End all ranks at once with this code: Slurm and DeepSpeed's launcher kill the others when
    one ends, and then report that they were killed."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
