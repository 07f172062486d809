"""Start states of the loop as pure functions of (seed, step, sample id), like the depths."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from megaparcae.config.schema import ModelConfig
from megaparcae.model.draws import Ints, random_keys


def start_state(
    config: ModelConfig,
    *,
    seed: int,
    step: int,
    sample_ids: Ints,
    sequence_length: int,
    device: torch.device,
) -> Tensor:
    """h_0 [B, S, d] fp32, one generator per sample."""
    shape = (sequence_length, config.hidden_size)
    if config.state_init == "zero":
        return torch.zeros(len(sample_ids), *shape, device=device)
    keys = random_keys(seed, "start state", step, sample_ids)
    state = torch.empty(len(sample_ids), *shape, device=device)
    for row, key in zip(state, keys, strict=True):
        generator = torch.Generator(device).manual_seed(int(key >> np.uint64(1)))
        _fill_state(row, config, generator)
    return state


def _fill_state(row: Tensor, config: ModelConfig, generator: torch.Generator) -> None:
    """Draw one sample's start state in place; row [S, d]."""
    d = config.hidden_size
    match config.state_init:
        case "like_init":  # N(0, 2/(5d)) cut at 3 std; embeddings scaled by sqrt(d) scale it too
            std = math.sqrt(2 / (5 * d))
            torch.nn.init.trunc_normal_(row, 0.0, std, -3 * std, 3 * std, generator=generator)
            if config.scale_embeddings:
                row.mul_(math.sqrt(d))
        case "normal":
            row.normal_(generator=generator)
        case "embed":
            row.normal_(0.0, 1 / math.sqrt(d), generator=generator)
        case "unit":  # standardised per position
            row.normal_(generator=generator)
            row.sub_(row.mean(-1, keepdim=True)).div_(row.std(-1, keepdim=True) + 1e-8)
        case other:
            raise ValueError(f"model.state_init={other!r} is not a start state")
