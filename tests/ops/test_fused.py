"""The fused operations against their definitions, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megaparcae.model.rope import rope_table
from megaparcae.ops.rms_norm import rms_norm
from megaparcae.ops.rotary import naive_rotary, rotary
from megaparcae.ops.squared_relu import naive_squared_relu, squared_relu

B, S, H, G, HD = 2, 7, 4, 2, 8


def assert_same(found: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> None:
    """Of one type, and apart by no more than the type's rounding of the largest entry."""
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        limit = 4 * torch.finfo(dtype).eps * b.abs().max()
        torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=float(limit))


def with_gradients(function, inputs: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """Outputs, then the gradients of the inputs."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    return [*outputs, *torch.autograd.grad(outputs, leaves, grads)]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("eps", [None, 1e-6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_agrees_with_its_definition(dtype, eps, per_row, autocast):
    """Also when the backward pass is called under autocast, and on a view of a wider product."""
    draw = torch.Generator().manual_seed(0)
    wide = torch.randn(B, S, (H + 2 * G) * HD, generator=draw).to(dtype)
    positions = torch.randint(50, (B, S) if per_row else (S,), generator=draw)
    table = rope_table(positions, HD, 100.0)
    grads = [torch.randn(B, S, n, HD, generator=draw).to(dtype) for n in (H, G)]

    def heads(x: Tensor) -> Tensor:
        return x[..., : (H + G) * HD].unflatten(-1, (-1, HD))

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = with_gradients(lambda x: rotary(heads(x), table, eps, H), [wide], grads)
        expected = with_gradients(
            lambda x: naive_rotary(heads(x), table, eps).tensor_split([H], dim=2), [wide], grads
        )
    assert_same(found, expected, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squared_relu_agrees_with_its_definition(dtype):
    draw = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(64, generator=draw).to(dtype) for _ in range(2))
    found = with_gradients(lambda x: [squared_relu(x)], [x], [grad])
    expected = with_gradients(lambda x: [naive_squared_relu(x)], [x], [grad])
    assert_same(found, expected, dtype)
    with torch.no_grad():
        torch.testing.assert_close(squared_relu(x.clone()), naive_squared_relu(x))


@pytest.mark.parametrize("autocast", [False, True])
def test_rms_norm_agrees_with_pytorchs(autocast):
    draw = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(B, S, 16, generator=draw) for _ in range(2))
    weight = torch.rand(16, generator=draw)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = with_gradients(lambda x, w: [rms_norm(x, w, 1e-5)], [x, weight], [grad])
        expected = with_gradients(lambda x, w: [F.rms_norm(x, (16,), w, 1e-5)], [x, weight], [grad])
    assert_same(found, expected, torch.float32)
