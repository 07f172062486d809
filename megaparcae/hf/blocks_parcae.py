"""Norm, attention, MLP, block and injections of Parcae, RDM/Huginn and the Transformer.

This file is copied into every exported folder: it needs torch and transformers and nothing else.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from .configuration_parcae import ParcaeConfig

# B rows, S positions, d width, H query heads, G key/value heads, hd head width, N cached positions

QK_NORM_EPS = 2.0**-23
SMALL = 1 << 14
"""Elements below which the number of kernels counts, not their work."""
VALUE_GATE_INPUTS = 32


@dataclass
class Context:
    """What every block and every loop of a forward pass shares; computed once."""

    cos: Tensor
    """[B or 1, S, 1, hd] fp32, every value twice."""
    sin: Tensor
    """[B or 1, S, 1, hd] fp32, with the signs of the pair's rotation."""
    attend: Callable[..., tuple[Tensor, Tensor | None]]
    """The attention implementation of `config._attn_implementation`."""
    mask: Tensor | None
    """Whatever that implementation wants."""
    value_rows: dict[int, Tensor]
    """Table rows by stored layer: [B, S, G, hd]."""
    cache: Cache | None
    start: int | Tensor
    """Positions in the cache before this pass; a tensor when its shapes are static."""
    rows: Tensor | None = None
    """Rows of the batch that are computed; None is all of them."""
    attention_kwargs: dict[str, Any] = field(default_factory=dict)

    def select(self, rows: Tensor) -> "Context":
        """The same for some rows only (early exit)."""
        batched = self.cos.shape[0] > 1
        mask = self.mask if self.mask is None or self.mask.shape[0] == 1 else self.mask[rows]
        return Context(
            cos=self.cos[rows] if batched else self.cos,
            sin=self.sin[rows] if batched else self.sin,
            attend=self.attend,
            mask=mask,
            value_rows={i: table[rows] for i, table in self.value_rows.items()},
            cache=self.cache,
            start=self.start,
            rows=rows,
            attention_kwargs=self.attention_kwargs,
        )


class ParcaeRMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps), the normalisation in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_normalize(x, self.eps).to(x.dtype) * self.weight


def rms_normalize(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, in fp32.

    For one new token the fused layer norm of [x, -x] (mean 0, variance mean(x^2)) is three times
    faster than the several kernels of rms_norm.
    """
    x = x.float()
    width = x.shape[-1]
    if x.numel() <= SMALL and not torch.is_grad_enabled():
        both = torch.cat([x, -x], dim=-1)
        return torch.layer_norm(both, (2 * width,), None, None, eps)[..., :width]
    return F.rms_norm(x, (width,), None, eps)


def rotary_table(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and signed sin for pairs (0, 1), (2, 3), ...: [..., S, 1, hd] for positions [..., S]."""
    pair = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angle = positions.float()[..., None] * (1.0 / theta ** (pair / head_dim))
    cos, sin = angle.cos(), angle.sin()
    cos = torch.stack([cos, cos], dim=-1).flatten(-2)
    sin = torch.stack([-sin, sin], dim=-1).flatten(-2)
    return cos.unsqueeze(-2), sin.unsqueeze(-2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin) on pairs of x [B, S, heads, hd], in fp32."""
    x = x.float()
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(x * cos, swapped, sin)


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,  # [B, H, S, hd]
    key: Tensor,  # [B, G, N, hd]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Attention that also returns its weights."""
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class ParcaeAttention(nn.Module):
    """Causal attention: rotary positions, then QK-norm; gated value embeddings."""

    def __init__(self, config: ParcaeConfig, layer: int) -> None:
        super().__init__()
        d, hd = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.layer = layer
        self.qk_norm, self.clip = config.qk_norm, config.clip_qkv
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, hd
        self.num_key_value_groups = heads // kv_heads
        self.scaling = hd**-0.5
        self.is_causal = True
        self.q_proj = nn.Linear(d, heads * hd, bias=False)
        self.k_proj = nn.Linear(d, kv_heads * hd, bias=False)
        self.v_proj = nn.Linear(d, kv_heads * hd, bias=False)
        self.o_proj = nn.Linear(heads * hd, d, bias=False)
        self.value_gate = None
        if layer in config.value_embedding_layers:
            self.value_gate = nn.Linear(VALUE_GATE_INPUTS, kv_heads, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(heads, hd)) if config.qk_bias else None
        self.k_bias = nn.Parameter(torch.zeros(kv_heads, hd)) if config.qk_bias else None

    def forward(
        self, y: Tensor, value_rows: Tensor | None, context: Context, slot: int
    ) -> tuple[Tensor, Tensor | None]:
        """y [B, S, d] is the normalised block input; `slot` is the cache layer."""
        query, key, value = self.project(y, value_rows, context)  # [B, heads, S, hd]
        if context.cache is not None:
            key, value = context.cache.update(
                key, value, slot, start=context.start, rows=context.rows
            )
        out, weights = context.attend(
            self, query, key, value, context.mask, scaling=self.scaling, **context.attention_kwargs
        )
        return self.o_proj(out.flatten(2)), weights

    def project(
        self, y: Tensor, value_rows: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Value embedding, clamp, bias, rotation, QK-norm: in this order."""
        shape = (*y.shape[:2], -1, self.head_dim)
        q, k, v = (proj(y).view(shape) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.value_gate is not None:
            gate = 2 * torch.sigmoid(self.value_gate(y[..., :VALUE_GATE_INPUTS]))  # [B, S, G]
            v = v + gate.unsqueeze(-1) * value_rows
        if self.clip is not None:
            q, k, v = (t.clamp(-self.clip, self.clip) for t in (q, k, v))
        if self.q_bias is not None:
            q, k = q + self.q_bias, k + self.k_bias
        qk = rotate(torch.cat([q, k], dim=2), context.cos, context.sin)
        if self.qk_norm:
            qk = rms_normalize(qk, QK_NORM_EPS)
        q, k = qk.to(v.dtype).transpose(1, 2).split([self.heads, self.kv_heads], dim=1)
        return q, k, v.transpose(1, 2)


class ParcaeMLP(nn.Module):
    """relu2: down(relu(up x)^2 / 2). swiglu: down(silu(gate x) * up x)."""

    def __init__(self, config: ParcaeConfig) -> None:
        super().__init__()
        d, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(d, inner, bias=False) if config.mlp == "swiglu" else None
        self.up_proj = nn.Linear(d, inner, bias=False)
        self.down_proj = nn.Linear(inner, d, bias=False)

    def forward(self, y: Tensor) -> Tensor:
        if self.gate_proj is None:
            return self.down_proj(0.5 * F.relu(self.up_proj(y)).square())
        return self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class ParcaeBlock(GradientCheckpointingLayer):
    """x + Attn(norm x), then x + MLP(norm x); sandwich normalises each sum as well."""

    def __init__(self, config: ParcaeConfig, layer: int) -> None:
        super().__init__()

        def norm() -> ParcaeRMSNorm:
            return ParcaeRMSNorm(config.hidden_size, config.rms_norm_eps)

        sandwich = config.block == "sandwich"
        self.layer = layer
        self.scale = config.residual_multiplier
        self.attention_norm = norm()
        self.attention = ParcaeAttention(config, layer)
        self.attention_post_norm = norm() if sandwich else None
        self.mlp_norm = norm()
        self.mlp = ParcaeMLP(config)
        self.mlp_post_norm = norm() if sandwich else None

    def forward(self, x: Tensor, value_rows: Tensor | None, context: Context, slot: int) -> Tensor:
        branch, _ = self.attention(self.attention_norm(x), value_rows, context, slot)
        x = x + branch if self.scale == 1.0 else x + self.scale * branch
        if self.attention_post_norm is not None:
            x = self.attention_post_norm(x)
        branch = self.mlp(self.mlp_norm(x))
        x = x + branch if self.scale == 1.0 else x + self.scale * branch
        return x if self.mlp_post_norm is None else self.mlp_post_norm(x)


class Drive(NamedTuple):
    """The part of u = inject(h, e) that is the same in every loop."""

    term: Tensor
    """[B, S, d], added."""
    decay: Tensor | None
    """[d], multiplies the state (diagonal only)."""


class DiagonalInjection(nn.Module):
    """u = decay * h + step * (e B^T);  step = softplus(dt_bias), decay = exp(-step exp(A_log))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(width))
        self.dt_bias = nn.Parameter(torch.zeros(width))
        self.B = nn.Parameter(torch.eye(width))

    def prepare(self, e: Tensor) -> Drive:
        step = F.softplus(self.dt_bias.float())
        decay = torch.exp(-step * torch.exp(self.A_log.float()))
        return Drive(step.to(e.dtype) * F.linear(e, self.B), decay.to(e.dtype))

    def forward(self, h: Tensor, drive: Drive) -> Tensor:
        return torch.addcmul(drive.term, drive.decay, h)


class LinearInjection(nn.Module):
    """u = W [h ; e], state first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, 2 * width))

    def prepare(self, e: Tensor) -> Drive:
        return Drive(F.linear(e, self.weight[:, self.weight.shape[0] :]), None)

    def forward(self, h: Tensor, drive: Drive) -> Tensor:
        return drive.term + F.linear(h, self.weight[:, : self.weight.shape[0]])


class AdditiveInjection(nn.Module):
    """u = h + e"""

    def prepare(self, e: Tensor) -> Drive:
        return Drive(e, None)

    def forward(self, h: Tensor, drive: Drive) -> Tensor:
        return h + drive.term


Injection = DiagonalInjection | LinearInjection | AdditiveInjection


def make_injection(config: ParcaeConfig) -> Injection:
    """The injection that `config.injection` names."""
    match config.injection:
        case "diagonal":
            return DiagonalInjection(config.hidden_size)
        case "linear":
            return LinearInjection(config.hidden_size)
        case _:
            return AdditiveInjection()


def start_state_table(config: ParcaeConfig) -> Tensor:
    """Start states by position, [max_position_embeddings, d]: a function of state_seed alone."""
    shape = (config.max_position_embeddings, config.hidden_size)
    generator = torch.Generator().manual_seed(config.state_seed)
    match config.state_init:
        case "zero":
            return torch.zeros(shape)
        case "like_init":
            std = math.sqrt(2 / (5 * config.hidden_size))
            table = torch.empty(shape)
            nn.init.trunc_normal_(table, 0.0, std, -3 * std, 3 * std, generator=generator)
            return table * math.sqrt(config.hidden_size) if config.scale_embeddings else table
        case "normal":
            return torch.randn(shape, generator=generator)
        case "embed":
            return torch.randn(shape, generator=generator) / math.sqrt(config.hidden_size)
        case "unit":
            table = torch.randn(shape, generator=generator)
            std, mean = torch.std_mean(table, dim=-1, keepdim=True)
            return (table - mean) / (std + 1e-8)
        case other:
            raise ValueError(f"state_init={other!r}: choose like_init, zero, normal, embed or unit")
