"""Where weights and optimizer states live, for every optimizer: the checkpoint's view of an engine.

The only place that knows the private names of DeepSpeed's ZeRO wrappers (version 0.19.8).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.utils import all_gather_dp_groups
from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state
from torch import Tensor, nn
from torch.optim import Optimizer

from megaparcae.parallel.mesh import Mesh
from megaparcae.parallel.shard import Fragment, ShardSpec, flat_fragments, spec_of
from megaparcae.parallel.sharded_optimizer import ShardedOptimizer

ADAM_KEYS = ("exp_avg", "exp_avg_sq")


def local_fragments(
    parameters: Iterable[nn.Parameter], optimizer: Optimizer, mesh: Mesh
) -> list[Fragment]:
    """Every weight and state on this rank, replicas included: what a load fills."""
    _settle(optimizer)
    return list(_all(parameters, optimizer, mesh, to_save=False))


def owned_fragments(
    parameters: Iterable[nn.Parameter], optimizer: Optimizer, mesh: Mesh
) -> list[Fragment]:
    """This rank's part of a save: every element of the model is owned by exactly one rank."""
    _settle(optimizer)
    return list(_all(parameters, optimizer, mesh, to_save=True))


def _all(
    parameters: Iterable[nn.Parameter], optimizer: Optimizer, mesh: Mesh, *, to_save: bool
) -> Iterator[Fragment]:
    for parameter in parameters:
        spec = spec_of(parameter)
        if to_save and not _writes(spec, mesh):
            continue
        if isinstance(optimizer, ShardedOptimizer):
            # Whole on every dp rank: the writers take turns by name.
            turn = zlib.crc32(spec.name.encode()) % mesh.dp.size
            if not to_save or mesh.dp.index == turn:
                yield Fragment(
                    f"model.{spec.name}", spec.full_shape, spec.offset, parameter.detach()
                )
        else:
            yield from _zero_fragments(parameter, spec, optimizer, mesh)
    if isinstance(optimizer, ShardedOptimizer):
        for spec, key, state in optimizer.named_states():
            if not to_save or _writes(spec, mesh):
                yield Fragment(f"optimizer.{key}.{spec.name}", spec.full_shape, spec.offset, state)


def _writes(spec: ShardSpec, mesh: Mesh) -> bool:
    """Of tied replicas the first stage writes, of tensor-parallel copies the first rank."""
    return spec.stages[0] == mesh.pp.index and (spec.dim is not None or mesh.tp.index == 0)


def _zero_fragments(
    parameter: nn.Parameter, spec: ShardSpec, optimizer: Optimizer, mesh: Mesh
) -> Iterator[Fragment]:
    """This dp rank's flat range of a parameter under ZeRO 1, 2 or 3, with its states."""
    if hasattr(parameter, "ds_id"):  # stage 3
        weight = safe_get_local_fp32_param(parameter).view(-1)
        start = weight.numel() * mesh.dp.index
        count = max(0, min(weight.numel(), parameter.ds_numel - start))  # type: ignore[attr-defined]  # padded
        states = {key: safe_get_local_optimizer_state(parameter, key) for key in ADAM_KEYS}
    else:
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return
        weight = mapping.hp_fragment.view(-1)
        start = mapping.lp_fragment_address.start
        count = mapping.lp_fragment_address.numel
        at = mapping.hp_fragment_address
        flat = optimizer.single_partition_of_fp32_groups[mapping.param_group_index]  # type: ignore[attr-defined]
        state = _base(optimizer).state[flat]
        states = {key: state[key].narrow(0, at.start, at.numel) for key in ADAM_KEYS}
    if count == 0:
        return
    yield from flat_fragments(f"model.{spec.name}", spec, start, weight[:count])
    for key, state in states.items():
        name = f"optimizer.{key}.{spec.name}"
        yield from flat_fragments(name, spec, start, state.view(-1)[:count])


def step_count(optimizer: Optimizer) -> int:
    """Updates made so far: AdamW's t."""
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.step_count
    return max((int(state["step"]) for state in _base(optimizer).state.values()), default=0)


def watch_gradients(optimizer: Optimizer) -> None:
    """Let DeepSpeed skip a step with gradients that are not finite: by itself only in fp16.

    ZeRO-3 looks at the norm at least, but that leaves copies on other tensor-parallel ranks out.
    """
    if hasattr(optimizer, "check_grad_overflow"):  # stages 1 and 2
        optimizer.check_grad_overflow = True
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        optimizer._overflow_check_and_loss_scale_update = partial(_check_stage_3, optimizer)  # type: ignore[attr-defined]


def _check_stage_3(optimizer: Any, update_scale: bool = True) -> bool:
    """What DeepSpeed's method of this name does for fp16."""
    optimizer.overflow = False
    optimizer.check_overflow()
    if update_scale:
        optimizer._loss_scale_update_and_overflow_cleanup()
    return bool(optimizer.overflow)


def last_step_skipped(optimizer: Optimizer) -> bool:
    """Whether the last step left weights and states alone, on all ranks together."""
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.last_step_skipped
    return bool(optimizer.overflow)  # type: ignore[attr-defined]


def finish_weights(optimizer: Optimizer) -> None:
    """Wait for weights that the last step still sends; only our own optimizer does that."""
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.finish_weights()


def _settle(optimizer: Optimizer) -> None:
    """Weights as the last step made them; zeros for states that the first has not made yet."""
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.init_states()
        optimizer.finish_weights()
        return
    base = _base(optimizer)
    for weight in _updated(optimizer):
        if "exp_avg" not in base.state[weight]:
            on_device = base.defaults.get("fused", False)
            step = torch.zeros((), device=weight.device if on_device else "cpu")
            zeros = {key: torch.zeros_like(weight, dtype=torch.float32) for key in ADAM_KEYS}
            base.state[weight].update(step=step, **zeros)


@torch.no_grad()
def finish_load(optimizer: Optimizer, updates: int) -> None:
    """Set the number of updates and refresh what derives from the weights that were loaded."""
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.step_count = updates
        optimizer.after_load()
        return
    for state in _base(optimizer).state.values():
        state["step"] = torch.full_like(torch.as_tensor(state["step"]), float(updates))
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # stage 3
        for i in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(i)  # type: ignore[attr-defined]
        small = optimizer.persistent_parameters  # type: ignore[attr-defined]
        if small:
            small[0].partition(small)
            small[0].all_gather(small)
        return
    _gather_zero_1_and_2(optimizer)


def _gather_zero_1_and_2(wrapper: Optimizer) -> None:
    groups = wrapper.parallel_partitioned_bit16_groups  # type: ignore[attr-defined]
    masters = wrapper.single_partition_of_fp32_groups  # type: ignore[attr-defined]
    for i, (partitions, master) in enumerate(zip(groups, masters, strict=True)):
        rank = torch.distributed.get_rank(wrapper.real_dp_process_group[i])  # type: ignore[attr-defined]
        partitions[rank].data.copy_(master.data)
    all_gather_dp_groups(
        groups_flat=wrapper.bit16_groups_flat,  # type: ignore[attr-defined]
        partitioned_param_groups=groups,
        dp_process_group=wrapper.real_dp_process_group,  # type: ignore[attr-defined]
        start_alignment_factor=wrapper.nccl_start_alignment_factor,  # type: ignore[attr-defined]
        allgather_bucket_size=wrapper.allgather_bucket_size,  # type: ignore[attr-defined]
    )


@torch.no_grad()
def refresh_master(parameter: Tensor) -> None:
    """ZeRO-1: this dp rank's range of the weights that the optimizer updates, from the model's."""
    mapping = parameter._hp_mapping  # type: ignore[attr-defined]
    if mapping is not None:
        at = mapping.lp_fragment_address
        mapping.hp_fragment.copy_(parameter.view(-1).narrow(0, at.start, at.numel))


def _base(wrapper: Optimizer) -> Optimizer:
    """The AdamW inside DeepSpeed's wrapper."""
    base = wrapper.optimizer  # type: ignore[attr-defined]
    assert isinstance(base, Optimizer)
    return base


def _updated(wrapper: Optimizer) -> list[Tensor]:
    """The flat tensors that the AdamW inside updates, by which its states are keyed."""
    if hasattr(wrapper, "fp32_partitioned_groups_flat"):
        return list(wrapper.fp32_partitioned_groups_flat)
    return [weight for group in _base(wrapper).param_groups for weight in group["params"]]
