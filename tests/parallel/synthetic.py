"""A set of parameters like a small looped model's, with made-up gradients, on any layout."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megaparcae.config.schema import OptimizerConfig
from megaparcae.optim.recipe import make_recipe
from megaparcae.parallel.mesh import Mesh, make_mesh
from megaparcae.parallel.shard import ShardSpec, set_spec, spec_of
from megaparcae.parallel.sharded_optimizer import ShardedOptimizer

D, FF, VOCAB = 16, 48, 384
Layout = tuple[int, int, int]
"""pp, dp, tp."""


def shapes() -> dict[str, tuple[int, ...]]:
    """Canonical names and full shapes."""
    result: dict[str, tuple[int, ...]] = {"embedding.weight": (VOCAB, D)}
    for part in ("prelude.0", "core.0", "core.1", "coda.0"):
        result |= {f"{part}.attention.{x}_proj.weight": (D, D) for x in "qkvo"}
        result |= {f"{part}.mlp.up_proj.weight": (FF, D), f"{part}.mlp.down_proj.weight": (D, FF)}
        result |= {f"{part}.attention_norm.weight": (D,), f"{part}.mlp_norm.weight": (D,)}
    result["core.1.attention.value_gate.weight"] = (4, 8)
    result |= {"value_embeddings.2.weight": (VOCAB, D), "injection.B": (D, D)}
    return result | {"injection.A_log": (D,), "readout.weight": (D, D), "final_norm.weight": (D,)}


def stages_of(name: str, pp: int) -> tuple[int, ...]:
    """The embedding is tied to the head; three stages share the core in overlapping pairs."""
    last = pp - 1
    if name.startswith("prelude"):
        return (0,)
    if name.startswith(("coda", "final", "readout")):
        return (last,)
    if name.startswith("embedding"):
        return tuple(sorted({0, last}))
    if pp == 3 and name.startswith("core.0"):
        return (0, 1)
    if pp == 3 and name.startswith("core.1"):
        return (1, 2)
    return tuple(range(pp))


def split_dim(name: str) -> int | None:
    """The dimension that tensor parallelism splits."""
    if name.endswith(("o_proj.weight", "down_proj.weight")) or name.startswith("value_embeddings"):
        return 1
    if "_proj" in name or "value_gate" in name or name.startswith("embedding"):
        return 0
    return None


def make_spec(name: str, pp: int, tp: int, tp_index: int) -> ShardSpec:
    """Norms have gradients in parts, as under sequence parallelism."""
    dim = split_dim(name) if tp > 1 else None
    return ShardSpec(
        name=name,
        full_shape=shapes()[name],
        dim=dim,
        index=tp_index if dim is not None else 0,
        num_slices=tp if dim is not None else 1,
        stages=stages_of(name, pp),
        tp_partial=tp > 1 and "norm" in name,
    )


def draw(*key: object, shape: tuple[int, ...]) -> Tensor:
    """Normal numbers that depend on the key alone."""
    seed = zlib.crc32(repr(key).encode())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def initial(name: str) -> Tensor:
    """Full start value."""
    return draw("init", name, shape=shapes()[name]) * 0.1


def gradient(name: str, step: int) -> Tensor:
    """The true gradient, of varying size; some rows of tables are never touched."""
    full = draw("grad", name, step, shape=shapes()[name]) * (0.02 + 0.1 * (step % 3))
    if full.shape[0] == VOCAB:
        full[::7] = 0
    return full


def contribution(spec: ShardSpec, step: int, mesh: Mesh) -> Tensor | None:
    """What this rank's backward gives: the true gradient is the sum over dp, stages and parts."""
    parts = [(s, d) for s in spec.stages for d in range(mesh.dp.size)]
    if spec.tp_partial:
        parts = [(*part, t) for part in parts for t in range(mesh.tp.size)]
    me = (mesh.pp.index, mesh.dp.index, *((mesh.tp.index,) if spec.tp_partial else ()))

    true = gradient(spec.name, step)

    def share(part: tuple[int, ...]) -> Tensor:  # 0 where the sum is: AdamW would magnify rounding
        return draw("share", spec.name, step, part, shape=spec.full_shape) * 0.05 * (true != 0)

    if me != parts[-1]:
        return spec.take(share(me))
    return spec.take(true - sum(share(part) for part in parts[:-1]))


def hyperparameters(step: int) -> tuple[float, float, float]:
    """Rate, momentum and decay change with every step."""
    return 1 - step / 100, 0.85 + 0.01 * min(step, 10), 0.2 * (1 - step / 100)


def config(name: str = "muon_adamw", **options: Any) -> OptimizerConfig:
    """The optimizer under test."""
    settings = {"lr": 0.004, "muon_lr": 0.004, "weight_decay": 0.1, "muon_dtype": "fp32"} | options
    return OptimizerConfig(name=name, **settings)


def make_parameters(mesh: Mesh) -> list[nn.Parameter]:
    """This rank's slices of the parameters of its stage."""
    parameters = []
    for name in shapes():
        spec = make_spec(name, mesh.pp.size, mesh.tp.size, mesh.tp.index)
        if mesh.pp.index in spec.stages:
            parameters.append(nn.Parameter(spec.take(initial(name)).clone()))
            set_spec(parameters[-1], spec)
    # Stages register what they share in different orders.
    return parameters[::-1] if mesh.pp.index % 2 else parameters


class Run:
    """One rank of a training run."""

    def __init__(self, layout: Layout, optimizer: OptimizerConfig) -> None:
        pp, _, tp = layout
        self.mesh = make_mesh(pp=pp, tp=tp)
        self.parameters = make_parameters(self.mesh)
        self.optimizer = ShardedOptimizer(self.parameters, make_recipe(optimizer), self.mesh)
        self.norms: list[float] = []

    def steps(self, first: int, end: int) -> Run:
        """Make the updates first .. end - 1."""
        for step in range(first, end):
            for parameter in self.parameters:
                parameter.grad = contribution(spec_of(parameter), step, self.mesh)
            self.step(step)
        return self

    def step(self, step: int) -> None:
        """One update from the gradients that are there."""
        self.optimizer.set_hyperparameters(*hyperparameters(step))
        self.optimizer.step()
        self.norms.append(self.optimizer._global_grad_norm)

    def weights(self) -> list[tuple[ShardSpec, Tensor]]:
        """Records and values of this rank's parameters."""
        return [(spec_of(p), p.detach().clone()) for p in self.parameters]

    def states(self) -> list[tuple[ShardSpec, str, Tensor]]:
        """Records, keys and values of this rank's states."""
        return [(s, key, t.clone()) for s, key, t in self.optimizer.named_states()]


def assemble(
    pieces: Iterator[tuple[ShardSpec, str, Tensor]],
) -> dict[tuple[str, str], Tensor]:
    """Full tensors by (name, key) from pieces that together cover them."""
    full: dict[tuple[str, str], Tensor] = {}
    for spec, key, value in pieces:
        target = full.setdefault((spec.name, key), torch.full(spec.full_shape, torch.nan))
        target[region(spec)] = value
    assert not any(tensor.isnan().any() for tensor in full.values())
    return full


def region(spec: ShardSpec) -> tuple[slice, ...]:
    """Where the local tensor lies in the full one."""
    borders = zip(spec.offset, spec.local_shape, strict=True)
    return tuple(slice(begin, begin + size) for begin, size in borders)
