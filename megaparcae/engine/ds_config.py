"""DeepSpeed's own knobs: a JSON file whose run-owned numbers are "auto" and are filled in here."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from megaparcae.config.batch import BatchPlan
from megaparcae.config.schema import OptimizerConfig, ParallelConfig, TrainConfig
from megaparcae.errors import UserError

Options = dict[str, Any]

SHIPPED = Path(__file__).resolve().parents[2] / "ds_configs"
"""Folder of zero0.json to zero3.json in a checkout."""

OWNED_ELSEWHERE = {
    "bf16": "precision is train.precision (fp32 weights, torch_autocast)",
    "fp16": "precision is train.precision; fp16 is not supported",
    "amp": "precision is train.precision",
    "data_types": "gradients are accumulated in fp32",
    "optimizer": "the update rule is the section optimizer",
    "scheduler": "the learning rate is the section schedule",
    "activation_checkpointing": "use parallel.recompute_prelude, recompute_core, recompute_coda",
    "tensor_parallel": "use parallel.tp",
    "expert_parallel": "there are no experts",
    "elasticity": "the batch is the section train",
    "data_efficiency": "the data order is the section data",
    "curriculum_learning": "use model.recurrence.curriculum",
    "checkpoint": "use the section checkpoint",
    "compile": "use train.compile",
    "tensorboard": "use log.tensorboard_dir",
    "wandb": "use log.wandb_project",
}
"""Sections that would contradict the run's configuration without a word, and what to use."""

KNOWN = {
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("gradient_clipping", "zero_optimization", "torch_autocast", "pipeline"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "prescale_gradients"),
    *("gradient_predivide_factor", "communication_data_type", "disable_allgather"),
    *("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state"),
    *("comms_logger", "flops_profiler", "csv_monitor", "timers", "aio", "log_level"),
}
"""Top-level options that are passed on; DeepSpeed itself would ignore a misspelt one."""


def deepspeed_options(
    parallel: ParallelConfig, train: TrainConfig, optimizer: OptimizerConfig, batch: BatchPlan
) -> Options:
    """The dict for deepspeed.initialize: the JSON file with every run-owned number filled in.

    With ZeRO stage 0 our optimizer clips by the global norm, so DeepSpeed's clipping is off;
    DeepSpeed would take 1.0 if it were left out. Raises UserError when the file is not readable
    or says something else than the run.
    """
    path = config_path(parallel)
    options = read_options(path)
    _check_names(options, path)
    stage = parallel.zero_stage
    owned = {
        "train_batch_size": (batch.global_batch, "train.global_batch_size"),
        "train_micro_batch_size_per_gpu": (batch.micro_batch, "train.micro_batch_size"),
        "gradient_accumulation_steps": (batch.accumulation, "train.gradient_accumulation_steps"),
        "gradient_clipping": _clipping(stage, optimizer),
        "zero_optimization.stage": (stage, "parallel.zero_stage"),
        "torch_autocast.enabled": (train.precision == "bf16", "train.precision"),
    }
    for name, (value, owner) in owned.items():
        _fill(options, name, value, owner, path)
    _refuse_other_autos(options, path, "")
    _refuse_offloading(options, path)
    return options


def _clipping(stage: int, optimizer: OptimizerConfig) -> tuple[float, str]:
    if stage == 0:
        return 0.0, "parallel.zero_stage=0, whose optimizer clips by itself,"
    return optimizer.grad_clip, "optimizer.grad_clip"


def config_path(parallel: ParallelConfig) -> Path:
    """The file that parallel.deepspeed_config names, or the one shipped for the ZeRO stage."""
    if parallel.deepspeed_config is not None:
        return Path(parallel.deepspeed_config)
    return SHIPPED / f"zero{parallel.zero_stage}.json"


def read_options(path: Path) -> Options:
    """A JSON object from a file; UserError with line and column when it is none."""
    try:
        options = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique_keys)
    except FileNotFoundError:
        raise UserError(
            f"parallel.deepspeed_config={path}: no such file; null takes {SHIPPED}/zero*.json"
        ) from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from error
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    if not isinstance(options, dict):
        raise UserError(f"{path}: must be a JSON object of DeepSpeed's options")
    return options


def _check_names(options: Options, path: Path) -> None:
    for name in options:
        if name in OWNED_ELSEWHERE:
            raise UserError(f"{path}: remove {name}: {OWNED_ELSEWHERE[name]}")
        if name not in KNOWN:
            near = difflib.get_close_matches(name, KNOWN, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(KNOWN))}"
            raise UserError(f"{path}: unknown or unsupported option {name}; {hint}")


def _fill(options: Options, name: str, value: object, owner: str, path: Path) -> None:
    *sections, last = name.split(".")
    node = options
    for section in sections:
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            raise UserError(f"{path}: {section} must be an object")
    written = node.get(last, "auto")
    same = written == value and isinstance(written, bool) == isinstance(value, bool)
    if written != "auto" and not same:
        raise UserError(
            f"{path} says {name}={written!r}, but the run's {owner} makes it {value!r}; "
            f'write "auto" in the file, or change the run'
        )
    node[last] = value


def _refuse_other_autos(options: Options, path: Path, prefix: str) -> None:
    for name, value in options.items():
        if value == "auto":
            raise UserError(f'{path}: {prefix}{name}="auto" is not filled in here; give a value')
        if isinstance(value, dict):
            _refuse_other_autos(value, path, f"{prefix}{name}.")


def _refuse_offloading(options: Options, path: Path) -> None:
    for name in ("offload_optimizer", "offload_param"):
        section = options["zero_optimization"].get(name)
        if isinstance(section, dict) and section.get("device", "none") != "none":
            raise UserError(
                f"{path}: zero_optimization.{name} is not supported, since checkpoints read the "
                "states from the device; remove it, or use a higher ZeRO stage or more ranks"
            )


def _unique_keys(pairs: list[tuple[str, Any]]) -> Options:
    seen = dict(pairs)
    if len(seen) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is given twice")
    return seen
