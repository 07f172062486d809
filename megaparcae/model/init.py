"""Initial weights: a pure function of (seed, canonical name), whatever rank holds which slice."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from megaparcae.config.schema import VALUE_GATE_INPUTS, ModelConfig

INITIAL_DECAY = math.sqrt(1 / 5)
"""Entries of the injection's decay at the start."""


def initial_value(config: ModelConfig, *, seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """The full tensor `name` at step 0, fp32 on the CPU (paper, appendix P and table 18)."""
    digest = hashlib.blake2b(f"{seed}/init/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    std = math.sqrt(2 / (5 * config.hidden_size))
    value = torch.empty(shape, dtype=torch.float32, device="cpu")
    match name.rsplit(".", 2)[-2:]:
        case [_, "A_log"] | [_, "q_bias"] | [_, "k_bias"]:
            return value.zero_()
        case [_, "dt_bias"]:  # softplus(dt_bias) = -log(decay) at A = 1
            step = -math.log(INITIAL_DECAY)
            return value.fill_(step + math.log(-math.expm1(-step)))
        case [_, "B"]:
            return value.zero_().fill_diagonal_(1.0)
        case ["injection", "weight"]:
            return _truncated_normal(value, std, generator)
        case ["value_gate", "weight"]:
            bound = 1 / math.sqrt(VALUE_GATE_INPUTS)
            return value.uniform_(-bound, bound, generator=generator)
        case [module, "weight"] if module.endswith("norm"):
            return value.fill_(1.0)
        case [_, "weight"] if name.startswith("value_embeddings."):
            return value.normal_(generator=generator)
        case ["o_proj" | "down_proj", "weight"]:
            return _matrix(value, std * _output_factor(config), generator, config.init_orthogonal)
        case ["up_proj", "weight"] if config.block == "sandwich":  # as Huginn's second half of fc
            return _matrix(value, std * _output_factor(config), generator, config.init_orthogonal)
        case [
            "embedding"
            | "head"
            | "readout"
            | "q_proj"
            | "k_proj"
            | "v_proj"
            | "up_proj"
            | "gate_proj",
            "weight",
        ]:
            return _matrix(value, std, generator, config.init_orthogonal)
    raise ValueError(f"no initialisation rule for parameter {name!r} of shape {shape}")


def _output_factor(config: ModelConfig) -> float:
    """Projections that write to the residual stream: 0, or 1/sqrt(2 x depth) at mean recurrence."""
    if config.init == "scaled_zero":
        return 0.0
    if config.architecture == "transformer":
        return 1 / math.sqrt(2 * config.num_layers)
    loops = config.num_core_layers * config.recurrence.mean_recurrence
    return 1 / math.sqrt(2 * (config.num_prelude_layers + config.num_coda_layers + loops))


def _matrix(value: Tensor, std: float, generator: torch.Generator, orthogonal: bool) -> Tensor:
    if std == 0.0:
        return value.zero_()
    if orthogonal:
        return _semi_orthogonal(value, std, generator)
    return _truncated_normal(value, std, generator)


def _truncated_normal(value: Tensor, std: float, generator: torch.Generator) -> Tensor:
    """N(0, std^2) cut at 3 std; the realised std is 0.98658 of the nominal one."""
    return nn.init.trunc_normal_(value, 0.0, std, -3 * std, 3 * std, generator=generator)


def _semi_orthogonal(value: Tensor, rms: float, generator: torch.Generator) -> Tensor:
    """All singular values are rms * sqrt(max(rows, columns)), so entries have exactly that rms."""
    nn.init.trunc_normal_(value, 0.0, 1.0, -2.0, 2.0, generator=generator)
    rows, columns = value.shape
    tall = value if rows >= columns else value.T
    q, r = torch.linalg.qr(tall)
    q = q * r.diagonal().sign() * (rms * math.sqrt(max(rows, columns)))
    return (q if rows >= columns else q.T).contiguous()


@torch.no_grad()
def initialize(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Fill every parameter of a whole model on one device."""
    for name, parameter in model.named_parameters():
        parameter.copy_(initial_value(config, seed=seed, name=name, shape=tuple(parameter.shape)))
