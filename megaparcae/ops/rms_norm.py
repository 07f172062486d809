"""Weighted RMSNorm: apex's kernel on CUDA when it is there, PyTorch's kernel, or on CPU, where
PyTorch has none for it, one with few passes over memory."""

# B rows, S positions, d width
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable

from megaparcae.ops.apex import nvidia_apex


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension; x and weight are of one type.

    `F.rms_norm` is the definition.
    """
    if torch.compiler.is_compiling():
        return F.rms_norm(x, weight.shape, weight, eps)
    if x.device.type == "cpu":
        return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-any-return]
    if x.is_cuda and nvidia_apex():
        from apex.normalization.fused_layer_norm import fused_rms_norm_affine

        return fused_rms_norm_affine(x, weight, weight.shape, eps)  # type: ignore[no-any-return]
    return F.rms_norm(x, weight.shape, weight, eps)


class _RMSNorm(Function):
    """y = w x s with s = 1 / sqrt(mean(x^2) + eps);  grad x = s (g w - x s mean(g w x s))."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        scale = squares.div_(x.shape[-1]).add_(eps).rsqrt_()  # [B, S, 1]
        ctx.save_for_backward(x, weight, scale)
        return torch.mul(x, scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors  # type: ignore[attr-defined]
        normalised = x * scale
        buffer = grad * normalised
        grad_weight = buffer.flatten(0, -2).sum(0)
        with torch.autocast(x.device.type, enabled=False):  # on when backward is called inside it
            mean = (buffer @ weight).div_(-x.shape[-1])[..., None]
        torch.mul(grad, weight, out=buffer)
        return buffer.addcmul_(normalised, mean).mul_(scale), grad_weight, None
