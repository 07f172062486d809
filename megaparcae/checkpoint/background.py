"""Saves beside the training: host copies of what is saved, and a thread that writes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megaparcae.parallel.shard import Fragment


class HostCopies:
    """Memory of the host that every save uses again: its pages exist, and a GPU copies into them
    at the speed of its bus. As large as this rank's part of a checkpoint."""

    def __init__(self) -> None:
        self.flat: dict[torch.dtype, Tensor] = {}

    def reserve(self, fragments: Sequence[Fragment]) -> None:
        """Make room. May take as long as the copy itself: the pages are touched here."""
        for dtype, count in _elements(fragments).items():
            if self.flat.get(dtype, torch.empty(0)).numel() < count:
                self.flat[dtype] = torch.zeros(count, dtype=dtype).fill_(0)
                if fragments[0].tensor.is_cuda:
                    _pin(self.flat[dtype])

    @torch.no_grad()
    def take(self, fragments: Sequence[Fragment]) -> list[Fragment]:
        """The fragments as they are now; valid until the next call."""
        self.reserve(fragments)
        used = dict.fromkeys(self.flat, 0)
        copies = []
        for fragment in fragments:
            live, begin = fragment.tensor, used[fragment.tensor.dtype]
            used[live.dtype] = begin + live.numel()
            copy = self.flat[live.dtype][begin : begin + live.numel()].view(live.shape)
            copy.copy_(live, non_blocking=True)
            copies.append(replace(fragment, tensor=copy))
        if fragments and fragments[0].tensor.is_cuda:
            torch.cuda.synchronize()
        return copies


def _elements(fragments: Sequence[Fragment]) -> dict[torch.dtype, int]:
    counts: dict[torch.dtype, int] = {}
    for fragment in fragments:
        dtype = fragment.tensor.dtype
        counts[dtype] = counts.get(dtype, 0) + fragment.tensor.numel()
    return counts


def _pin(memory: Tensor) -> None:
    """Lock the pages. PyTorch's own allocator would round the size up to a power of two."""
    torch.cuda.cudart().cudaHostRegister(
        memory.data_ptr(), memory.numel() * memory.element_size(), 0
    )


class Task:
    """A function in a thread: its result, or what it raised, when it is awaited."""

    def __init__(self, function: Callable[[], str | None] | Callable[[], None]) -> None:
        self.function = function
        self.result: str | None = None
        self.failure: BaseException | None = None
        self.seconds = 0.0
        self.thread = threading.Thread(target=self._run, name="save", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            self.result = self.function()
        except BaseException as failure:
            self.failure = failure
        self.seconds = time.perf_counter() - started

    def over(self) -> bool:
        """Whether it has ended, well or not."""
        return not self.thread.is_alive()

    def wait(self) -> str | None:
        """Its result. Raises what it raised."""
        self.thread.join()
        if self.failure is not None:
            raise self.failure
        return self.result
