"""Early exit: when a token has settled and needs no more loops.

This file is copied into every exported folder: it needs torch and nothing else.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from .blocks_parcae import Context

# B rows, d width, V vocabulary

DEFAULT_THRESHOLDS = {"kl": 5e-4, "entropy": 1e-3, "state": 3e-2}
"""Early exit: KL(p_t | p_t-1), |H(p_t) - H(p_t-1)| (both in nats), |h_t - h_t-1| / |h_t|."""


class EarlyExit(NamedTuple):
    """When a token stops looping: the change of what `rule` watches falls below `threshold`."""

    rule: str
    threshold: float
    log_probs: Callable[[Tensor, Context], Tensor]
    """States [B, 1, d] to log-probabilities [B, V]."""

    def observe(self, h: Tensor, context: Context) -> Tensor:
        """What is compared from loop to loop: state [B, d] or log-probabilities [B, V]."""
        return h[:, 0].float() if self.rule == "state" else self.log_probs(h, context)

    def change(self, now: Tensor, before: Tensor) -> Tensor:
        """[B]: how much one loop changed."""
        match self.rule:
            case "state":
                return (now - before).norm(dim=-1) / now.norm(dim=-1)
            case "kl":
                return (now.exp() * (now - before)).sum(-1)
            case "entropy":
                return ((now.exp() * now).sum(-1) - (before.exp() * before).sum(-1)).abs()
            case other:
                raise ValueError(f"early_exit={other!r}: choose {', '.join(DEFAULT_THRESHOLDS)}")
