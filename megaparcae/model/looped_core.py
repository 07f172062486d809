"""The core as one module that runs all its loops, so that sharded weights are gathered once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from megaparcae.model.attention import AttentionContext
from megaparcae.model.blocks import Block
from megaparcae.model.injection import Drive
from megaparcae.model.loop import run_phase
from megaparcae.model.loop_plan import LoopPlan, last_rows
from megaparcae.model.probe import Probe
from megaparcae.model.recompute import WorkCounter, checkpointed, run_block

# B rows, S positions, d width


@dataclass(frozen=True)
class LoopInputs:
    """What all loops of a micro-batch share; computed once."""

    plan: LoopPlan
    context: AttentionContext
    value_rows: tuple[Tensor | None, ...]
    """Value-embedding rows [B, S, G hd] of each core layer."""
    input_weights: tuple[Tensor, ...] = ()
    """Of each core layer's attention; the core fills them in, unless it is streamed."""

    def detached(self) -> LoopInputs:
        """For the loops without gradient."""
        rows = tuple(None if rows is None else rows.detach() for rows in self.value_rows)
        weights = tuple(weight.detach() for weight in self.input_weights)
        return replace(self, value_rows=rows, input_weights=weights)


class LoopedCore(nn.ModuleDict):
    """Blocks "0", "1", ...; a share of the loops of a micro-batch is one forward pass."""

    def __init__(self, blocks: nn.ModuleDict, work: WorkCounter, probe: Probe) -> None:
        super().__init__(dict(blocks.items()))
        self.recompute = "none"
        self.work = work
        self.probe = probe
        self.streamed = False
        """Weights are there only while their block runs (a model larger than memory)."""

    def forward(
        self,
        h: Tensor,
        *drive_parts: Tensor | None,
        inputs: LoopInputs,
        share: tuple[float, float],
    ) -> Tensor:
        """State [B, S, d] after this share: first the loops without gradient, then those with.

        The drive comes as bare tensors: ZeRO-3 gives the weights up again once the gradients of a
        module's tensor arguments are known, and the drive's are known last of all.
        """
        drive = Drive(*drive_parts)  # type: ignore[arg-type]
        inputs = replace(inputs, input_weights=self.input_weights())
        plan, layers = inputs.plan, len(self)
        begin, end = (plan.cut(fraction, layers) for fraction in share)
        units = plan.no_grad_units(begin, end, layers)
        if units[0] < units[1]:
            with torch.no_grad():
                h = self.run_units(
                    h.detach(), plan.no_grad, units, drive.detached(), inputs.detached()
                )
            # Autocast caches cast weights; those cached here would carry no gradient.
            torch.clear_autocast_cache()
        units = plan.grad_units(begin, end, layers)
        return self.run_units(h, plan.grad, units, drive, inputs)

    def input_weights(self) -> tuple[Tensor, ...]:
        """Of each layer's attention: put together and cast once, not once per loop."""
        if self.streamed:
            return ()
        attentions = (cast(Block, self[str(i)]).attention for i in range(len(self)))
        return tuple(attention.input_weight() for attention in attentions)

    def run_units(
        self,
        h: Tensor,
        rows: tuple[int, ...],
        units: tuple[int, int],
        drive: Drive,
        inputs: LoopInputs,
    ) -> Tensor:
        """Units [begin, end) of one phase."""

        def run(h: Tensor, loop: int, layers: range) -> Tensor:
            recompute = self.recompute == "loop"
            after = checkpointed(recompute, self.run_loop, h, layers, drive, inputs)
            self.probe.after_loop(h, after, layers, last_rows(rows, loop), ends=len(self))
            return after

        return run_phase(h, rows, *units, len(self), run)

    def run_loop(self, h: Tensor, layers: range, drive: Drive, inputs: LoopInputs) -> Tensor:
        """One loop, or a stage's piece of it, for the first len(h) rows."""
        if layers.start == 0:
            h = drive.inject(h)
        context = inputs.context.rows(len(h))
        for i in layers:
            table = inputs.value_rows[i]
            value_rows = None if table is None else table[: len(h)]
            weight = inputs.input_weights[i] if inputs.input_weights else None
            h = run_block(self[str(i)], h, context, value_rows, self.recompute, self.work, weight)
        return h
