"""Weights that several ranks hold must be equal bit for bit: a check that finds a bad machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from megaparcae.checkpoint.ranks import gather
from megaparcae.parallel.shard import spec_of
from megaparcae.train.safety import TrainingError

CHUNK = 4096
"""Elements whose bits are added up before their place counts."""
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
SHOWN = 4

Place = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Canonical name, offset in the full tensor, and local shape: what replicas have in common."""


@torch.no_grad()
def checksum(tensor: Tensor) -> int:
    """A number of the bits and their order, by integer arithmetic: the same on any device."""
    bits = tensor.detach().contiguous().view(-1).view(INTEGERS[tensor.element_size()])
    whole = bits.numel() // CHUNK * CHUNK
    rows = [bits[:whole].view(-1, CHUNK), bits[whole:].view(1, -1)]
    sums = torch.cat([part.sum(dim=1, dtype=torch.int64) for part in rows])
    place = torch.arange(1, len(sums) + 1, device=sums.device)
    return int((sums * place).sum())


def local_checksums(model: nn.Module) -> dict[Place, int]:
    """Of this rank's weights; ZeRO-3's partitions have no replicas and are left out."""
    return {
        (spec.name, spec.offset, tuple(parameter.shape)): checksum(parameter)
        for parameter in model.parameters()
        if not hasattr(parameter, "ds_id")
        for spec in [spec_of(parameter)]
    }


def check_replicas(model: nn.Module, step: int, hosts: Sequence[str]) -> None:
    """Compare data-parallel copies, tensor-parallel copies and tied weights of all stages.

    All ranks call it together. Raises TrainingError on all of them when one differs.
    """
    different = find_differences(gather(local_checksums(model)))
    if not different:
        return
    lines = [
        f"{name} has {len(groups)} values on ranks {' / '.join(_ranks(g, hosts) for g in groups)}"
        for name, groups in list(different.items())[:SHOWN]
    ]
    more = f" and {len(different) - SHOWN} more" if len(different) > SHOWN else ""
    raise TrainingError(
        f"after step {step} copies of weights differ that must be equal: {'; '.join(lines)}{more}; "
        "a machine may compute wrongly: check it (--preflight) and resume from a checkpoint before"
    )


def find_differences(everyone: Sequence[Mapping[Place, int]]) -> dict[str, list[list[int]]]:
    """Parameter -> its ranks, grouped by value, the largest group first; of those that differ."""
    holders: dict[Place, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, sums in enumerate(everyone):
        for place, value in sums.items():
            holders[place][value].append(rank)
    return {
        place[0]: sorted(values.values(), key=len, reverse=True)
        for place, values in holders.items()
        if len(values) > 1
    }


def _ranks(group: list[int], hosts: Sequence[str]) -> str:
    shown = ",".join(map(str, group[:8])) + (",..." if len(group) > 8 else "")
    names = sorted({hosts[rank] for rank in group})
    return f"{shown} ({names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''})"
