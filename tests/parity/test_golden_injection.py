"""The input injections alone: output, gradients and initial values of the authors'."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from golden_data import meta, relative, tensors
from megaparcae.config.schema import ModelConfig
from megaparcae.model.init import initial_value
from megaparcae.model.injection import (
    AdditiveInjection,
    DiagonalInjection,
    Drive,
    LinearInjection,
)

OUTPUT, GRADIENT = 1e-6, 3e-6


def run_case(case: str, module: nn.Module) -> None:
    data = tensors("injection", f"{case}.")
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(data[name])
    x, e = data["x"].requires_grad_(), data["e"].requires_grad_()
    drive = Drive(*module(e))
    out = drive.inject(x)
    assert relative(out, data["out"]) < OUTPUT
    if "decay" in data:
        assert relative(drive.decay, data["decay"]) < OUTPUT
    (out * data["upstream"]).sum().backward()
    leaves = {"x": x, "e": e, **dict(module.named_parameters())}
    for name, leaf in leaves.items():
        expected = data.get(f"grad.{name}", data["upstream"])  # additive: both are `upstream`
        assert relative(leaf.grad, expected) < GRADIENT, name


@pytest.mark.parametrize(
    ("case", "module"),
    [
        ("diag_square", DiagonalInjection(64)),
        ("diag_rect", DiagonalInjection(48, 32)),
        ("linear", LinearInjection(48, 32)),
        ("add", AdditiveInjection()),
    ],
)
def test_output_and_gradients_are_the_authors(case, module):
    run_case(case, module)


def test_initial_values_of_the_diagonal_injection_are_the_authors():
    config = ModelConfig(hidden_size=64, num_heads=4)
    for name, value in tensors("injection", "init.square.").items():
        found = initial_value(config, seed=1, name=f"injection.{name}", shape=tuple(value.shape))
        torch.testing.assert_close(found, value, rtol=1e-6, atol=0.0)


def test_the_start_injects_four_fifths_of_e_and_keeps_less_than_half_of_the_state():
    info = meta("injection")["init"]
    config = ModelConfig(hidden_size=64, num_heads=4)
    module = DiagonalInjection(64)
    for name, parameter in module.named_parameters():
        shape = tuple(parameter.shape)
        parameter.data = initial_value(config, seed=1, name=f"injection.{name}", shape=shape)
    ones = torch.ones(1, 64)
    drive = Drive(*module(ones))
    assert drive.decay[0].item() == pytest.approx(info["decay_as_constructed"], rel=1e-6)
    out = drive.inject(torch.zeros(1, 64))
    assert out[0, 0].item() == pytest.approx(info["output_at_init_for_x0_e1"], rel=1e-6)


def test_the_linear_injection_starts_as_the_authors():
    info = meta("injection")["init"]
    config = ModelConfig(hidden_size=64, num_heads=4)
    value = initial_value(config, seed=1, name="injection.weight", shape=(64, 128))
    assert value.std().item() == pytest.approx(info["linear_weight_std_measured_d64"], rel=0.02)
    assert value.abs().max() <= 3 * info["linear_weight_std_formula_d64"]
