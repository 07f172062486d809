"""Rotary embedding and QK-norm of queries and keys: `naive` is the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from megaparcae.ops.rotary.fused import FusedRotary
from megaparcae.ops.rotary.naive import naive_rotary

__all__ = ["naive_rotary", "rotary"]


def rotary(qk: Tensor, table: Tensor, eps: float | None, num_queries: int) -> tuple[Tensor, Tensor]:
    """Queries and keys side by side [B, S, H + G, hd] -> q [B, S, H, hd], k [B, S, G, hd].

    Inside torch.compile the definition runs: the compiler fuses it, but no complex numbers.
    """
    if torch.compiler.is_compiling():
        q, k = naive_rotary(qk, table, eps).tensor_split([num_queries], dim=2)
        return q, k
    return FusedRotary.apply(qk, table, eps, num_queries)  # type: ignore[no-any-return]
