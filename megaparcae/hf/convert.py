"""The two conversions behind tools/convert_to_hf.py and tools/convert_from_hf.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from megaparcae.checkpoint.model_tensors import (
    read_model_tensors,
    read_run_config,
    write_model_tensors,
)
from megaparcae.checkpoint.storage import CONFIG, newest_folder
from megaparcae.config.load import dump_config
from megaparcae.config.schema import CheckpointConfig, RunConfig
from megaparcae.errors import UserError
from megaparcae.hf.export import ExportOptions, export_hf, export_official, new_folder
from megaparcae.hf.load import Loaded
from megaparcae.log import logger

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export_checkpoint(
    checkpoint: str | Path,
    output: str | Path,
    *,
    kind: str,
    tokenizer: str | None,
    options: ExportOptions,
) -> Path:
    """Write a training checkpoint as `hf` or `official` folder; the tokenizer is the run's."""
    folder = newest_folder(checkpoint)
    run = read_run_config(folder)
    tensors = read_model_tensors(folder)
    logger.info("%s: %d tensors", folder, len(tensors))
    if kind == "official":
        return export_official(tensors, run.model, output, options)
    step = int(folder.name.rpartition("_")[2] or 0)
    facts: dict[str, object] = {
        "run": run.name,
        "step": step,
        "optimizer": run.optimizer.name,
        "learning rate": run.optimizer.lr,
        "precision": run.train.precision,
    }
    if run.train.global_batch_size is not None:
        tokens = step * run.train.global_batch_size * run.model.sequence_length
        facts |= {"sequences per step": run.train.global_batch_size, "tokens": f"{tokens:,}"}
    options = dataclasses.replace(options, facts=facts)
    return export_hf(tensors, run.model, tokenizer or run.data.tokenizer, output, options)


def import_checkpoint(loaded: Loaded, output: str | Path, *, force: bool) -> Path:
    """Write a loaded model as weights of a checkpoint, and a config.yaml that trains from them."""
    output = Path(output)
    if any(output.glob("step_*")) and not force:
        raise UserError(f"{output} holds checkpoints already; choose another --output or --force")
    weights = output / "step_00000000"
    checkpoint = CheckpointConfig(dir=str(output), init_from=str(weights))
    run = RunConfig(name=output.name, model=loaded.config, checkpoint=checkpoint)
    if loaded.tokenizer is not None:
        data = dataclasses.replace(run.data, tokenizer=str(loaded.tokenizer.resolve()))
        run = dataclasses.replace(run, data=data)
    with new_folder(weights, force=force) as folder:
        write_model_tensors(folder, loaded.tensors)
        (folder / CONFIG).write_text(dump_config(run))
    (output / CONFIG).write_text(dump_config(run))
    logger.info("%s: %s weights, %d tensors", output, loaded.format, len(loaded.tensors))
    return output
