"""Causal self-attention with rotary positions, optional QK-norm, gated value embeddings and GQA."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaparcae.config.schema import VALUE_GATE_INPUTS, ModelConfig
from megaparcae.model.norm import QK_NORM_EPS
from megaparcae.model.precision import as_multiplied
from megaparcae.model.rope import rope_table
from megaparcae.ops.rotary import rotary

# B rows, S positions, d width, H query heads, G key/value heads, hd head width.
# Under tensor parallelism H and G are this rank's heads: sizes are read from the tensors.


@dataclass(frozen=True)
class AttentionContext:
    """What every layer and every loop of a micro-batch shares; computed once."""

    rope: Tensor
    """[S, hd/2, 2], or [B, S, hd/2, 2] when positions restart with each document."""
    mask: Tensor | None = None
    """[B, 1, S, S], True where a position may look; None is plain causal attention."""

    def rows(self, count: int) -> AttentionContext:
        """The first `count` rows."""
        if self.mask is None:
            return self
        return AttentionContext(self.rope[:count], self.mask[:count])


def attention_context(
    config: ModelConfig, sequence_length: int, device: torch.device, documents: Tensor | None
) -> AttentionContext:
    """Positions and mask of a micro-batch; `documents` [B, S] numbers each token's document."""
    positions = torch.arange(sequence_length, device=device)
    if documents is None:
        return AttentionContext(rope_table(positions, config.head_dim, config.rope_theta))
    same = documents[:, :, None] == documents[:, None, :]  # [B, S, S]
    causal = positions[:, None] >= positions[None, :]
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)  # [B, S]
    first = torch.where(begins, positions, 0).cummax(dim=1).values
    rope = rope_table(positions - first, config.head_dim, config.rope_theta)
    return AttentionContext(rope, (same & causal)[:, None])


class Attention(nn.Module):
    """softmax(q k^T / sqrt(hd)) v, heads contiguous, no biases but the optional ones on q and k."""

    def __init__(self, config: ModelConfig, *, has_value_embedding: bool) -> None:
        super().__init__()
        d, hd = config.hidden_size, config.head_dim
        self.head_dim = hd
        self.qk_norm = config.qk_norm
        self.clip_qkv = config.clip_qkv
        self.q_proj = nn.Linear(d, config.num_heads * hd, bias=False)
        self.k_proj = nn.Linear(d, config.kv_heads * hd, bias=False)
        self.v_proj = nn.Linear(d, config.kv_heads * hd, bias=False)
        self.o_proj = nn.Linear(config.num_heads * hd, d, bias=False)
        self.value_gate = (
            nn.Linear(VALUE_GATE_INPUTS, config.kv_heads, bias=False)
            if has_value_embedding
            else None
        )
        self.q_bias = nn.Parameter(torch.empty(config.num_heads, hd)) if config.qk_bias else None
        self.k_bias = nn.Parameter(torch.empty(config.kv_heads, hd)) if config.qk_bias else None

    def forward(
        self,
        y: Tensor,  # [B, S, d], the normalised block input
        context: AttentionContext,
        value_rows: Tensor | None,  # [B, S, G hd] of this layer's table
        input_weight: Tensor | None = None,
    ) -> Tensor:
        """`input_weight` is what `self.input_weight()` gave, for those who apply a layer often."""
        q, k, v = self.project(y, context, value_rows, input_weight)  # [B, S, H or G, hd]
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=context.mask,
            is_causal=context.mask is None,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def input_weight(self) -> Tensor:
        """[(H + 2G) hd (+ gate), d]: q, k, v and the gate as one matrix product.

        The gate's rows are zero where it does not read y, and padded to a multiple of 8.
        """
        parts = [as_multiplied(proj.weight) for proj in (self.q_proj, self.k_proj, self.v_proj)]
        if self.value_gate is not None:
            gate = as_multiplied(self.value_gate.weight)
            unread, surplus = parts[0].shape[1] - gate.shape[1], -len(gate) % 8
            parts.append(F.pad(gate, (0, unread, 0, surplus)))
        return torch.cat(parts)

    def project(
        self,
        y: Tensor,
        context: AttentionContext,
        value_rows: Tensor | None,
        input_weight: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values by head; v += 2 sigmoid(W_g y[:32]) * table row."""
        products = F.linear(y, self.input_weight() if input_weight is None else input_weight)
        num_queries, num_values = (len(p.weight) for p in (self.q_proj, self.v_proj))
        sizes = [num_queries + num_values, num_values]
        qk, v, gate = products.split([*sizes, products.shape[-1] - sum(sizes)], dim=-1)
        qk, v = qk.unflatten(-1, (-1, self.head_dim)), v.unflatten(-1, (-1, self.head_dim))
        if self.value_gate is not None:
            assert value_rows is not None
            opened = 2 * torch.sigmoid(gate[..., : v.shape[2], None])  # [B, S, G, 1]
            v = torch.addcmul(v, opened, value_rows.unflatten(-1, (-1, self.head_dim)))
        if self.clip_qkv is not None:
            qk, v = (t.clamp(-self.clip_qkv, self.clip_qkv) for t in (qk, v))
        if self.q_bias is not None and self.k_bias is not None:
            qk = (qk + torch.cat([self.q_bias, self.k_bias])).type_as(qk)
        eps = QK_NORM_EPS if self.qk_norm else None
        return *rotary(qk, context.rope, eps, num_queries // self.head_dim), v
