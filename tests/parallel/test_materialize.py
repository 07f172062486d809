"""From meta parameters to local weights: values, ties, marks, memory and refusals."""

from __future__ import annotations

import resource
import weakref

import pytest
import torch
from torch import Tensor, nn

from harness import run_ranks
from megaparcae.parallel.materialize import materialize
from megaparcae.parallel.mesh import make_mesh
from megaparcae.parallel.shard import ShardSpec, set_spec, spec_of
from megaparcae.parallel.tensor import apply_tp

CPU = torch.device("cpu")


class Tied(nn.Module):
    """Two matrices, a vector, and a head that is the embedding."""

    def __init__(self, rows: int = 8, width: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, width)
        self.up = nn.Linear(width, rows, bias=False)
        self.down = nn.Linear(rows, width, bias=False)
        self.scale = nn.Parameter(torch.ones(width), requires_grad=False)
        self.head = nn.Linear(width, rows, bias=False)
        self.head.weight = self.embedding.weight


PLAN = {
    "embedding": "vocab",
    "head": "vocab_head",
    "up": "column",
    "down": "row",
    "scale": "replicated",
}


def laid_out(tp: int, dtype: torch.dtype = torch.float32, **sizes: int) -> Tied:
    with torch.device("meta"):
        model = Tied(**sizes).to(dtype)
    apply_tp(model, PLAN, make_mesh(pp=1, tp=tp), sequence_parallel=True)
    return model


def value_of(name: str, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(shape, generator=generator)


def local_weights(tp: int) -> dict[str, Tensor]:
    model = laid_out(tp)
    materialize(model, value_of, CPU)
    for name, parameter in model.named_parameters():
        spec = spec_of(parameter)
        assert spec.name == name and tuple(parameter.shape) == spec.local_shape
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("tp", [2, 4])
def test_slices_of_the_ranks_are_the_full_tensors_of_one_rank(tp):
    whole = local_weights(1)
    ranks = run_ranks(local_weights, tp, tp)
    for name, dim in {"embedding.weight": 0, "up.weight": 0, "down.weight": 1}.items():
        assert torch.equal(torch.cat([rank[name] for rank in ranks], dim), whole[name])
    assert all(torch.equal(rank["scale"], whole["scale"]) for rank in ranks)


def test_each_value_is_asked_for_once_by_canonical_name_and_full_shape():
    asked: list[tuple[str, tuple[int, ...]]] = []

    def record(name: str, shape: tuple[int, ...]) -> Tensor:
        asked.append((name, shape))
        return value_of(name, shape)

    materialize(laid_out(1), record, CPU)
    assert sorted(asked) == [
        ("down.weight", (4, 8)),
        ("embedding.weight", (8, 4)),
        ("scale", (4,)),
        ("up.weight", (8, 4)),
    ]


def test_ties_types_and_marks_are_kept():
    model = laid_out(1, dtype=torch.bfloat16)
    materialize(model, value_of, CPU)
    assert model.head.weight is model.embedding.weight
    assert not model.scale.requires_grad and model.up.weight.requires_grad
    assert model.up.weight.dtype == torch.bfloat16
    assert spec_of(model.scale).tp_partial
    assert model.up.weight.tensor_model_parallel


def test_real_parameters_are_left_alone():
    model = laid_out(1)
    real = nn.Parameter(torch.full((4,), 7.0))
    set_spec(real, ShardSpec(name="scale", full_shape=(4,)))
    model.scale = real
    materialize(model, value_of, CPU)
    assert model.scale is real


def test_weights_do_not_share_memory_with_the_values_given():
    given: dict[str, Tensor] = {}

    def remember(name: str, shape: tuple[int, ...]) -> Tensor:
        given[name] = value_of(name, shape)
        return given[name]

    model = laid_out(1)
    materialize(model, remember, CPU)
    given["scale"].zero_()
    assert model.scale.all()


def test_only_one_full_tensor_exists_at_a_time():
    alive: list[weakref.ref[Tensor]] = []

    def count(name: str, shape: tuple[int, ...]) -> Tensor:
        assert all(earlier() is None for earlier in alive)
        full = value_of(name, shape)
        alive.append(weakref.ref(full))
        return full

    materialize(laid_out(1), count, CPU)
    assert len(alive) == 4


def peak_growth(tp: int) -> int:
    """Bytes by which materialising three 64 MiB matrices raises the process's peak memory."""
    model = laid_out(tp, rows=2**14, width=2**10)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    materialize(model, lambda _, shape: torch.ones(shape), CPU)
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def test_peak_memory_is_the_local_weights_and_one_full_tensor():
    full = 2**26
    for growth in run_ranks(peak_growth, 2, 2):
        assert growth < 1.1 * (3 * full / 2 + full)


def test_a_parameter_without_a_record_is_named():
    with torch.device("meta"):
        model = Tied()
    with pytest.raises(ValueError, match=r"no ShardSpec on .*embedding\.weight.*apply_tp"):
        materialize(model, value_of, CPU)


def test_a_buffer_on_the_meta_device_is_named():
    model = laid_out(1)
    model.register_buffer("table", torch.empty(3, device="meta"))
    with pytest.raises(ValueError, match="buffers table are on the meta device"):
        materialize(model, value_of, CPU)
