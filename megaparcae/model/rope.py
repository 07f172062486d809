"""Angles of the rotary position embedding; `ops.rotary` turns by them."""

from __future__ import annotations

import torch
from torch import Tensor

# hd head width


def rope_table(positions: Tensor, head_dim: int, theta: float) -> Tensor:
    """Cosine and sine of pos * theta^(-2j/hd): [..., hd/2, 2] fp32 for positions [...]."""
    pair = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angle = positions.float()[..., None] * theta ** (-pair / head_dim)
    return torch.stack([angle.cos(), angle.sin()], dim=-1)
