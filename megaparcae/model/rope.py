"""Rotary position embedding on adjacent pairs (0, 1), (2, 3), ..."""

from __future__ import annotations

import torch
from torch import Tensor

# B rows, S positions, H heads, hd head width


def rope_table(positions: Tensor, head_dim: int, theta: float) -> Tensor:
    """Cosine and sine of pos * theta^(-2j/hd): [..., hd/2, 2] fp32 for positions [...]."""
    pair = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angle = positions.float()[..., None] * theta ** (-pair / head_dim)
    return torch.stack([angle.cos(), angle.sin()], dim=-1)


def apply_rope(x: Tensor, table: Tensor) -> Tensor:
    """Turn pair j of x [B, S, H, hd] by its angle; table [S, hd/2, 2] or [B, S, hd/2, 2].

    (a, b) -> (a cos - b sin, b cos + a sin), in fp32, returned in x's type.
    """
    pairs = x.float().unflatten(-1, (-1, 2))  # [B, S, H, hd/2, 2]
    a, b = pairs.unbind(-1)
    cos, sin = table.unsqueeze(-3).unbind(-1)  # [(B,) S, 1, hd/2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2).type_as(x)
