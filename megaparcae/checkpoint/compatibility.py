"""Whether a run may go on from a checkpoint, and if not, why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megaparcae.checkpoint.storage import FORMAT
from megaparcae.config.load import config_differences, config_tree, load_config
from megaparcae.config.schema import ModelConfig, RunConfig
from megaparcae.errors import UserError

FREE = (
    "name",
    "preset",
    "parallel.",
    "checkpoint.",
    "log.",
    "profile.",
    "validation.",
    "data.tokenizer",
    "data.cache_dir",
    "data.num_workers",
    "train.global_batch_size",  # the product is compared instead
    "train.micro_batch_size",
    "train.gradient_accumulation_steps",
    "train.device",
    "train.precision",
    "train.deterministic",
    "train.compile",
    "train.max_skipped_steps",
    "train.exit_after",
    "train.hang_factor",
    "train.hang_min_seconds",
    "train.replica_check_interval",
)
"""Options that change nothing a run has computed so far."""
LOOP = ("model.recurrence.", "model.state_init")
"""Options of the model that change no weight."""


def check_same_run(
    config: RunConfig, folder: Path, global_batch: int, meta: dict[str, Any]
) -> None:
    """UserError when weights would not fit, or the run would silently become another one."""
    if meta.get("format") != FORMAT:
        raise UserError(
            f"{folder} has format {meta.get('format')}, but this version reads format {FORMAT}; "
            "resume it with the version that saved it"
        )
    saved = load_config(folder / "config.yaml")
    changed = [name for name in config_differences(saved, config) if not name.startswith(FREE)]
    shape = [n for n in changed if n.startswith("model.") and not n.startswith(LOOP)]
    if shape:
        raise UserError(
            f"{folder} was saved by another model: {_list(shape, saved, config)}"
            f"{_vocabulary(saved.model, config.model)}; use its model options, or another "
            "checkpoint.dir for a new run"
        )
    if config.checkpoint.override_schedule:
        return
    if meta["global_batch_size"] != global_batch:
        raise UserError(
            f"{folder} was trained with {meta['global_batch_size']} sequences a step, now "
            f"{global_batch}, so the data would go on elsewhere; set "
            f"train.global_batch_size={meta['global_batch_size']} and leave "
            "gradient_accumulation_steps null (it follows the number of ranks), or set "
            "checkpoint.override_schedule: true"
        )
    if changed:
        raise UserError(
            f"{folder} was trained with other options: {_list(changed, saved, config)}; restore "
            "them, or set checkpoint.override_schedule: true to go on with the new ones"
        )


def _list(names: list[str], saved: RunConfig, now: RunConfig) -> str:
    shown = [f"{name} was {_value(saved, name)}, now {_value(now, name)}" for name in names[:6]]
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(shown) + more


def _value(config: RunConfig, name: str) -> object:
    value: object = config_tree(config)
    for key in name.split("."):
        value = value.get(key) if isinstance(value, dict) else value
    return value


def _vocabulary(saved: ModelConfig, now: ModelConfig) -> str:
    if saved.padded_vocab_size == now.padded_vocab_size:
        return ""
    return (
        f" (vocabulary {saved.vocab_size} padded to {saved.padded_vocab_size}, now "
        f"{now.vocab_size} padded to {now.padded_vocab_size})"
    )
