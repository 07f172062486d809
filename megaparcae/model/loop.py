"""The looped core: the loop itself, on the rows that still need it.

A finished row drops out: it is not computed again until the phase ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

RunLayers = Callable[[Tensor, int, range], Tensor]
"""(state of a prefix of the rows, loop of the phase, core layers) -> their new state."""


def run_phase(
    state: Tensor,  # [B, S, d]
    rows: tuple[int, ...],
    begin: int,
    end: int,
    num_layers: int,
    run_layers: RunLayers,
) -> Tensor:
    """Units [begin, end) of one phase's (loop, layer) sequence; returns the state of all rows."""
    finished: list[Tensor] = []
    for loop, layers in _loops(begin, end, num_layers):
        count = rows[loop]
        if count < len(state):
            finished.append(state[count:])
            state = state[:count]
        state = run_layers(state, loop, layers)
    return torch.cat([state, *reversed(finished)]) if finished else state


def _loops(begin: int, end: int, num_layers: int) -> Iterator[tuple[int, range]]:
    """Split [begin, end) at loop borders: a pipeline stage may begin or end inside a loop."""
    while begin < end:
        loop, layer = divmod(begin, num_layers)
        last = min(num_layers, layer + end - begin)
        yield loop, range(layer, last)
        begin += last - layer
