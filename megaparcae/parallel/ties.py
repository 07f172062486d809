"""What pipeline stages must know of each other's parameters, and the groups of tied ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megaparcae.parallel.mesh import Mesh
from megaparcae.parallel.ownership import Item


def gather_stages(items: Sequence[Item], mesh: Mesh) -> list[list[Item]]:
    """The parameters of every pipeline stage, in order; all ranks call it together."""
    if mesh.pp.group is None:
        return [list(items)]
    stages: list[list[Item]] = [[] for _ in range(mesh.pp.size)]
    dist.all_gather_object(stages, list(items), group=mesh.pp.group)
    holders: dict[str, list[int]] = {}
    for stage, held in enumerate(stages):
        for item in held:
            holders.setdefault(item.spec.name, []).append(stage)
    for item in (item for held in stages for item in held):
        name, said = item.spec.name, list(item.spec.stages)
        assert said == holders[name], f"{name} is on stages {holders[name]}, its record says {said}"
    return stages


def make_tie_groups(
    stages: Sequence[Sequence[Item]], mesh: Mesh
) -> dict[tuple[int, ...], ProcessGroup | None]:
    """For each set of stages that share parameters, this rank's group over them.

    All ranks create every group, in the same order; pp is the outermost axis of the mesh.
    """
    sets = sorted({item.spec.stages for items in stages for item in items})
    plane = mesh.world_size // mesh.pp.size
    groups: dict[tuple[int, ...], ProcessGroup | None] = {}
    for tied in (s for s in sets if len(s) > 1):
        if len(tied) == mesh.pp.size:
            groups[tied] = mesh.pp.group
            continue
        for line in range(plane):
            ranks = [stage * plane + line for stage in tied]
            group = dist.new_group(ranks)
            if mesh.rank in ranks:
                groups[tied] = group
    return groups
