"""Muon against the authors' numbers."""

from __future__ import annotations

import pytest
import torch
from golden_optimizer import meta, names, tensors
from torch import Tensor

from megaparcae.optim.muon import POLAR_EXPRESS, Muon, orthogonalize

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def relative(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


def by_shape(members: list[str]) -> dict[tuple[int, int], list[str]]:
    shapes: dict[tuple[int, int], list[str]] = {}
    for name in members:
        shapes.setdefault(tuple(meta()["parameters"][name]["shape"]), []).append(name)
    return shapes


def run(dtype: str, schedule: list[tuple[float, float, float]]) -> dict[str, Tensor]:
    """Parameters, momenta and second moments after one update per (lr, momentum, decay)."""
    result = {}
    muon = Muon(lr=0.008, dtype=dtype)
    for shape, members in by_shape(names("muon")).items():
        parameters = [tensors("init/")[n] for n in members]
        momentum = torch.zeros(len(members), *shape)
        second = torch.zeros(len(members), *muon.second_moment_shape(shape))
        for step, (lr, mu, decay) in enumerate(schedule, 1):
            gradients = tensors(f"grad{step}/")
            ahead = muon.look_ahead(torch.stack([gradients[n] for n in members]), momentum, mu)
            update = muon.direction(ahead, second)
            muon.apply(parameters, update, full_shape=shape, lr=lr, weight_decay=decay)
            result |= {f"{step}/{n}": p.clone() for n, p in zip(members, parameters, strict=True)}
        result |= {f"momentum/{n}": m for n, m in zip(members, momentum, strict=True)}
        result |= {f"second_moment/{n}": v for n, v in zip(members, second, strict=True)}
    return result


def assert_movement(ours: Tensor, theirs: Tensor, start: Tensor, tolerance: float) -> None:
    assert relative(ours - start, theirs - start) <= tolerance


@pytest.fixture(scope="module")
def fp32() -> dict[str, Tensor]:
    return run("fp32", [(0.008, 0.95, 0.2)] * 5)


def test_coefficients_are_the_authors():
    assert [list(line) for line in POLAR_EXPRESS] == meta()["polar_express_coefficients"]


@pytest.mark.parametrize("step", range(1, 6))
def test_five_fp32_steps_move_every_matrix_as_the_authors_do(fp32, step):
    golden = tensors(f"fp32/param{step}/")
    for name, start in tensors("init/").items():
        if name in names("muon"):
            assert_movement(fp32[f"{step}/{name}"], golden[name], start, 5e-5)


@pytest.mark.parametrize("key", ["momentum", "second_moment"])
def test_states_after_five_fp32_steps_are_the_authors(fp32, key):
    for name, golden in tensors(f"fp32/state5/{key}/").items():
        assert relative(fp32[f"{key}/{name}"], golden) <= 5e-5


def test_five_bf16_steps_stay_near_the_authors():
    ours = run("bf16", [(0.008, 0.95, 0.2)] * 5)
    for name, start in tensors("init/").items():
        if name in names("muon"):
            assert_movement(ours[f"5/{name}"], tensors("bf16/param5/")[name], start, 0.12)


def test_scheduled_rate_momentum_and_decay_move_every_matrix_as_the_authors_do():
    run_meta = meta()["scheduled_run"]
    rows = zip(
        run_meta["lr"], run_meta["muon_momentum"], run_meta["muon_weight_decay"], strict=True
    )
    ours = run("fp32", list(rows))
    golden = tensors("scheduled_fp32/param5/")
    for name in names("muon"):
        assert_movement(ours[f"5/{name}"], golden[name], tensors("init/")[name], 5e-5)


@pytest.mark.parametrize("dtype, tolerance", [("fp32", 5e-5), ("bf16", 0.12)])
def test_orthogonalised_gradient_is_the_authors(dtype, tolerance):
    for name, golden in tensors(f"orthogonalised/{dtype}/").items():
        ours = orthogonalize(tensors("grad1/")[name][None], DTYPES[dtype])[0].float()
        assert relative(ours, golden) <= tolerance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(32, 32), (96, 24), (24, 96)])
def test_singular_values_come_near_one(dtype, shape):
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(matrices, DTYPES[dtype]).float())
    assert values.min() >= 0.39
    assert values.max() <= 1.15


def test_equalised_direction_keeps_the_norm():
    x = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(1)) * torch.arange(1.0, 7)
    y = Muon(lr=1.0, dtype="fp32").equalize(x, torch.zeros(2, 8, 1))
    assert torch.allclose(y.norm(dim=(1, 2)), x.norm(dim=(1, 2)), rtol=1e-5)


def test_zero_gradient_leaves_a_matrix_where_it_is_but_for_decay():
    muon, start = Muon(lr=0.1, dtype="fp32"), torch.ones(4, 4)
    for decay in (0.0, 0.2):
        parameters = [start.clone()]
        ahead = muon.look_ahead(torch.zeros(1, 4, 4), torch.zeros(1, 4, 4), 0.95)
        update = muon.direction(ahead, torch.zeros(1, 4, 1))
        muon.apply(parameters, update, full_shape=(4, 4), lr=0.1, weight_decay=decay)
        assert torch.equal(parameters[0], start - 0.1 * decay)
