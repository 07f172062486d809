"""Learning rate, Muon momentum and Muon weight decay as pure functions of the optimizer step.

`step` counts the steps already made: the first update uses step 0, the last num_steps - 1. Falling
schedules reach min_factor exactly at num_steps, where the run ends, and keep it from there on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megaparcae.config.schema import OptimizerConfig, ScheduleConfig

MOMENTUM_START = 0.85
"""Muon's momentum at step 0 (the authors' warm-up, golden/muon_adamw)."""


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """What changes from step to step."""

    lr_factor: float
    """Factor of both learning rates."""
    muon_momentum: float
    muon_weight_decay: float


def hyperparameters_at(
    step: int, *, optimizer: OptimizerConfig, schedule: ScheduleConfig, num_steps: int
) -> Hyperparameters:
    """All scheduled values of one optimizer step."""
    return Hyperparameters(
        lr_factor=lr_factor(step, schedule, num_steps),
        muon_momentum=muon_momentum(
            step, optimizer.muon_momentum, optimizer.muon_momentum_warmup_steps
        ),
        muon_weight_decay=muon_weight_decay(step, optimizer.muon_weight_decay, num_steps),
    )


def lr_factor(step: int, schedule: ScheduleConfig, num_steps: int) -> float:
    """min(warm-up, shape): warm-up is step / warmup_steps, so step 0 of a warm-up has rate 0.

    Where warm-up and cool-down overlap (a run shorter than both) the smaller one holds.
    """
    warmup = schedule.warmup_steps
    rising = step / warmup if step < warmup else 1.0
    return min(rising, _shape(step, schedule, num_steps))


def _shape(step: int, schedule: ScheduleConfig, num_steps: int) -> float:
    least = schedule.min_factor
    match schedule.kind:
        case "constant":
            return 1.0
        case "trapezoid":  # the cool-down aims at 0 and min_factor is its floor (authors)
            cooldown = cooldown_steps(schedule, num_steps)
            remaining = num_steps - step
            return max(min(1.0, remaining / cooldown if cooldown else float(remaining > 0)), least)
        case "linear":
            return least + (1 - least) * (1 - _progress(step, schedule, num_steps))
        case "cosine":
            wave = math.cos(math.pi * _progress(step, schedule, num_steps))
            return least + (1 - least) * (1 + wave) / 2
        case other:
            raise ValueError(
                f"schedule.kind={other!r}: choose constant, linear, cosine or trapezoid"
            )


def _progress(step: int, schedule: ScheduleConfig, num_steps: int) -> float:
    """0 at the end of warm-up, 1 from num_steps on."""
    length = num_steps - schedule.warmup_steps
    if step >= num_steps or length <= 0:
        return float(step >= num_steps)
    return max(0.0, (step - schedule.warmup_steps) / length)


def cooldown_steps(schedule: ScheduleConfig, num_steps: int) -> int:
    """Length of trapezoid's cool-down."""
    if schedule.cooldown_steps is not None:
        return schedule.cooldown_steps
    return int(schedule.cooldown_fraction * num_steps)


def muon_momentum(step: int, target: float, warmup_steps: int) -> float:
    """Linear from 0.85 to `target` over the first `warmup_steps` steps."""
    share = min(step / warmup_steps, 1.0) if warmup_steps else 1.0
    return MOMENTUM_START + (target - MOMENTUM_START) * share


def muon_weight_decay(step: int, initial: float, num_steps: int) -> float:
    """Linear from `initial` to 0 at num_steps, whatever the learning rate does."""
    return initial * max(0.0, 1 - step / num_steps)
