"""Loop depths and start states as pure functions of (seed, step, sample id).

Nothing here depends on a rank, on the micro-batch or on what was drawn before, so every layout and
every resume sees the same draws (paper, appendix O).
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megaparcae.config.schema import ModelConfig, RecurrenceConfig

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def random_keys(seed: int, purpose: str, step: int, sample_ids: Ints) -> NDArray[np.uint64]:
    """One well-mixed 64-bit key per sample: splitmix64 over a hash of (seed, purpose, step)."""
    text = f"{seed}/{purpose}/{step}".encode()
    base = np.uint64(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little"))
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        key = base + golden * (sample_ids.astype(np.uint64) + np.uint64(1))
        key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return key ^ (key >> np.uint64(31))


def _uniforms(seed: int, purpose: str, step: int, sample_ids: Ints) -> Floats:
    """In (0, 1): the upper 53 bits of the key, centred in their interval."""
    keys = random_keys(seed, purpose, step, sample_ids)
    return ((keys >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def sample_depths(
    config: RecurrenceConfig, *, seed: int, step: int, sample_ids: Ints
) -> tuple[Ints, Ints]:
    """Loops without gradient n and with gradient k of each sample; T = n + k."""
    no_grad, grad = mean_depths(config, step)
    ids = np.zeros(1, np.int64) if config.draw_per == "batch" else sample_ids
    n, k = _draw(config, no_grad, grad, seed, step, ids)
    if config.draw_per == "batch":
        n, k = n.repeat(len(sample_ids)), k.repeat(len(sample_ids))
    return n, k


def _draw(
    config: RecurrenceConfig, no_grad: int, grad: int, seed: int, step: int, ids: Ints
) -> tuple[Ints, Ints]:
    uniform = _uniforms(seed, "depth", step, ids)
    mean = np.full(len(ids), float(no_grad + grad))
    match config.sampler:
        case "fixed":
            return np.full(len(ids), no_grad), np.full(len(ids), grad)
        case "poisson_fill":
            n = poisson_quantile(uniform, np.full(len(ids), float(no_grad)))
            return n, np.full(len(ids), grad)
        case "poisson_full":
            total = np.maximum(1, poisson_quantile(uniform, mean))
            return np.zeros_like(total), total
        case "poisson":
            total = np.maximum(1, poisson_quantile(uniform, mean))
        case "lognormal_poisson":  # Huginn: tau ~ N(log mu - sigma^2/2, sigma), sigma = 1/2
            normal = torch.special.ndtri(
                torch.from_numpy(_uniforms(seed, "depth rate", step, ids))
            ).numpy()
            total = 1 + poisson_quantile(uniform, mean * np.exp(0.5 * normal - 0.125))
        case other:
            raise ValueError(f"model.recurrence.sampler={other!r} is not a sampler")
    k = np.minimum(total, grad)
    return total - k, k


def poisson_quantile(uniform: Floats, mean: Floats) -> Ints:
    """Smallest count whose Poisson(mean) distribution function reaches `uniform`, elementwise."""
    count = np.zeros(len(uniform), np.int64)
    mass = np.exp(-mean)
    below = mass.copy()
    for i in range(1, int(mean.max(initial=0) + 40 * math.sqrt(mean.max(initial=0)) + 60)):
        open_ = below < uniform
        if not open_.any():
            break
        count += open_
        mass = mass * mean / i
        below = below + mass
    return count


def mean_depths(config: RecurrenceConfig, step: int) -> tuple[int, int]:
    """Mean loops without and with gradient at `step`, after the curriculum's ramp."""
    grad = config.num_grad_loops
    no_grad = config.mean_recurrence - grad
    if config.curriculum == "none" or step > config.curriculum_steps:
        return no_grad, grad
    x = step / config.curriculum_steps
    progress = x if config.curriculum == "linear" else 1 - math.sqrt(1 - x)
    if config.curriculum_target in ("forward", "both"):
        no_grad = math.ceil(progress * no_grad)
    if config.curriculum_target in ("backward", "both"):
        grad = max(1, math.ceil(progress * grad))
    return no_grad, grad


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
