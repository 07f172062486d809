"""Layers split over tensor-parallel ranks against the one-device module, forward and backward."""

# B rows, S positions, d width
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from harness import run_ranks
from megaparcae.config.schema import ModelConfig
from megaparcae.model.attention import Attention, attention_context
from megaparcae.model.mlp import SwiGLUMLP
from megaparcae.model.norm import RMSNorm
from megaparcae.ops.cross_entropy import LMLoss
from megaparcae.parallel.collectives import all_reduce
from megaparcae.parallel.mesh import Mesh, make_mesh
from megaparcae.parallel.sequence import split_sequence, sum_partial_gradients_as_produced
from megaparcae.parallel.shard import spec_of
from megaparcae.parallel.tensor import apply_tp

B, S = 2, 8
LAYER = 1e-6
"""Tolerance of one layer, relative to a tensor's largest entry."""
STACK = 1e-5
"""Of all layers in a row. One device in fp32 is itself 1.0e-6 from fp64 (gradient of k_proj), so
no other order of summation can be held to 1e-6."""
CONFIG = ModelConfig(
    vocab_size=90,
    vocab_multiple=8,
    hidden_size=64,
    intermediate_size=48,
    num_heads=8,
    num_kv_heads=4,
    qk_bias=True,
)
D, PADDED = CONFIG.hidden_size, CONFIG.padded_vocab_size


class ValuedAttention(nn.Module):
    """Attention with grouped heads, biases, a gate and its table."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = Attention(CONFIG, has_value_embedding=True)
        self.table = nn.Embedding(PADDED, CONFIG.kv_heads * CONFIG.head_dim)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        context = attention_context(CONFIG, ids.shape[1], ids.device, None)
        return self.attend(x, context, self.table(ids))


class HeadAndLoss(nn.Module):
    """An untied head, used by the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(D, PADDED, bias=False)
        self.loss = LMLoss(CONFIG.vocab_size, softcap=4.0, chunk_size=5)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        labels = ids.roll(-1, dims=1)
        labels[:, -1] = -100
        loss_sum, count, _ = self.loss(x, self.head.weight, labels)
        return loss_sum / count


class Head(HeadAndLoss):
    """The same head, asked for logits."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.head(x)


class Logits(nn.Module):
    """A head without weights of its own: it is given the embedding's."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return 4.0 * torch.tanh(F.linear(x, weight) / 4.0)


class TiedHead(nn.Module):
    """Embedding and logits from the same parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(PADDED, D)
        self.head = Logits()

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.head(x + self.embedding(ids), self.embedding.weight)


class Residual(nn.Module):
    """Norm, MLP and a replicated matrix, as in the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(D, 1e-5)
        self.mlp = SwiGLUMLP(CONFIG)
        self.readout = nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.readout(x + self.mlp(self.norm(x)))


class TiedLM(nn.Module):
    """Every rule at once, the embedding used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(PADDED, D)
        self.start = nn.Identity()
        self.attention = ValuedAttention()
        self.residual = Residual()
        self.loss = LMLoss(CONFIG.vocab_size, chunk_size=5)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        stream = self.embedding(ids) + x + self.start(torch.ones(B, S, D))
        stream = self.residual(stream + self.attention(stream, ids), ids)
        labels = ids.roll(-1, dims=1)
        loss_sum, count, _ = self.loss(stream, self.embedding.weight, labels)
        return loss_sum / count


PLAN = {
    "*attend": "enter",
    "*mlp": "enter",
    "*[qkv]_proj": "column",
    "*value_gate": "column",
    "*[qk]_bias": "split:0",
    "*o_proj": "row",
    "*up_proj": "column",
    "*gate_proj": "column",
    "*down_proj": "row",
    "*table": "table:1",
    "embedding": "vocab",
    "head": "vocab_head",
    "loss": "vocab_loss",
    "*norm": "replicated",
    "*readout": "replicated",
    "start": "local_positions",
}
CASES: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    # the module, and whether its output is whole on every rank under sequence parallelism
    "attention": (ValuedAttention, False),
    "residual": (Residual, False),
    "head": (Head, True),
    "tied_head": (TiedHead, True),
    "loss": (HeadAndLoss, True),
    "tied_lm": (TiedLM, True),
}
TOLERANCE = {case: STACK if case == "tied_lm" else LAYER for case in CASES}


def build(make: Callable[[], nn.Module]) -> nn.Module:
    """The module, always with the same weights."""
    module = make()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return module


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """x [B, S, d], ids [B, S] and numbers to draw output gradients from."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(B, S, D, generator=generator)
    ids = torch.randint(CONFIG.vocab_size, (B, S), generator=generator)
    return x, ids, torch.randn(B, S, 128, generator=generator)


def output_grad(out: Tensor, numbers: Tensor) -> Tensor:
    return torch.ones_like(out) if out.ndim == 0 else numbers[..., : out.shape[-1]]


def check_against_one_device(case: str, tp: int, sequence_parallel: bool) -> list[Tensor]:
    """Compare on this rank; returns its copies of the gradients that all ranks hold."""
    make, whole_output = CASES[case]
    mesh = make_mesh(pp=1, tp=tp)
    x, ids, numbers = inputs()

    def keep(tensor: Tensor) -> Tensor:
        return split_sequence(tensor, mesh) if sequence_parallel else tensor

    reference = build(make)
    full_x = x.clone().requires_grad_()
    want = reference(full_x, ids)
    want.backward(output_grad(want, numbers))

    module = build(make)
    apply_tp(module, PLAN, mesh, sequence_parallel=sequence_parallel)
    local_x = keep(x).clone().requires_grad_()
    got = module(local_x, ids)
    grad = output_grad(want, numbers)
    got.backward(grad if whole_output else keep(grad))

    tolerance = TOLERANCE[case]
    assert_same(got, want, want if whole_output else keep(want), tolerance)
    assert_same(local_x.grad, full_x.grad, keep(full_x.grad), tolerance)
    return compare_gradients(module, reference, mesh, tolerance)


def compare_gradients(
    module: nn.Module, reference: nn.Module, mesh: Mesh, tolerance: float = LAYER
) -> list[Tensor]:
    """Each local gradient against its part of the full one; returns those of full copies."""
    full = dict(reference.named_parameters())
    assert [name for name, _ in module.named_parameters()] == list(full)
    copies = []
    for name, parameter in module.named_parameters():
        spec = spec_of(parameter)
        assert spec.name == name and spec.full_shape == tuple(full[name].shape)
        grad = parameter.grad
        assert grad is not None
        if spec.tp_partial:
            grad = all_reduce(grad, mesh.tp.group)
        assert_same(grad, full[name].grad, spec.take(full[name].grad), tolerance)
        if spec.dim is None:
            copies.append(grad)
    return copies


def assert_same(
    got: Tensor | None, full: Tensor | None, part: Tensor, tolerance: float = LAYER
) -> None:
    """`got` is this part of the full tensor, in units of the full tensor's largest entry."""
    assert got is not None and full is not None
    torch.testing.assert_close(got, part, rtol=0, atol=tolerance * full.abs().max().item())


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_split_layers_give_outputs_and_gradients_of_one_device(case, tp, sequence_parallel):
    ranks = run_ranks(check_against_one_device, tp, case, tp, sequence_parallel)
    for copies in zip(*ranks, strict=True):
        assert all(torch.equal(copies[0], other) for other in copies[1:])


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_one_rank_goes_the_same_way_without_a_process_group(case, sequence_parallel):
    check_against_one_device(case, 1, sequence_parallel)


def check_embedding(tp: int, sequence_parallel: bool) -> None:
    mesh = make_mesh(pp=1, tp=tp)
    _, ids, numbers = inputs()

    def keep(tensor: Tensor) -> Tensor:
        return split_sequence(tensor, mesh) if sequence_parallel else tensor

    def make() -> nn.Module:
        return nn.ModuleDict({"embedding": nn.Embedding(PADDED, D)})

    reference, module = build(make), build(make)
    apply_tp(module, PLAN, mesh, sequence_parallel=sequence_parallel)
    want, got = reference["embedding"](ids), module["embedding"](ids)
    assert torch.equal(got, keep(want))
    want.backward(numbers[..., :D])
    got.backward(keep(numbers[..., :D]))
    compare_gradients(module, reference, mesh)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_split_embedding_gives_exactly_the_rows_of_one_device(tp, sequence_parallel):
    run_ranks(check_embedding, tp, tp, sequence_parallel)


def check_sums_as_produced(tp: int) -> None:
    mesh = make_mesh(pp=1, tp=tp)
    x, ids, _ = inputs()
    reference, module = build(TiedLM), build(TiedLM)
    apply_tp(module, PLAN, mesh, sequence_parallel=True)
    sum_partial_gradients_as_produced(module, mesh)
    for _ in range(2):  # two micro-batches, accumulated
        reference(x, ids).backward()
        module(split_sequence(x, mesh), ids).backward()
    for name, parameter in module.named_parameters():
        full = reference.get_parameter(name).grad
        assert_same(parameter.grad, full, spec_of(parameter).take(full), STACK)


def test_partial_gradients_can_be_summed_as_they_are_produced():
    run_ranks(check_sums_as_produced, 2, 2)


def losses_in_bf16(tp: int, sequence_parallel: bool) -> tuple[float, float]:
    mesh = make_mesh(pp=1, tp=tp)
    x, ids, _ = inputs()
    reference, module = build(TiedLM), build(TiedLM)
    apply_tp(module, PLAN, mesh, sequence_parallel=sequence_parallel)
    local_x = split_sequence(x, mesh) if sequence_parallel else x
    with torch.autocast("cpu", torch.bfloat16):
        want, got = reference(x, ids), module(local_x, ids)
    got.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in module.parameters())
    return want.item(), got.item()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_bf16_autocast_gives_the_loss_of_one_device_up_to_its_rounding(sequence_parallel):
    for want, got in run_ranks(losses_in_bf16, 2, 2, sequence_parallel):
        assert got == pytest.approx(want, rel=1e-2)


def split_too_short() -> str:
    mesh = make_mesh(pp=1, tp=dist.get_world_size())
    with pytest.raises(ValueError, match="can't be split over 2 tensor-parallel ranks") as caught:
        split_sequence(torch.zeros(1, 3, 4), mesh)
    return str(caught.value)


def test_a_sequence_that_tp_does_not_divide_is_refused():
    assert "sequence_parallel=false" in run_ranks(split_too_short, 2)[0]


def test_a_module_without_a_rule_is_named():
    plan = {name: rule for name, rule in PLAN.items() if name != "*readout"}
    with pytest.raises(ValueError, match="no rule for the parameters of readout; add one of"):
        apply_tp(build(Residual), plan, make_mesh(pp=1, tp=1), sequence_parallel=False)


def test_a_loose_parameter_of_a_module_that_only_communicates_is_named():
    plan = {name: rule for name, rule in PLAN.items() if name != "*[qk]_bias"}
    with pytest.raises(ValueError, match=r"attend\.q_bias, attend\.k_bias"):
        apply_tp(build(ValuedAttention), plan, make_mesh(pp=1, tp=1), sequence_parallel=False)


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match=r"unknown rules \{'norm': 'copied'\}"):
        apply_tp(nn.Identity(), {"norm": "copied"}, make_mesh(pp=1, tp=1), sequence_parallel=False)


def test_layout_works_on_the_meta_device_and_keeps_names_and_marks():
    with torch.device("meta"):
        model = TiedLM()
    names = list(model.state_dict())
    apply_tp(model, PLAN, make_mesh(pp=1, tp=1), sequence_parallel=True)
    assert list(model.state_dict()) == names
    parameters = dict(model.named_parameters())
    assert all(p.is_meta for p in parameters.values())
    assert spec_of(parameters["residual.norm.weight"]).tp_partial
    assert not spec_of(parameters["embedding.weight"]).tp_partial
    assert parameters["embedding.weight"].tensor_model_parallel
    assert not parameters["residual.readout.weight"].tensor_model_parallel
