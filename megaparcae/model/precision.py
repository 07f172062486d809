"""Mixed precision: fp32 weights, matrix products in the type that autocast chooses."""

from __future__ import annotations

import torch
from torch import Tensor


def as_multiplied(x: Tensor) -> Tensor:
    """x in the type of matrix products: autocast would cast a derived tensor at every use."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
