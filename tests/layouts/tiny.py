"""A tiny run on synthetic tokens, for tests that compare layouts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megaparcae.config.load import build_config
from megaparcae.config.schema import RunConfig
from megaparcae.engine.distributed import Process
from megaparcae.optim.schedule import hyperparameters_at
from megaparcae.parallel.shard import spec_of
from megaparcae.train.batches import BatchMaker
from megaparcae.train.build import Run, apply_schedule, build_run

VOCAB, S = 120, 16

BASE: dict[str, Any] = {
    "model": {
        "vocab_size": VOCAB,
        "vocab_multiple": 16,
        "sequence_length": S,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 4,
        "num_prelude_layers": 2,
        "num_core_layers": 2,
        "num_coda_layers": 2,
        "init": "scaled",
        "recurrence": {"mean_recurrence": 4, "backprop_depth": 2},
    },
    "optimizer": {"name": "adamw", "lr": 3e-3, "grad_clip": 0.2, "eps": 1e-6},
    "train": {
        "num_steps": 20,
        "global_batch_size": 16,
        "micro_batch_size": 2,
        "precision": "fp32",
        "device": "cpu",
        "seed": 7,
    },
}


class SyntheticRows:
    """Tokens as a pure function of the sample id, with something to learn in them."""

    def __init__(self, document_mask: bool = False) -> None:
        self.document_mask = document_mask

    def rows(self, sample_ids: np.ndarray) -> SimpleNamespace:
        first = sample_ids[:, None] * 31 + np.arange(S + 1)[None, :] * (sample_ids[:, None] % 5 + 1)
        documents = np.repeat(np.arange(S)[None, :] // 6, len(sample_ids), 0).astype(np.int32)
        return SimpleNamespace(
            tokens=(first % VOCAB).astype(np.int64),
            document_ids=documents if self.document_mask else None,
        )


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with nested changes."""
    result = dict(base)
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if nested else value
    return result


def tiny_config(changes: dict[str, Any] | None = None) -> RunConfig:
    return build_config(merged(BASE, changes or {}), where="test")


def start(config: RunConfig, rows: Any = None) -> tuple[Run, BatchMaker]:
    """Build a run on this rank of an initialised world; on synthetic rows if not on these."""
    rows = rows or SyntheticRows(config.data.document_mask)
    process = Process(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    run = build_run(config, process)
    batches = BatchMaker(
        config,
        run.plan,
        dp_index=run.mesh.dp.index,
        train=rows,
        validation=rows,
        device=process.device,
    )
    return run, batches


def steps(run: Run, batches: BatchMaker, first: int, last: int) -> list[tuple[float, float]]:
    """(loss, gradient norm) of steps [first, last)."""
    config, results = run.config, []
    counted = run.plan.global_batch * config.model.sequence_length
    for step in range(first, last):
        hyper = hyperparameters_at(
            step,
            optimizer=config.optimizer,
            schedule=config.schedule,
            num_steps=config.train.num_steps,
        )
        apply_schedule(run.engine.optimizer, hyper, config.optimizer)
        micro = batches.to_device(batches.read(step), step)
        loss = float(run.engine.train_batch(micro, 1 / counted))
        results.append((loss, run.engine.grad_norm()))
    return results


def full_weights(run: Run) -> dict[str, torch.Tensor] | None:
    """All weights, whole, on rank 0. Copies held by several ranks must be equal bit for bit."""
    mine = []
    run.engine.finish_step()
    for parameter in run.model.parameters():
        spec = spec_of(parameter)
        value = parameter
        if hasattr(parameter, "ds_id"):  # ZeRO-3
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                value = parameter.detach().clone()
        mine.append((spec.name, spec.full_shape, spec.offset, value.detach().clone()))
    everyone: list[Any] = [None] * run.mesh.world_size
    dist.all_gather_object(everyone, mine)
    if run.mesh.rank:
        return None
    weights: dict[str, torch.Tensor] = {}
    seen: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
    for name, shape, offset, value in (item for rank in everyone for item in rank):
        full = weights.setdefault(name, torch.full(shape, torch.nan))
        slices = tuple(slice(o, o + n) for o, n in zip(offset, value.shape, strict=True))
        full[slices] = value
        before = seen.setdefault((name, offset), value)
        assert torch.equal(before, value), f"{name} differs between ranks that hold a copy"
    assert not any(w.isnan().any() for w in weights.values())
    return weights


def train_tiny(changes: dict[str, Any], num_steps: int) -> dict[str, Any]:
    """Run on this rank; losses, norms, validation and (on rank 0) the final weights."""
    run, batches = start(tiny_config(changes))
    results = steps(run, batches, 0, num_steps)
    validation = float(run.engine.eval_batch(batches.validation_batches(3)))
    results += steps(run, batches, num_steps, num_steps + 1)
    return {
        "steps": results,
        "validation": validation,
        "weights": full_weights(run),
        "work": (run.model.work.no_grad, run.model.work.grad),
    }
