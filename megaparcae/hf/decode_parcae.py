"""One new token per row through a block, with as few kernels and Python calls as possible.

The same arithmetic as `ParcaeBlock`, which is the definition and the test; in a small model a
decoding step is mostly the cost of calling things. Used for plain modules without hooks.
This file is copied into every exported folder: it needs torch and nothing else.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu

# B rows, d width, H query heads, G key/value heads, hd head width, N cached positions


class Plan(NamedTuple):
    """The tensors and numbers of a block, fetched once per forward pass."""

    norms: tuple[Tensor | None, ...]
    """Before and after attention, before and after the MLP: [d]."""
    eps: float
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    gate: Tensor | None
    bias: Tensor | None
    """Of queries and keys: [H + G, hd]."""
    up: Tensor
    down: Tensor
    mlp_gate: Tensor | None
    heads: int
    kv_heads: int
    head_dim: int
    clip: float | None
    qk_norm: bool
    scale: float


def make_plan(block: nn.Module) -> Plan | None:
    """The plan of a ParcaeBlock; None when something in it isn't a plain module."""
    attention, mlp = block.attention, block.mlp
    norms = (block.attention_norm, block.attention_post_norm, block.mlp_norm, block.mlp_post_norm)
    matrices = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    matrices += [m for m in (attention.value_gate, mlp.gate_proj) if m is not None]
    matrices += [mlp.up_proj, mlp.down_proj]
    if not all(type(m) is nn.Linear and m.bias is None for m in matrices):
        return None
    for module in (attention, mlp, *matrices, *norms):
        if module is not None and (module._forward_hooks or module._forward_pre_hooks):
            return None
    has_bias = attention.q_bias is not None
    return Plan(
        norms=tuple(None if norm is None else norm.weight for norm in norms),
        eps=block.attention_norm.eps,
        q=attention.q_proj.weight,
        k=attention.k_proj.weight,
        v=attention.v_proj.weight,
        o=attention.o_proj.weight,
        gate=None if attention.value_gate is None else attention.value_gate.weight,
        bias=torch.cat([attention.q_bias, attention.k_bias]) if has_bias else None,
        up=mlp.up_proj.weight,
        down=mlp.down_proj.weight,
        mlp_gate=None if mlp.gate_proj is None else mlp.gate_proj.weight,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        clip=attention.clip,
        qk_norm=attention.qk_norm,
        scale=block.scale,
    )


def decode_block(
    plan: Plan,
    x: Tensor,  # [B, 1, d]
    value_rows: Tensor | None,  # [B, 1, G, hd]
    rotation: tuple[Tensor, Tensor],  # each [B or 1, 1, 1, hd]
    layer: object,  # LoopCacheLayer
    start: int,
    qk_eps: float,
) -> Tensor:
    """The block's output [B, 1, d]; writes position `start` of the cache layer."""
    before, after, mlp_before, mlp_after = plan.norms
    y = _normalize(x, plan.eps).to(x.dtype) * before
    out = _attend(plan, y, value_rows, rotation, layer, start, qk_eps)
    x = torch.add(x, linear(out, plan.o), alpha=plan.scale)
    if after is not None:
        x = _normalize(x, plan.eps).to(x.dtype) * after
    y = _normalize(x, plan.eps).to(x.dtype) * mlp_before
    inner = linear(y, plan.up)
    if plan.mlp_gate is None:
        inner = torch.relu(inner).square_()
        x = torch.add(x, linear(inner, plan.down), alpha=0.5 * plan.scale)
    else:
        inner *= silu(linear(y, plan.mlp_gate))
        x = torch.add(x, linear(inner, plan.down), alpha=plan.scale)
    return x if mlp_after is None else _normalize(x, plan.eps).to(x.dtype) * mlp_after


def _attend(
    plan: Plan,
    y: Tensor,
    value_rows: Tensor | None,
    rotation: tuple[Tensor, Tensor],
    layer: object,
    start: int,
    qk_eps: float,
) -> Tensor:
    """Attention output before the projection: [B, 1, H hd]."""
    rows, heads, hd = y.shape[0], plan.heads, plan.head_dim
    v = linear(y, plan.v).view(rows, 1, plan.kv_heads, hd)
    if plan.gate is not None:
        gate = torch.sigmoid(linear(y[..., : plan.gate.shape[1]], plan.gate)).unsqueeze(-1)
        v = torch.addcmul(v, gate, value_rows, value=2)
    qk = torch.cat([linear(y, plan.q), linear(y, plan.k)], dim=-1).view(rows, 1, -1, hd)
    if plan.clip is not None:
        qk, v = qk.clamp_(-plan.clip, plan.clip), v.clamp(-plan.clip, plan.clip)
    if plan.bias is not None:
        qk = qk + plan.bias
    qk = qk.float()
    swapped = qk.view(rows, 1, -1, hd // 2, 2).flip(-1).view(qk.shape)
    qk = torch.addcmul(qk * rotation[0], swapped, rotation[1])
    if plan.qk_norm:
        qk = _normalize(qk, qk_eps)
    qk = qk.to(y.dtype).transpose(1, 2)  # [B, H + G, 1, hd]
    keys, values = layer.append_token(qk[:, heads:], v.transpose(1, 2), start)
    out = scaled_dot_product_attention(
        qk[:, :heads], keys, values, enable_gqa=heads != plan.kv_heads
    )
    return out.view(rows, 1, -1)


def _normalize(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) in fp32: the layer norm of [x, -x], whose mean is 0."""
    x, width = x.float(), x.shape[-1]
    both = torch.cat([x, x.neg()], dim=-1)
    return torch.layer_norm(both, (2 * width,), None, None, eps)[..., :width]


__all__ = ["Plan", "decode_block", "make_plan"]
