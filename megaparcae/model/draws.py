"""Loop depths as pure functions of (seed, step, sample id). No torch, for the planner.

Nothing here depends on a rank, on the micro-batch or on what was drawn before, so every layout and
every resume sees the same draws (paper, appendix O).
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from megaparcae.config.schema import RecurrenceConfig

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
            normal = ndtri(_uniforms(seed, "depth rate", step, ids))
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
