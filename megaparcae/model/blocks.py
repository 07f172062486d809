"""One Transformer block, pre-norm (Parcae) or sandwich (Huginn)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megaparcae.config.schema import ModelConfig
from megaparcae.model.attention import Attention, AttentionContext
from megaparcae.model.mlp import make_mlp
from megaparcae.model.norm import RMSNorm
from megaparcae.model.recompute import checkpointed


class Block(nn.Module):
    """x + Attn(norm x), then x + MLP(norm x); sandwich normalises each sum as well.

    `residual_scale` multiplies both branches (1 unless model.residual_scale is set).
    """

    def __init__(
        self, config: ModelConfig, *, has_value_embedding: bool, residual_scale: float
    ) -> None:
        super().__init__()

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.norm_eps)

        sandwich = config.block == "sandwich"
        self.residual_scale = residual_scale
        self.attention_norm = norm()
        self.attention = Attention(config, has_value_embedding=has_value_embedding)
        self.attention_post_norm = norm() if sandwich else nn.Identity()
        self.mlp_norm = norm()
        self.mlp = make_mlp(config)
        self.mlp_post_norm = norm() if sandwich else nn.Identity()

    def forward(
        self,
        x: Tensor,  # [B, S, d]
        context: AttentionContext,
        value_rows: Tensor | None,
        input_weight: Tensor | None = None,
        recompute_attention: bool = False,
    ) -> Tensor:
        """With `recompute_attention` its branch is computed again in the backward pass."""
        inputs = x, context, value_rows, input_weight
        branch = checkpointed(recompute_attention, self.attend, *inputs)
        x = self.attention_post_norm(self.add(x, branch))
        branch = self.mlp(self.mlp_norm(x))
        if torch.is_grad_enabled():
            return self.mlp_post_norm(self.add(x, branch))
        return self.mlp_post_norm(x.add_(branch, alpha=self.residual_scale))

    def attend(
        self,
        x: Tensor,
        context: AttentionContext,
        value_rows: Tensor | None,
        input_weight: Tensor | None,
    ) -> Tensor:
        """The attention branch."""
        return self.attention(self.attention_norm(x), context, value_rows, input_weight)

    def add(self, x: Tensor, branch: Tensor) -> Tensor:
        """Residual sum."""
        return x + branch if self.residual_scale == 1.0 else x + self.residual_scale * branch
