"""Guards of the training loop: skipped steps, spikes of the loss, and what the log says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tiny import VOCAB, SyntheticRows, merged, tiny_config

from harness import run_ranks
from megaparcae.engine.distributed import Process
from megaparcae.train.build import build_run
from megaparcae.train.safety import TrainingError
from megaparcae.train.trainer import Trainer

GUARDED: dict[str, Any] = {
    "model": {
        "num_prelude_layers": 1,
        "num_core_layers": 1,
        "num_coda_layers": 1,
        "recurrence": {"mean_recurrence": 2, "backprop_depth": 1},
    },
    "train": {"num_steps": 24, "loss_spike_window": 8, "micro_batch_size": 4},
    "checkpoint": {"interval": 6},
    "log": {"interval": 0, "health_interval": 0},
    "validation": {"interval": 0},
}
BATCH = 16


class NoisyRows(SyntheticRows):
    """The rows of one step are noise, which a model that has learnt something finds hard."""

    def __init__(self, bad_step: int) -> None:
        super().__init__()
        self.bad_step = bad_step

    def rows(self, sample_ids: np.ndarray) -> Any:
        found = super().rows(sample_ids)
        bad = sample_ids // BATCH == self.bad_step
        noise = np.random.default_rng(0).integers(0, VOCAB, found.tokens.shape)
        found.tokens[bad] = noise[bad]
        return found


def poison(trainer: Trainer, step: int) -> None:
    """On the last rank, a NaN in one gradient of that step (counted from 1)."""
    if dist.get_rank() != dist.get_world_size() - 1:
        return
    make_batches = trainer.batches.to_device

    def with_poison(host: Any, made: int) -> Any:
        if made + 1 == step:
            parameter = next(
                p for name, p in trainer.run.model.named_parameters() if "coda" in name
            )
            handle = parameter.register_hook(lambda g: (handle.remove(), g + torch.nan)[1])
        return make_batches(host, made)

    trainer.batches.to_device = with_poison  # type: ignore[method-assign]


def train(
    folder: str, changes: dict[str, Any], nan_at: tuple[int, ...] = (), noise_at: int = -1
) -> dict[str, Any]:
    """A whole run on this rank."""
    config = tiny_config(merged(merged(GUARDED, {"checkpoint": {"dir": folder}}), changes))
    process = Process(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    run = build_run(config, process)
    trainer = Trainer(run, NoisyRows(noise_at), None)  # type: ignore[arg-type]
    for step in nan_at:
        poison(trainer, step)
    ended = ""
    try:
        trainer.train()
    except TrainingError as error:
        ended = str(error)
    return {"ended": ended, "updates": run.engine.step_count(), "skipped": trainer.guard.total}


def log(folder: Path, kind: str = "step") -> dict[int, dict[str, Any]]:
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {record["step"]: record for record in records if record["kind"] == kind}


@pytest.mark.parametrize(
    "parallel", [{}, {"zero_stage": 2}, {"tp": 2}, {"pp": 2}], ids=["dp", "zero2", "tp", "pp"]
)
def test_a_nan_on_one_rank_at_step_five_is_skipped_by_all_and_counted(tmp_path, parallel):
    ranks = run_ranks(train, 2, str(tmp_path), {"parallel": parallel}, (5,))
    assert ranks == [{"ended": "", "updates": 23, "skipped": 1}] * 2
    steps = log(tmp_path)
    assert [steps[i]["skipped_steps"] for i in (4, 5, 6, 24)] == [0, 1, 1, 1]
    assert steps[5]["grad_norm"] is None
    assert all(math.isfinite(steps[i]["loss"]) for i in range(1, 25))
    assert steps[24]["loss"] < steps[1]["loss"] - 0.3, "the run goes on learning"


def test_too_many_skips_in_a_row_stop_the_run_with_the_remedy(tmp_path):
    changes = {"train": {"max_skipped_steps": 2}}
    ranks = run_ranks(train, 2, str(tmp_path), changes, (3, 4, 5, 6))
    for rank in ranks:
        assert "3 steps in a row were skipped" in rank["ended"]
        assert "train.max_skipped_steps=2" in rank["ended"] and "lower" in rank["ended"]


@pytest.mark.parametrize(
    "parallel",
    [{}, {"zero_stage": 3}, {"pp": 2}, {"pp": 2, "zero_stage": 1}],
    ids=["dp", "zero3", "pp", "pp zero1"],
)
def test_a_spike_is_skipped_before_the_update_on_all_ranks(tmp_path, parallel):
    changes = {"train": {"loss_spike": "skip"}, "parallel": parallel}
    ranks = run_ranks(train, 2, str(tmp_path), changes, (), 16)
    assert ranks == [{"ended": "", "updates": 23, "skipped": 1}] * 2
    steps = log(tmp_path)
    assert [i for i in steps if steps[i]["loss_spike"]] == [17]
    assert steps[17]["loss"] > steps[16]["loss"] + 0.3, "the loss of a skipped step is logged"


def test_a_warning_leaves_the_run_alone(tmp_path):
    (rank,) = run_ranks(train, 1, str(tmp_path), {}, (), 16)
    assert rank == {"ended": "", "updates": 24, "skipped": 0}
    assert log(tmp_path)[17]["loss_spike"]


@pytest.mark.parametrize("world, parallel", [(1, {}), (2, {}), (2, {"pp": 2})], ids=str)
def test_a_spike_rolls_back_to_the_last_checkpoint_and_goes_on_with_the_following_data(
    tmp_path, world, parallel
):
    changes = {"train": {"loss_spike": "roll_back"}, "parallel": parallel}
    ranks = run_ranks(train, world, str(tmp_path), changes, (), 16)
    # 24 steps, of which those from the checkpoint at 12 to the spike at 17 are taken back
    assert ranks == [{"ended": "", "updates": 24 - 5, "skipped": 0}] * world
    (roll_back,) = log(tmp_path, "roll_back").values()
    assert (roll_back["step"], roll_back["to_step"]) == (17, 12)
    assert sorted(log(tmp_path)) == list(range(1, 25)), "no step is made twice"


def test_a_run_that_was_resumed_after_a_spike_makes_the_same_decisions(tmp_path):
    """Killed after the roll-back but before the next checkpoint: the spike is met again."""
    changes = {"train": {"loss_spike": "roll_back"}}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run_ranks(train, 1, str(whole), changes, (), 16)
    run_ranks(train_until, 1, str(cut), changes, 17)
    run_ranks(train, 1, str(cut), changes, (), 16)
    expected, got = log(whole), log(cut)
    assert [got[i]["loss"] for i in range(13, 25)] == [expected[i]["loss"] for i in range(13, 25)]
    assert log(cut, "roll_back").keys() == {17}


def train_until(folder: str, changes: dict[str, Any], last: int) -> None:
    """A run whose process is gone after `last` steps."""
    report = Trainer.report

    def report_and_die(self: Trainer, record: dict[str, Any]) -> None:
        report(self, record)
        if record["step"] == last:
            raise SystemError("killed")

    Trainer.report = report_and_die  # type: ignore[method-assign]
    try:
        train(folder, changes, (), 16)
    except SystemError:
        return


def test_rolling_back_without_checkpoints_is_refused():
    with pytest.raises(ValueError, match="checkpoint.interval=0"):
        tiny_config({"train": {"loss_spike": "roll_back"}, "checkpoint": {"interval": 0}})
