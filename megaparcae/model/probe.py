"""Samples of the residual stream while a step runs: what the log's health records are made of.

Off, a probe costs an `if`. On, it copies a few positions of every row: after each prelude block
their norms, around each row's last loop the states themselves, since on a pipeline one stage may
begin that loop and another end it.
"""

from __future__ import annotations

import torch
from torch import Tensor

NUM_POSITIONS = 8
"""Positions looked at in every sequence, evenly spread; all when it is shorter."""

# R rows of a step on this rank, B rows of a micro-batch, S positions, P sampled ones, d width


class Probe:
    """Filled by the model's forward passes between `start` and `stop`, micro-batch by micro-batch.

    Without tensor parallelism or with S divisible among NUM_POSITIONS, the sampled positions are
    the same in every layout: each rank that holds a slice of a sequence samples its share.
    """

    on = False

    def start(
        self,
        *,
        num_rows: int,
        num_blocks: int,
        length: int,
        of: int,
        width: int,
        device: torch.device,
    ) -> None:
        """Watch one step of `num_rows` rows. This rank holds `length` of a sequence's `of`
        positions; `num_blocks` blocks stand before the loop."""
        count = min(length, max(1, NUM_POSITIONS * length // of))
        self.positions = torch.arange(1, count + 1, device=device) * length // count - 1
        self.before = torch.zeros(num_rows, count, width, device=device)
        """State before each row's last loop [R, P, d]; zeros where another stage runs it."""
        self.after = torch.zeros_like(self.before)
        """State after each row's last loop, h_T [R, P, d]; zeros likewise."""
        self.block_norms = torch.zeros(num_blocks, device=device)
        """Sum over the sampled tokens of the norm after each block of the prelude."""
        self.block_tokens = torch.zeros(num_blocks, device=device)
        self.row_losses: list[Tensor] = []
        """[B] summed losses of the micro-batches so far; empty where another stage has the head."""
        self.first_row = 0
        self.next_row = 0
        self.on = True

    def stop(self) -> None:
        """Back to doing nothing; what was sampled stays until the next start."""
        self.on = False

    def after_block(self, index: int, x: Tensor) -> None:
        """Note the output [B, S, d] of the prelude's block `index`."""
        if self.on:
            norms = self._sample(x).norm(dim=-1)
            self.block_norms[index] += norms.sum()
            self.block_tokens[index] += norms.numel()

    def next_micro_batch(self, num_rows: int) -> None:
        """The loops that follow are those of the next rows."""
        if self.on:
            self.first_row, self.next_row = self.next_row, self.next_row + num_rows

    def after_loop(
        self, before: Tensor, after: Tensor, layers: range, last: slice, ends: int
    ) -> None:
        """Note a loop or a stage's piece of it: `layers` up to at most `ends`, run on [b, S, d].

        It is the last one for the rows `last`.
        """
        if not (self.on and torch.is_grad_enabled()):  # a row's last loop carries a gradient
            return
        rows = slice(self.first_row + last.start, self.first_row + last.stop)
        if layers.start == 0:
            self.before[rows] = self._sample(before[last])
        if layers.stop == ends:
            self.after[rows] = self._sample(after[last])

    def add_losses(self, row_losses: Tensor) -> None:
        """Note a micro-batch's losses [B]."""
        if self.on:
            self.row_losses.append(row_losses)

    def _sample(self, x: Tensor) -> Tensor:
        return x.detach()[:, self.positions].float()
