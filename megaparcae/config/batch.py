"""Batch arithmetic: global = micro x accumulation x dp, with dp = world / (tp x pp)."""

from __future__ import annotations

from dataclasses import dataclass

from megaparcae.config.schema import TrainConfig, divisors
from megaparcae.errors import UserError


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The three batch sizes of a run and the layout that they were solved for."""

    global_batch: int
    """Sequences of one optimizer step."""
    micro_batch: int
    """Sequences of one rank's forward pass."""
    accumulation: int
    """Micro-batches of one rank and optimizer step."""
    dp: int
    """Data-parallel ranks."""
    tp: int = 1
    pp: int = 1

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.dp * self.tp * self.pp

    def explain(self) -> str:
        """How dp came about, and how the batch is divided."""
        return (
            f"{_explain_dp(self.world, self.tp, self.pp)}; global batch {self.global_batch} = "
            f"micro {self.micro_batch} x accumulation {self.accumulation} x dp {self.dp}"
        )


def data_parallel_size(*, world: int, tp: int, pp: int) -> int:
    """Ranks that remain for data parallelism; UserError when tp x pp does not divide the world."""
    if world % (tp * pp):
        fitting = [n for n in divisors(world) if n <= tp * pp]
        raise UserError(
            f"parallel.tp={tp} x parallel.pp={pp} must divide the number of processes, which is "
            f"{world}; start a multiple of {tp * pp} processes, or choose tp x pp in {fitting}"
        )
    return world // (tp * pp)


def solve_batch(train: TrainConfig, *, world: int, tp: int, pp: int) -> BatchPlan:
    """The batch from any two of global_batch_size, micro_batch_size and
    gradient_accumulation_steps (sequences, sequences, micro-batches).

    Raises UserError, with the nearest sizes that work, when they do not add up.
    """
    dp = data_parallel_size(world=world, tp=tp, pp=pp)
    why = f"({_explain_dp(world, tp, pp)})"
    match train.global_batch_size, train.micro_batch_size, train.gradient_accumulation_steps:
        case int(total), int(micro), None:
            _check_divides(total, "micro_batch_size", micro, dp, why)
            accumulation = total // (micro * dp)
        case int(total), None, int(accumulation):
            _check_divides(total, "gradient_accumulation_steps", accumulation, dp, why)
            micro = total // (accumulation * dp)
        case None, int(micro), int(accumulation):
            total = micro * accumulation * dp
        case int(total), int(micro), int(accumulation):
            _check_product(total, micro, accumulation, dp, why)
        case _:
            raise UserError(_too_few(train))
    return BatchPlan(
        global_batch=total, micro_batch=micro, accumulation=accumulation, dp=dp, tp=tp, pp=pp
    )


def _check_divides(total: int, name: str, size: int, dp: int, why: str) -> None:
    if total % (size * dp) == 0:
        return
    unit = size * dp
    totals = [n for n in (total // unit * unit, (total // unit + 1) * unit) if n > 0]
    remedies = [f"train.global_batch_size in {totals}"]
    if total % dp == 0:
        remedies.append(f"train.{name} in {_near(divisors(total // dp), size)}")
    raise UserError(
        f"train.global_batch_size={total} must be a multiple of {name}={size} x dp={dp} {why}; "
        f"use {' or '.join(remedies)}"
    )


def _check_product(total: int, micro: int, accumulation: int, dp: int, why: str) -> None:
    product = micro * accumulation * dp
    if total == product:
        return
    raise UserError(
        f"train.global_batch_size={total} is not micro_batch_size={micro} x "
        f"gradient_accumulation_steps={accumulation} x dp={dp} = {product} {why}; "
        f"set one of the three to null, or global_batch_size to {product}"
    )


def _too_few(train: TrainConfig) -> str:
    sizes = {
        "global_batch_size": train.global_batch_size,
        "micro_batch_size": train.micro_batch_size,
        "gradient_accumulation_steps": train.gradient_accumulation_steps,
    }
    given = [f"{name}={value}" for name, value in sizes.items() if value is not None]
    return (
        f"train has {'only ' + given[0] if given else 'no batch size'}; give any two of "
        f"{', '.join(sizes)}, such as global_batch_size: 256 and micro_batch_size: 8"
    )


def _explain_dp(world: int, tp: int, pp: int) -> str:
    return f"dp {world // (tp * pp)} = world {world} / (tp {tp} x pp {pp})"


def _near(choices: list[int], value: int) -> list[int]:
    """The (at most six) choices nearest to a value, ascending."""
    return sorted(sorted(choices, key=lambda c: abs(c - value))[:6])
