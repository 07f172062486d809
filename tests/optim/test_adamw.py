"""AdamW against the authors' numbers, and the clipped form against its formula."""

from __future__ import annotations

import pytest
import torch
from golden_optimizer import meta, names, tensors
from torch import Tensor

from megaparcae.optim.adamw import AdamW, ClippedAdamW, adamw_step


def zeros(like: list[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(x) for x in like]


def mean_over_whole(parameters: list[Tensor]):
    numels = torch.tensor([float(p.numel()) for p in parameters])
    return lambda sums: sums / numels


def run(rule, rates: list[float], gradients: list[list[Tensor]], parameters: list[Tensor]):
    """Parameters after every step, and the two states."""
    first, second, trace = zeros(parameters), zeros(parameters), []
    for step, (lr, grads) in enumerate(zip(rates, gradients, strict=True), 1):
        rule.update(
            parameters,
            grads,
            first,
            second,
            lr=lr,
            decayed=[True] * len(parameters),
            step=step,
            mean_over_parameters=mean_over_whole(parameters),
        )
        trace.append([p.clone() for p in parameters])
    return trace, first, second


def golden_run(rates: list[float], weight_decay: float):
    members = names("adamw")
    rule = AdamW(lr=0.008, betas=(0.8, 0.95), eps=1e-10, weight_decay=weight_decay)
    gradients = [[tensors(f"grad{s}/")[n] for n in members] for s in range(1, 6)]
    return members, *run(rule, rates, gradients, [tensors("init/")[n] for n in members])


def assert_movement(name: str, ours: Tensor, theirs: Tensor) -> None:
    moved = theirs - tensors("init/")[name]
    assert ((ours - theirs).norm() / moved.norm()).item() <= 1e-5


def test_five_steps_and_states_are_the_authors():
    members, trace, first, second = golden_run([0.008] * 5, weight_decay=0.0)
    for step, parameters in enumerate(trace, 1):
        golden = tensors(f"adamw/param{step}/")
        for name, ours in zip(members, parameters, strict=True):
            assert_movement(name, ours, golden[name])
    for key, states in (("exp_avg", first), ("exp_avg_sq", second)):
        golden = tensors(f"adamw/state5/{key}/")
        for name, ours in zip(members, states, strict=True):
            assert ((ours - golden[name]).norm() / golden[name].norm()).item() <= 1e-5


def test_scheduled_rates_and_decay_move_every_parameter_as_the_authors_do():
    members, trace, _, _ = golden_run(meta()["scheduled_run"]["adamw_lr"], weight_decay=0.1)
    golden = tensors("scheduled_fp32/param5/")
    for name, ours in zip(members, trace[-1], strict=True):
        assert_movement(name, ours, golden[name])


def test_fused_kernel_does_what_the_definition_says():
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.randn(n, generator=generator) for n in (5, 64, 1000)]
    plain, first, second = [p.clone() for p in parameters], zeros(parameters), zeros(parameters)
    rule = AdamW(lr=0.01, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
    gradients = [[torch.randn(p.shape, generator=generator) for p in plain] for _ in range(4)]
    trace, *_ = run(rule, [0.01] * 4, gradients, parameters)
    for step, grads in enumerate(gradients, 1):
        adamw_step(plain, grads, first, second, lr=0.01, betas=(0.9, 0.95), eps=1e-10, step=step)
    for ours, theirs in zip(trace[-1], plain, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)


def clipped_formula(gradients: list[Tensor], start: Tensor, lr: float, decay: float) -> Tensor:
    """RDM's update in float64, written out."""
    p, m, v = start.double(), torch.zeros(()), torch.zeros(())
    for t, gradient in enumerate(gradients, 1):
        g = gradient.double()
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        m_hat, v_hat = m / (1 - 0.9**t), v / (1 - 0.95**t)
        rms = (g * g / v_hat).nan_to_num(0.0).mean().sqrt()
        update = (m_hat / v_hat.sqrt()).nan_to_num(0.0) / max(1.0, rms.item())
        p = p * (1 - lr * decay) - lr * update
    return p.float()


@pytest.mark.parametrize("growth", [0.5, 1.0, 10.0])
def test_clipped_adamw_is_its_formula(growth):
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(12, 7, generator=generator)
    gradients = [torch.randn(12, 7, generator=generator) * growth**t for t in range(5)]
    for g in gradients:
        g[2] = 0.0  # never touched, as the row of a token that does not occur
    rule = ClippedAdamW(lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    trace, *_ = run(rule, [0.01] * 5, [[g] for g in gradients], [start.clone()])
    expected = clipped_formula(gradients, start, 0.01, 0.1)
    moved = expected - start
    assert ((trace[-1][0] - expected).norm() / moved.norm()).item() <= 1e-5


def test_clipping_shortens_the_step_after_a_gradient_jump():
    def last_step(jump: float) -> float:
        start, rule = torch.zeros(100), ClippedAdamW(lr=1.0, betas=(0.9, 0.95), weight_decay=0.0)
        grads = [[torch.ones(100)]] * 20 + [[torch.full((100,), jump)]]
        trace, *_ = run(rule, [1.0] * 21, grads, [start])
        return (trace[-1][0] - trace[-2][0]).abs().max().item()

    assert last_step(100.0) < 0.5 < last_step(1.0)
