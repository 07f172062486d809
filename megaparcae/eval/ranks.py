"""The processes that share an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

Item = TypeVar("Item")


@dataclass(frozen=True)
class Ranks:
    """This process among those that evaluate; alone by default."""

    index: int = 0
    count: int = 1

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """Every count-th item, beginning with this process's own number."""
        return items[self.index :: self.count]

    def gather(self, items: list[Item]) -> list[Item]:
        """Everybody's items, on every rank; their order says nothing."""
        if self.count == 1:
            return items
        found: list[list[Item]] = [[] for _ in range(self.count)]
        dist.all_gather_object(found, items)
        return [item for part in found for item in part]
