"""All ranks act, fail and decide together; without a process group the world is one rank.

`group` holds all ranks too: the default one, or one of its own for a thread beside the training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException

from megaparcae.errors import UserError

T = TypeVar("T")


def rank() -> int:
    """This process's number."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def file_group() -> ProcessGroup | None:
    """A gloo group of all ranks: its collectives may run in a thread beside the training's."""
    return dist.new_group(backend="gloo") if dist.is_initialized() else None


def broadcast(value: T, group: ProcessGroup | None = None) -> T:
    """Rank 0's value on all ranks."""
    box = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def gather(mine: T, group: ProcessGroup | None = None) -> list[T]:
    """Every rank's value, by rank."""
    everyone: list[Any] = [mine] * world_size()
    if dist.is_initialized():
        dist.all_gather_object(everyone, mine, group=group)
    return everyone


def together(action: Callable[[], T], group: ProcessGroup | None = None) -> list[T]:
    """Run the action on every rank; its results by rank, or on all ranks the first one's error.

    Without this, ranks would wait for one that has failed until the process group gives up.
    """
    result: T | None = None
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:
        failure = error
    outcomes: list[Any] = gather((result, failure and _portable(failure)), group)
    for _, reason in outcomes:
        if reason is not None:
            raise reason from failure
    return [value for value, _ in outcomes]


def from_dcp(error: CheckpointException) -> Exception:
    """DCP's exception, which all ranks raise and `except Exception` misses, as its cause.

    A write that fails is an OSError: of a full disk torch only says that a position is unexpected.
    """
    number, (cause, _) = next(iter(error.failures.items()))
    if error.args[0] == "write" and not isinstance(cause, OSError):
        return OSError(f"a file of rank {number} could not be written ({cause})")
    return _portable(cause)


def _portable(error: BaseException) -> Exception:
    """An error that can be sent to other ranks, of the kind that decides how a command ends."""
    if isinstance(error, UserError):
        return UserError(str(error))
    if isinstance(error, OSError):
        return OSError(str(error))
    return RuntimeError(f"{type(error).__name__}: {error}")
