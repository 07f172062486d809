"""Rotary embedding and QK-norm in few passes over memory, with a backward pass of their own.

A pair is a complex number and its turn one product. A turn keeps lengths, so the norm may be taken
first: y = R(x) s with s = 1 / sqrt(mean(x^2) + eps). Its gradient needs only what attention keeps
anyway, y, and one number a head: grad x = R^-1(s (g - y mean(g y))).
"""

# B rows, S positions, H query heads, G key heads, N = H + G, hd head width
from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable


class FusedRotary(Function):
    """qk [B, S, N, hd] -> q [B, S, H, hd] and k [B, S, G, hd]; table and eps as in `naive`."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, qk: Tensor, table: Tensor, eps: float | None, num_queries: int
    ) -> tuple[Tensor, Tensor]:
        x, turns = qk.float(), torch.view_as_complex(table).unsqueeze(-2)
        y, scale = _turn(x, turns), None
        if eps is not None:
            squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
            scale = squares.div_(x.shape[-1]).add_(eps).rsqrt_()  # [B, S, N, 1]
            y.mul_(scale)
        q, k = y.type_as(qk).tensor_split([num_queries], dim=2)
        ctx.save_for_backward(turns, scale, *(() if scale is None else (q, k)))  # type: ignore[arg-type]
        ctx.kind = qk.dtype  # type: ignore[attr-defined]
        return q, k

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, grad_q: Tensor, grad_k: Tensor
    ) -> tuple[Tensor, None, None, None]:
        turns, scale, *normalised = ctx.saved_tensors  # type: ignore[attr-defined]
        num_queries = grad_q.shape[2]
        shape = (*grad_q.shape[:2], num_queries + grad_k.shape[2], grad_q.shape[3])
        grad = torch.empty(shape, dtype=torch.float32, device=grad_q.device)
        parts = grad.tensor_split([num_queries], dim=2)
        for part, grad_y in zip(parts, (grad_q, grad_k), strict=True):
            part.copy_(grad_y)
        if scale is not None:
            for part, y in zip(parts, normalised, strict=True):
                y = y.float()
                with torch.autocast(y.device.type, enabled=False):
                    mean = torch.linalg.vecdot(part, y)[..., None].div_(-y.shape[-1])
                part.addcmul_(y, mean)
            grad.mul_(scale)
        return _turn(grad, turns.conj()).to(ctx.kind), None, None, None  # type: ignore[attr-defined]


def _turn(x: Tensor, turns: Tensor) -> Tensor:
    """Every pair of x [B, S, N, hd] times its complex number [(B,) S, 1, hd/2]; a new tensor."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2)
