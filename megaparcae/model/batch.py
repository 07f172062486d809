"""What a model's forward pass is given: one micro-batch, rows sorted by depth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megaparcae.model.loop_plan import LoopPlan


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch. B rows, S positions."""

    ids: Tensor
    """Token ids [B, S]."""
    labels: Tensor | None = None
    """The token after each position [B, S]; -100 is ignored. None asks for logits."""
    documents: Tensor | None = None
    """Number of the document of each token [B, S]; None is one document per row."""
    plan: LoopPlan | None = None
    """Loops of each row (looped models only)."""
    start_state: Callable[[], Tensor] | None = None
    """Draws h_0 [B, S, d] when the stage that begins the loop needs it (looped models only)."""


def fixed_depth(ids: Tensor, num_loops: int, start_state: Tensor, **rest: Tensor | None) -> Batch:
    """All rows `num_loops` deep and without gradient: evaluation."""
    plan = LoopPlan((len(ids),) * (num_loops - 1), (len(ids),))
    return Batch(ids=ids, plan=plan, start_state=lambda: start_state, **rest)
