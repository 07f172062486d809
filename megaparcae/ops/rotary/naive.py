"""The definition: rotary embedding on adjacent pairs (0, 1), (2, 3), ..., then QK-norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# B rows, S positions, N heads, hd head width


def naive_rotary(x: Tensor, table: Tensor, eps: float | None) -> Tensor:
    """Turn pair j of x [B, S, N, hd] by its angle, and normalise every head unless eps is None.

    table [S, hd/2, 2] or [B, S, hd/2, 2] of cosines and sines:
    (a, b) -> (a cos - b sin, b cos + a sin);  x / sqrt(mean(x^2) + eps) over hd.
    In fp32, returned in x's type.
    """
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)  # [B, S, N, hd/2]
    cos, sin = table.unsqueeze(-3).unbind(-1)  # [(B,) S, 1, hd/2]
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    if eps is not None:
        turned = F.rms_norm(turned, turned.shape[-1:], None, eps)
    return turned.type_as(x)
