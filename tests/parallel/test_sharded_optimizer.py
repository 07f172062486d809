"""Every layout makes the updates of one plain process."""

from __future__ import annotations

import math

import pytest
import torch
from synthetic import (
    Layout,
    Run,
    assemble,
    config,
    contribution,
    gradient,
    hyperparameters,
    initial,
    region,
    shapes,
)
from torch import Tensor, nn

from harness import run_ranks
from megaparcae.config.schema import OptimizerConfig
from megaparcae.optim import muon
from megaparcae.optim.adamw import ClippedAdamW, adamw_step
from megaparcae.optim.param_groups import parameter_rule
from megaparcae.optim.recipe import make_recipe
from megaparcae.parallel.grad_norm import counts_here
from megaparcae.parallel.mesh import make_mesh
from megaparcae.parallel.shard import spec_of
from megaparcae.parallel.sharded_optimizer import ShardedOptimizer

LAYOUTS = [
    (1, 1, 1),
    (1, 2, 1),
    (1, 4, 1),
    (1, 1, 2),
    (1, 2, 2),
    (2, 1, 1),
    (2, 2, 1),
    (2, 1, 2),
    (3, 1, 1),
    (2, 2, 2),
]


def on_ranks(layout: Layout, fn, *args) -> list:
    """fn(layout, *args) on each rank; one rank needs no process group."""
    if math.prod(layout) == 1:
        return [fn(layout, *args)]
    return run_ranks(fn, math.prod(layout), layout, *args, timeout=120)


def train(layout: Layout, optimizer: OptimizerConfig, num_steps: int):
    run = Run(layout, optimizer).steps(0, num_steps)
    return run.weights(), run.norms


class Plain:
    """One tensor after the other, with the definitions of `optim` and torch's own clipping."""

    def __init__(self, optimizer: OptimizerConfig) -> None:
        self.optimizer = optimizer
        self.weights = {name: nn.Parameter(initial(name)) for name in shapes()}
        self.states = {name: self.zero_states(name) for name in shapes()}
        self.norms: list[float] = []

    def kind(self, name: str) -> str:
        return parameter_rule(name, shapes()[name], self.optimizer.name).kind

    def zero_states(self, name: str) -> tuple[Tensor, Tensor]:
        shape = shapes()[name]
        if self.kind(name) == "muon":
            second = make_recipe(self.optimizer).muon.second_moment_shape(shape)
            return torch.zeros(1, *shape), torch.zeros(1, *second)
        return torch.zeros(shape), torch.zeros(shape)

    def steps(self, num_steps: int) -> Plain:
        for step in range(num_steps):
            for name, weight in self.weights.items():
                weight.grad = gradient(name, step)
            norm = torch.nn.utils.clip_grad_norm_(
                self.weights.values(), self.optimizer.grad_clip or math.inf
            )
            self.norms.append(norm.item())
            with torch.no_grad():
                for name in self.weights:
                    self.update(name, step)
        return self

    def update(self, name: str, step: int) -> None:
        c, weight, states = self.optimizer, self.weights[name], self.states[name]
        factor, momentum, decay = hyperparameters(step)
        if self.kind(name) == "muon":
            rule = make_recipe(c).muon
            ahead = rule.look_ahead(weight.grad[None], states[0], momentum)
            rule.apply(
                [weight],
                rule.direction(ahead, states[1]),
                full_shape=weight.shape,
                lr=c.muon_lr * factor,
                weight_decay=decay,
            )
            return
        decayed = parameter_rule(name, weight.shape, c.name).decayed
        if decayed:
            weight *= 1 - c.lr * factor * c.weight_decay
        tensors = ([weight], [weight.grad], [states[0]], [states[1]])
        rest = {"lr": c.lr * factor, "step": step + 1}
        if c.name == "adamw_rdm":
            rule = ClippedAdamW(lr=c.lr, betas=c.betas, weight_decay=0)
            mean = lambda sums: sums / weight.numel()  # noqa: E731
            rule.update(*tensors, decayed=[False], mean_over_parameters=mean, **rest)
        else:
            adamw_step(*tensors, betas=c.betas, eps=c.eps, **rest)


def assert_weights_are_those_of(plain: Plain, results: list) -> None:
    seen = set()
    for weights, norms in results:
        assert norms == pytest.approx(plain.norms, rel=1e-6)
        for spec, ours in weights:
            seen.add(spec.name)
            theirs = spec.take(plain.weights[spec.name].detach())
            difference = but_for_flips(ours - theirs, theirs, plain.optimizer)
            assert (difference.norm() / theirs.norm()).item() <= 1e-5, spec.name
    assert seen == set(shapes())


def but_for_flips(difference: Tensor, weight: Tensor, optimizer: OptimizerConfig) -> Tensor:
    """Cautious decay is a step function: where an update is ~0, rounding decides whether lr wd |p|
    is taken off. Two elements of a tensor may differ by that; the gradients here stay the same."""
    largest = 1.1 * optimizer.muon_lr * optimizer.muon_weight_decay * weight.abs()
    flipped = (difference.abs() > 2e-6) & (difference.abs() <= largest)
    assert flipped.sum() <= 2
    return difference[~flipped]


@pytest.fixture(scope="module")
def plain() -> Plain:
    return Plain(config()).steps(20)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_twenty_muon_steps_are_those_of_one_plain_process(layout, plain):
    assert_weights_are_those_of(plain, on_ranks(layout, train, config(), 20))


@pytest.mark.parametrize("name", ["adamw", "adamw_rdm"])
@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 4, 1), (1, 3, 2), (3, 1, 2)])
def test_twenty_adamw_steps_are_those_of_one_plain_process(layout, name):
    results = on_ranks(layout, train, config(name), 20)
    assert_weights_are_those_of(Plain(config(name)).steps(20), results)


def has_pieces(layout: Layout, optimizer: OptimizerConfig) -> bool:
    return any(s.rows is not None for s, _, _ in Run(layout, optimizer).states())


@pytest.mark.parametrize("name", ["muon_adamw", "adamw_rdm"])
def test_these_layouts_do_cut_tables(name):
    assert any(on_ranks((1, 4, 1), has_pieces, config(name)))


def test_no_clipping_when_it_is_off():
    off = config(grad_clip=0.0)
    assert_weights_are_those_of(Plain(off).steps(5), on_ranks((1, 2, 1), train, off, 5))


def train_with_noisy_copies(layout: Layout, num_steps: int):
    """Copies' gradients differ in the last bits, as from kernels with atomic additions."""
    run = Run(layout, config())
    for step in range(num_steps):
        for parameter in run.parameters:
            spec = spec_of(parameter)
            parameter.grad = contribution(spec, step, run.mesh)
            parameter.grad *= 1 + 1e-6 * (spec.dim is None) * run.mesh.tp.index
        run.step(step)
    return run.weights(), run.states()


@pytest.mark.parametrize("layout", [(2, 3, 1), (2, 4, 1), (2, 1, 2), (1, 3, 2), (3, 2, 1)])
def test_replicas_and_copies_are_equal_bit_by_bit_after_fifty_steps(layout):
    first: dict[tuple, Tensor] = {}
    for weights, states in on_ranks(layout, train_with_noisy_copies, 50):
        for spec, key, value in [(spec, "weight", w) for spec, w in weights] + states:
            seen = first.setdefault((spec.name, key, spec.offset), value)
            assert torch.equal(seen, value), (spec.name, key)


def state_sizes(layout: Layout) -> tuple[int, int]:
    """Elements of this rank's states: all, and those that are no copy of another rank's."""
    run, held, counted = Run(layout, config()), 0, 0
    for spec, _, value in run.states():
        held += value.numel()
        here = counts_here(spec, stage=run.mesh.pp.index, tp_index=run.mesh.tp.index)
        counted += value.numel() * here
    return held, counted


@pytest.mark.parametrize("layout", [(1, 2, 1), (1, 4, 1), (1, 2, 2), (2, 2, 1)])
def test_all_ranks_together_hold_one_copy_of_the_states(layout):
    one = state_sizes((1, 1, 1))[0]
    sizes = on_ranks(layout, state_sizes)
    assert sum(counted for _, counted in sizes) == one
    if layout[0] == layout[2] == 1:  # no copies for tensor or pipeline parallelism
        assert sum(held for held, _ in sizes) == one
        assert max(held for held, _ in sizes) <= 1.05 * one / layout[1]


def first_half(layout: Layout):
    run = Run(layout, config()).steps(0, 10)
    return run.weights(), run.states(), run.optimizer.step_count


def second_half(layout: Layout, weights: dict, states: dict, step_count: int):
    run = Run(layout, config())
    for parameter in run.parameters:
        spec = spec_of(parameter)
        parameter.data.copy_(weights[spec.name, "weight"][region(spec)])
    for spec, key, local in run.optimizer.named_states():
        local.copy_(states[spec.name, key][region(spec)])
    run.optimizer.step_count = step_count
    run.optimizer.after_load()
    run.steps(10, 20)
    return run.weights(), run.norms


@pytest.mark.parametrize("before, after", [((1, 2, 2), (2, 1, 1)), ((3, 1, 1), (1, 4, 1))])
def test_states_continue_on_another_layout(before, after, plain):
    halves = on_ranks(before, first_half)
    weights = assemble((s, "weight", w) for half in halves for s, w in half[0])
    states = assemble(piece for half in halves for piece in half[1])
    results = on_ranks(after, second_half, weights, states, halves[0][2])
    for _, norms in results:
        norms[:0] = plain.norms[:10]
    assert_weights_are_those_of(plain, results)


def train_with_a_nan(layout: Layout, bad_rank: int):
    run = Run(layout, config()).steps(0, 5)
    before, count = run.weights(), run.optimizer.step_count
    for parameter in run.parameters:
        bad = math.nan if run.mesh.rank == bad_rank else 1.0
        parameter.grad = torch.full_like(parameter, bad)
    run.step(5)
    assert run.optimizer.last_step_skipped
    assert run.optimizer.step_count == count
    unchanged = [torch.equal(a, b) for (_, a), (_, b) in zip(before, run.weights(), strict=True)]
    run.norms.pop()
    run.steps(5, 20)
    assert not run.optimizer.last_step_skipped
    assert run.optimizer.skipped_steps == 1
    return all(unchanged), run.weights(), run.norms


@pytest.mark.parametrize("layout, bad_rank", [((1, 1, 1), 0), ((2, 1, 2), 3), ((1, 2, 1), 1)])
def test_a_nan_on_one_rank_skips_the_step_on_all_and_leaves_no_trace(layout, bad_rank, plain):
    results = on_ranks(layout, train_with_a_nan, bad_rank)
    assert all(unchanged for unchanged, *_ in results)
    assert_weights_are_those_of(plain, [rest for _, *rest in results])


def gradients_by_backward(layout: Layout, release: bool):
    """Two micro-batches by real backward passes; the second adds to the first."""
    run = Run(layout, config())
    for step in range(5):
        for share in (0.25, 0.75):
            whole = [(p, gradient(spec_of(p).name, step)) for p in run.parameters]
            sum((p * g).sum() * share / layout[1] for p, g in whole).backward()
        if release:  # what a user may do with gradients
            for parameter in run.parameters:
                parameter.grad = parameter.grad.clone()
        run.step(step)
        assert all(p.grad is None for p in run.parameters)
    return run.weights(), run.norms


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 2, 1)])
def test_micro_batches_accumulate_in_the_buffer(layout, release):
    results = on_ranks(layout, gradients_by_backward, release)
    assert_weights_are_those_of(Plain(config()).steps(5), results)


def test_a_missing_gradient_counts_as_zero():
    run = Run((1, 1, 1), config(muon_weight_decay=0.0, weight_decay=0.0))
    run.step(0)
    assert run.norms == [0.0]
    for spec, weight in run.weights():
        if "_proj" not in spec.name:
            assert torch.equal(weight, initial(spec.name)), spec.name


def test_every_muon_matrix_is_orthogonalised_once_per_step(monkeypatch):
    run, counted = Run((1, 1, 1), config()), []
    plain = muon.orthogonalize
    monkeypatch.setattr(
        muon, "orthogonalize", lambda x, dtype: counted.append(len(x)) or plain(x, dtype)
    )
    run.steps(0, 3)
    assert sum(counted) == 3 * sum("_proj" in name for name in shapes())
    assert len(counted) == 3 * 3  # three shapes, batched


def test_rates_are_visible_in_the_param_groups():
    run = Run((1, 1, 1), config(lr=0.001, muon_lr=0.002))
    run.optimizer.set_hyperparameters(0.5, 0.9, 0.1)
    assert {g["kind"]: g["lr"] for g in run.optimizer.param_groups} == {
        "muon": 0.001,
        "adamw": 0.0005,
    }


def test_bf16_weights_are_refused():
    mesh = make_mesh(pp=1, tp=1)
    run = Run((1, 1, 1), config())
    run.parameters[0].data = run.parameters[0].data.bfloat16()
    with pytest.raises(ValueError, match=r"embedding\.weight is torch\.bfloat16"):
        ShardedOptimizer(run.parameters, make_recipe(config()), mesh)
