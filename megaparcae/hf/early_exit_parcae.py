"""Early exit: when a token has settled and needs no more loops.

This file is copied into every exported folder: it needs torch and nothing else.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# B rows, d width, V vocabulary, A rows still active

DEFAULT_THRESHOLDS = {"kl": 5e-4, "entropy": 1e-3, "state": 3e-2}
"""Early exit: KL(p_t | p_t-1), |H(p_t) - H(p_t-1)| (both in nats), |h_t - h_t-1| / |h_t|."""


class EarlyExit(NamedTuple):
    """When a token stops looping: the change of what `rule` watches falls below `threshold`."""

    rule: str
    threshold: float
    logits: Callable[[Tensor], Tensor]
    """Normalised outputs [A, 1, d] to scores [A, 1, V]."""

    def observe(self, h: Tensor, output: Callable[[], Tensor]) -> Tensor:
        """What is compared from loop to loop: state [A, d] or log-probabilities [A, V]."""
        if self.rule == "state":
            return h.flatten(1).float()
        return self.logits(output())[:, 0].float().log_softmax(-1)

    def change(self, now: Tensor, before: Tensor) -> Tensor:
        """[A]: how much one loop changed."""
        match self.rule:
            case "state":
                return (now - before).norm(dim=-1) / now.norm(dim=-1)
            case "kl":
                return (now.exp() * (now - before)).sum(-1)
            case "entropy":
                return ((now.exp() * now).sum(-1) - (before.exp() * before).sum(-1)).abs()
            case other:
                raise ValueError(f"early_exit={other!r}: choose {', '.join(DEFAULT_THRESHOLDS)}")


def run_until_settled(
    h: Tensor,
    total: int,
    rule: EarlyExit,
    core: Callable[[Tensor, int, Tensor | None], Tensor],
    coda: Callable[[Tensor, Tensor | None], Tensor],
    leave: Callable[[Tensor, int], None],
) -> tuple[Tensor, Tensor]:
    """Loops for one new token per row: final states like h [B, ...], and the loops used [B].

    A row that has settled is not computed any further. `core(h, t, rows)` runs loop t of these
    rows (None is all), `coda(h, rows)` gives their output [A, 1, d], and `leave(rows, t)` is told
    which rows end after loop t, before `total`.
    """
    active = torch.arange(h.shape[0], device=h.device)
    rows: Tensor | None = None
    used = torch.full_like(active, total)
    final, before = torch.empty_like(h), None
    for t in range(total):
        h = core(h, t, rows)
        if t + 1 == total:
            break
        now = rule.observe(h, lambda h=h, rows=rows: coda(h, rows))
        settled = None if before is None else rule.change(now, before) < rule.threshold
        before = now
        if settled is None or not settled.any():
            continue
        leaving, stay = active[settled], ~settled
        used[leaving] = t + 1
        final[leaving] = h[settled]
        leave(leaving, t)
        active, h, before = active[stay], h[stay], before[stay]
        rows = active
        if not len(active):
            break
    final[active] = h
    return final, used


__all__ = ["DEFAULT_THRESHOLDS", "EarlyExit", "run_until_settled"]
