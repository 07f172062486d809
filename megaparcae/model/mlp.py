"""The two MLPs: squared ReLU (Transformer setup) and SwiGLU (RDM setup)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megaparcae.config.schema import ModelConfig
from megaparcae.ops.squared_relu import squared_relu


class SquaredReluMLP(nn.Module):
    """down(relu(up x)^2 / 2)"""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, y: Tensor) -> Tensor:
        return self.down_proj(squared_relu(self.up_proj(y)))


class SwiGLUMLP(nn.Module):
    """down(silu(gate x) * up x)"""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, y: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


def make_mlp(config: ModelConfig) -> nn.Module:
    """The MLP that `model.mlp` names."""
    match config.mlp:
        case "relu2":
            return SquaredReluMLP(config)
        case "swiglu":
            return SwiGLUMLP(config)
        case other:
            raise ValueError(f"model.mlp={other!r}: choose relu2 or swiglu")
