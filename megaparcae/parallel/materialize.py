"""From a model on the meta device to real local weights, one full tensor at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megaparcae.parallel.shard import spec_of


def materialize(
    model: nn.Module,
    initial_value: Callable[[str, tuple[int, ...]], Tensor],
    device: torch.device,
) -> None:
    """Give every meta parameter its slice of `initial_value(canonical name, full shape)`.

    At most one full tensor exists at a time beside the local weights. Ties, types and marks on
    parameters (their ShardSpec among them) are kept. Raises ValueError when a parameter has no
    ShardSpec or a buffer is on the meta device.
    """
    unknown = [n for n, p in model.named_parameters() if p.is_meta and not hasattr(p, "shard_spec")]
    if unknown:
        raise ValueError(
            f"no ShardSpec on {', '.join(unknown)}; lay the model out (apply_tp) first"
        )
    unfilled = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if unfilled:
        raise ValueError(
            f"buffers {', '.join(unfilled)} are on the meta device and have no initial value; "
            "make them parameters or compute them in forward"
        )

    def fill(name: str, parameter: nn.Parameter) -> nn.Parameter:
        if not parameter.is_meta:
            return parameter
        spec = spec_of(parameter)
        local = torch.empty(spec.local_shape, dtype=parameter.dtype, device=device)
        local.copy_(spec.take(initial_value(spec.name, spec.full_shape)))
        return like_parameter(parameter, local)

    replace_parameters(model, fill)


def replace_parameters(
    model: nn.Module, change: Callable[[str, nn.Parameter], nn.Parameter]
) -> None:
    """Put `change(name, parameter)` in place of every parameter; a tied one is changed once.

    The name is the first under which `named_parameters` knows it.
    """
    changed: dict[nn.Parameter, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for own_name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in changed:
                changed[parameter] = change(join_name(prefix, own_name), parameter)
            setattr(module, own_name, changed[parameter])


def like_parameter(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    """A parameter with these values and the marks (Python attributes) of another."""
    result = nn.Parameter(data, requires_grad=parameter.requires_grad)
    for key, value in vars(parameter).items():
        setattr(result, key, value)
    return result


def join_name(prefix: str, name: str) -> str:
    """Qualified name of a module's own parameter; the root's prefix is empty."""
    return f"{prefix}.{name}" if prefix else name
