"""Joining the other processes: the one place that looks at a launcher's environment."""

from __future__ import annotations

import os
import socket
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


class MeetingError(RuntimeError):
    """The ranks of a run did not come together."""

    def __init__(self, rank: int, world_size: int, error: BaseException) -> None:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = str(error).strip().split("\n")[0]
        super().__init__(
            f"{socket.gethostname()}: rank {rank} did not meet the other {world_size - 1} at "
            f"{place} ({reason}); see whether all were started, reach that address, and still run"
        )


def set_deterministic(wanted: bool) -> None:
    """Let the same run give the same bits again: kernels with a fixed order of sums only."""
    if wanted != torch.are_deterministic_algorithms_enabled():  # it imports torch's compiler: 2 s
        torch.use_deterministic_algorithms(wanted)
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by the first product
        torch.backends.cudnn.benchmark = False


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
    world_size = int(os.environ["WORLD_SIZE"])
    if not torch.distributed.is_initialized():
        try:
            deepspeed.init_distributed("nccl" if kind == "cuda" else "gloo", verbose=False)
        except RuntimeError as error:
            raise MeetingError(rank, world_size, error) from error
    return Process(rank, world_size, device)


def leave_together(code: int) -> NoReturn:
    """End all ranks at once with this code: Slurm and DeepSpeed's launcher kill the others when
    one ends, and then report that they were killed."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
