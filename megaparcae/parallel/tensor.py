"""Tensor parallelism: apply the plan that a model declares to its modules and parameters.

Megatron's scheme (arXiv 1909.08053, sequence parallelism arXiv 2205.05198). The model is written
for one device; its plan maps patterns of module names (of parameter names for a module's own loose
parameters) to rules. The first pattern that fits decides. A tied head or loss has no parameters: it
is given the embedding's local rows.

    rule             parameters          communication
    enter            -                   before: into the split region (attention, MLP)
    column           split along dim 0   none
    row              split along dim 1   after: out of the split region
    vocab            split along dim 0   after: out of the region; other ranks' ids give zeros
    vocab_head       split along dim 0   before: into the region; after: gather the logits
    vocab_loss       -                   before: into the region; inside: over the vocabulary
    table:1          split along dim 1   none (looked up with all ids, at all positions)
    split:0          split along dim 0   none
    replicated       full copy           none
    local_positions  -                   after: keep this rank's positions of a whole tensor
"""

# B rows, S positions, d width, V vocabulary
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megaparcae.parallel import collectives
from megaparcae.parallel.materialize import like_parameter, replace_parameters
from megaparcae.parallel.mesh import Axis, Mesh
from megaparcae.parallel.shard import ShardSpec, set_spec

SPLIT_DIM: dict[str, int | None] = {
    "column": 0,
    "row": 1,
    "vocab": 0,
    "vocab_head": 0,
    "table:1": 1,
    "split:0": 0,
    "replicated": None,
}
"""Rules for parameters: the dimension that is split."""
RULES = (*SPLIT_DIM, "enter", "vocab_loss", "local_positions")

Move = Callable[[Tensor], Tensor]


def apply_tp(
    model: nn.Module, plan: Mapping[str, str], mesh: Mesh, *, sequence_parallel: bool
) -> None:
    """Lay the model out over `mesh.tp`, in place; every parameter gets its ShardSpec.

    Parameters become their local slices (usually still on the meta device); names and the modules'
    code stay. With sequence_parallel everything outside the split regions is [B, S/tp, d]; ids and
    labels stay whole. Attributes such as `out_features` keep the full sizes.

    Raises ValueError for an unknown rule, a module with parameters of its own that no pattern
    covers, and a dimension that tp does not divide.
    """
    unknown = {pattern: rule for pattern, rule in plan.items() if rule not in RULES}
    if unknown:
        raise ValueError(f"tp_plan has unknown rules {unknown}; choose from {', '.join(RULES)}")
    moves = _moves(mesh.tp.group, sequence_parallel)
    for name, module in model.named_modules():
        _connect(module, find_rule(plan, name), mesh.tp, moves)
    specs = _make_specs(model, plan, mesh.tp, sequence_parallel)

    def localise(name: str, parameter: nn.Parameter) -> nn.Parameter:
        spec = specs[name]
        local = like_parameter(parameter, spec.take(parameter.detach()).clone())
        set_spec(local, spec)
        # DeepSpeed counts unmarked parameters on tensor-parallel rank 0 only.
        local.tensor_model_parallel = spec.dim is not None  # type: ignore[attr-defined]
        return local

    replace_parameters(model, localise)


def find_rule(plan: Mapping[str, str], name: str) -> str | None:
    """The rule of the first pattern that fits."""
    return next((rule for pattern, rule in plan.items() if fnmatchcase(name, pattern)), None)


@dataclass(frozen=True, kw_only=True)
class _Moves:
    """How activations cross the border of the split regions."""

    enter: Move
    leave: Move
    cut: Move
    """From a tensor that every rank has whole to what lives outside the regions."""


def _moves(group: ProcessGroup | None, sequence_parallel: bool) -> _Moves:
    if sequence_parallel:
        return _Moves(
            enter=partial(collectives.gather_sequence, group=group),
            leave=partial(collectives.scatter_sequence, group=group),
            cut=partial(collectives.local_slice, group=group, dim=collectives.SEQUENCE_DIM),
        )
    return _Moves(
        enter=partial(collectives.copy_to_region, group=group),
        leave=partial(collectives.reduce_from_region, group=group),
        cut=lambda x: x,
    )


def _connect(module: nn.Module, rule: str | None, tp: Axis, moves: _Moves) -> None:
    """Give the module the communication of its rule."""
    match rule:
        case "enter":
            _move_input(module, moves.enter)
        case "row":
            _move_output(module, moves.leave)
        case "vocab":
            _split_lookup(module, tp)
            _move_output(module, moves.leave)
        case "vocab_head":
            _move_input(module, moves.enter)
            _move_output(module, partial(collectives.gather_features, group=tp.group))
        case "vocab_loss":
            _move_input(module, moves.enter)
            module.split_vocabulary(  # type: ignore[operator]
                tp.index,
                reduce_max=partial(collectives.all_reduce, group=tp.group, op=dist.ReduceOp.MAX),
                reduce_sum=partial(collectives.all_reduce, group=tp.group),
            )
        case "local_positions":
            _move_output(module, moves.cut)


def _move_input(module: nn.Module, enter: Move) -> None:
    def hook(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = inputs
        return (enter(_as_computed(x)), *rest)

    module.register_forward_pre_hook(hook)


def _as_computed(x: Tensor) -> Tensor:
    """In the type of the region's matrix products: ranks exchange no more bytes than that."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def _move_output(module: nn.Module, leave: Move) -> None:
    module.register_forward_hook(lambda _module, _inputs, output: leave(output))


def _split_lookup(module: nn.Module, tp: Axis) -> None:
    """Look ids [B, S] up in this rank's rows; ids of other ranks' rows give zeros."""
    look_up = module.forward

    def forward(ids: Tensor) -> Tensor:
        num_rows = module.get_parameter("weight").shape[0]
        local = ids - tp.index * num_rows
        elsewhere = (local < 0) | (local >= num_rows)
        rows: Tensor = look_up(local.masked_fill(elsewhere, 0))  # [B, S, d]
        return rows.masked_fill(elsewhere[..., None], 0)

    module.forward = forward


def _make_specs(
    model: nn.Module, plan: Mapping[str, str], tp: Axis, sequence_parallel: bool
) -> dict[str, ShardSpec]:
    """One record per parameter, by canonical name."""
    specs: dict[str, ShardSpec] = {}
    uncovered: list[str] = []
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".")[0]
        rule = find_rule(plan, name) or find_rule(plan, owner)
        if rule not in SPLIT_DIM:
            uncovered.append(owner if rule is None and owner else name)
            continue
        dim = SPLIT_DIM[rule]
        _check_divisible(name, parameter, dim, tp.size)
        specs[name] = ShardSpec(
            name=name,
            full_shape=tuple(parameter.shape),
            dim=dim,
            index=0 if dim is None else tp.index,
            num_slices=1 if dim is None else tp.size,
            tp_partial=sequence_parallel and dim is None,
        )
    if uncovered:
        raise ValueError(
            f"tp_plan has no rule for the parameters of {', '.join(dict.fromkeys(uncovered))}; "
            f"add one of {', '.join(SPLIT_DIM)}"
        )
    return specs


def _check_divisible(name: str, parameter: Tensor, dim: int | None, tp: int) -> None:
    if dim is not None and parameter.shape[dim] % tp:
        raise ValueError(
            f"dimension {dim} of {name} {tuple(parameter.shape)} can't be split over "
            f"parallel.tp={tp}; use a tp that divides {parameter.shape[dim]}"
        )
