"""The runs of an isoFLOP study: one config per budget and mean recurrence, and their execution.

Tokens follow from the budget: D = C / (FLOPs per token at mu), rounded to whole optimizer steps.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megaparcae.config.load import dump_config, load_config
from megaparcae.config.schema import ModelConfig, RunConfig
from megaparcae.errors import UserError
from megaparcae.log import logger
from megaparcae.scaling.runs import final_losses

ROUNDING = 0.02
"""Largest relative error of the budget that whole steps may cause."""
PAPER_LOOPS = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24)
"""Depths of the final validation (appendix O), and T = mu."""


@dataclass(frozen=True)
class GridRun:
    """One line of grid.jsonl."""

    name: str
    budget: float
    """Training FLOPs as asked for, by the convention in `convention`."""
    mu: int
    tokens: int
    """num_steps whole batches."""
    num_steps: int
    params: int
    """Unrolled parameters N(mu)."""
    flops_per_token: float
    convention: str
    config: str
    """Path of the run's YAML."""
    dir: str
    """Folder the run writes to."""

    def __str__(self) -> str:
        cost = f"{self.flops_per_token:.3g} FLOPs/token"
        return f"{self.config}: {self.num_steps} steps, {self.tokens:.3g} tokens, {cost}"


@dataclass(frozen=True)
class Costs:
    """What a model costs, as functions of its config; the mean recurrence is part of it."""

    convention: str
    """Name of the FLOP convention, kept with every run: authors or hardware."""
    flops_per_token: Callable[[ModelConfig], float]
    unrolled_params: Callable[[ModelConfig], int]


def write_grid(
    base: Path,
    overrides: Sequence[str],
    budgets: Sequence[float],
    mus: Sequence[float],
    out: Path,
    costs: Costs,
) -> list[GridRun]:
    """Write one YAML per budget and mu, and grid.jsonl, into `out`.

    UserError for a base config that the study can't vary or a budget too small for its batch.
    """
    _check_lists(budgets, mus)
    configs, runs = [], []
    for budget in sorted(budgets):
        for mu in sorted(mus):
            config, run = _plan_run(base, overrides, budget, int(mu), out, costs)
            configs.append(config)
            runs.append(run)
    out.mkdir(parents=True, exist_ok=True)
    for config, run in zip(configs, runs, strict=True):
        Path(run.config).write_text(dump_config(config))
    (out / "grid.jsonl").write_text("".join(json.dumps(asdict(run)) + "\n" for run in runs))
    return runs


def read_grid(folder: Path) -> list[GridRun]:
    """The runs `write_grid` planned; UserError when there are none."""
    index = folder / "grid.jsonl"
    if not index.exists():
        raise UserError(f"{folder} has no grid.jsonl; write one with `grid --out {folder}`")
    try:
        return [GridRun(**json.loads(line)) for line in index.read_text().splitlines()]
    except (json.JSONDecodeError, TypeError):
        raise UserError(f"{index} is damaged; write it again with `grid --out {folder}`") from None


def is_finished(run: GridRun) -> bool:
    """Whether the validation after the last step is in the run's log."""
    return bool(final_losses(Path(run.dir) / "log.jsonl", run.num_steps))


def launch_command(run: GridRun, one_process: bool) -> list[str]:
    """What starts (or continues) a run: here in one process, or on all GPUs of a node."""
    train = ["-m", "megaparcae.train", "--config", run.config]
    return [sys.executable, *train] if one_process else ["torchrun", "--nproc-per-node=gpu", *train]


def execute_small(folder: Path, max_flops: float) -> list[list[str]]:
    """Train a grid's unfinished runs up to a budget; the commands that start the larger ones."""
    left = [run for run in read_grid(folder) if not is_finished(run)]
    execute([run for run in left if run.budget <= max_flops])
    large = [run for run in left if run.budget > max_flops]
    return [launch_command(run, one_process=False) for run in large]


def execute(runs: Sequence[GridRun]) -> None:
    """Train the runs one after the other; UserError when one of them fails."""
    for i, run in enumerate(runs, 1):
        logger.info("[%d/%d] %s: %d steps, %.3g FLOPs", i, len(runs), run.name, run.num_steps,
                    run.budget)  # fmt: skip
        code = subprocess.run(launch_command(run, one_process=True)).returncode
        if code:
            raise UserError(
                f"{run.name} ended with exit code {code} (its message is above); correct the cause "
                "and `run` again: finished runs are skipped and this one continues"
            )


def _check_lists(budgets: Sequence[float], mus: Sequence[float]) -> None:
    for option, values in (("--budgets", budgets), ("--mus", mus)):
        shown = ",".join(f"{value:g}" for value in values)
        if not values or min(values) <= 0:
            raise UserError(
                f"{option} {shown} must be positive numbers, such as 1e18,2e18 or 2,4,6"
            )
        if len(set(values)) < len(values):
            raise UserError(f"{option} {shown} names a value twice; give each once")
    if any(mu != int(mu) for mu in mus):
        raise UserError(f"--mus {mus} must be whole numbers, such as 2,4,8")


def _plan_run(
    base: Path, overrides: Sequence[str], budget: float, mu: int, out: Path, costs: Costs
) -> tuple[RunConfig, GridRun]:
    name = f"c{budget:.4g}-mu{mu}".replace("+", "")
    depth = [f"model.recurrence.mean_recurrence={mu}", "model.recurrence.backprop_depth=null"]
    config = load_config(base, [*overrides, *depth])
    if config.model.architecture != "looped":
        raise UserError(
            f"{base}: model.architecture={config.model.architecture!r} has no mean recurrence to "
            "vary; use a looped model"
        )
    batch = config.train.global_batch_size
    if batch is None:
        raise UserError(
            f"{base} leaves train.global_batch_size open, but tokens become steps through it; "
            "add --set train.global_batch_size=256"
        )
    flops = costs.flops_per_token(config.model)
    step_tokens = batch * config.model.sequence_length
    num_steps = _num_steps(budget, mu, flops * step_tokens)
    run = GridRun(
        name=name,
        budget=budget,
        mu=mu,
        tokens=num_steps * step_tokens,
        num_steps=num_steps,
        params=costs.unrolled_params(config.model),
        flops_per_token=flops,
        convention=costs.convention,
        config=str(out / f"{name}.yaml"),
        dir=str(out / name),
    )
    loops = sorted({*PAPER_LOOPS, mu})
    own = [
        f"name={name}",
        f"train.num_steps={num_steps}",
        f"checkpoint.dir={run.dir}",
        f"validation.interval={num_steps}",
        f"validation.num_loops={loops}",
    ]
    return load_config(base, [*overrides, *depth, *own]), run


def _num_steps(budget: float, mu: int, step_flops: float) -> int:
    steps = round(budget / step_flops)
    if abs(steps * step_flops / budget - 1) > ROUNDING:
        raise UserError(
            f"budget {budget:g} at mu={mu} is {budget / step_flops:.1f} optimizer steps: whole "
            f"steps miss it by more than {ROUNDING:.0%}; use a budget of at least "
            f"{0.5 / ROUNDING * step_flops:.2g} or a smaller train.global_batch_size"
        )
    return steps
