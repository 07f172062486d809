"""How a run ends and goes on: told to stop, at its time, on a full disk, with fewer ranks."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny import SyntheticRows, merged, tiny_config

from harness import run_ranks
from megaparcae.checkpoint import manager as manager_module
from megaparcae.engine.distributed import Process
from megaparcae.errors import UserError
from megaparcae.optim.schedule import lr_factor
from megaparcae.train.build import build_run
from megaparcae.train.safety import SPARE_SECONDS, StopRequest, TrainingError
from megaparcae.train.trainer import Trainer

STEPS = 4
RUN = {
    "train": {"num_steps": STEPS, "global_batch_size": 12, "micro_batch_size": 1},
    "validation": {"interval": 2, "num_sequences": 4, "num_loops": [2]},
    "log": {"interval": 1, "health_interval": 0},
    "schedule": {"cooldown_steps": 2},
}


def run(folder: str, changes: dict[str, Any], trainer: type[Trainer] = Trainer) -> dict[str, Any]:
    """A run from its beginning or its last checkpoint; how it ended."""
    config = tiny_config(merged(merged(RUN, {"checkpoint": {"dir": folder}}), changes))
    process = Process(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    trained = trainer(build_run(config, process), SyntheticRows(), SyntheticRows())
    try:
        complete: bool | str = trained.train()
    except (TrainingError, UserError) as error:
        complete = f"{type(error).__name__}: {error}"
    return {"complete": complete, "last_step": trained.last_step, "saved": trained.saved}


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["kind"] == kind]


class Signalled(Trainer):
    """Rank 1 gets a signal in the middle of its second step, validation or save."""

    place = "step"

    def receive(self, place: str, step: int) -> None:
        if place == self.place and step >= 2 and self.is_writer is False:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGUSR1)

    def report(self, record: dict[str, Any]) -> None:
        self.receive("step", record["step"])
        super().report(record)

    def validate(self, step: int) -> None:
        self.receive("validation", step)
        super().validate(step)

    def save(self, step: int) -> None:
        super().save(step)
        self.receive("save", step)


def signalled(folder: str, place: str) -> dict[str, Any]:
    Signalled.place = place
    changes = {"train": {"num_steps": 6}, "checkpoint": {"interval": 2 if place == "save" else 0}}
    return run(folder, changes, Signalled)


@pytest.mark.parametrize(("place", "step"), [("step", 2), ("validation", 2), ("save", 3)])
def test_signals_to_one_rank_end_all_after_the_same_step_with_one_save(place, step, tmp_path):
    ends = run_ranks(signalled, 2, str(tmp_path), place)
    assert ends == 2 * [{"complete": False, "last_step": step, "saved": step}]
    assert [r["step"] for r in records(tmp_path, "checkpoint")] == ([2, 3] if step == 3 else [2])
    (stop,) = records(tmp_path, "stop")
    assert (stop["step"], stop["reason"]) == (step, "received SIGUSR1")


def stopped_by(folder: str, what: str) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    match what:
        case "exit_after":
            changes = {"train": {"exit_after": 1e-6}}
        case "slurm":
            os.environ["SLURM_JOB_END_TIME"] = str(int(time.time() + SPARE_SECONDS / 2))
        case "file":
            monkey = Trainer.report

            def report(self: Trainer, record: dict[str, Any]) -> None:
                monkey(self, record)
                (Path(folder) / "stop").touch()

            Trainer.report = report  # type: ignore[method-assign]
    return run(folder, changes)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("exit_after", "train.exit_after=1e-06 is over"),
        ("slurm", "the Slurm job ends in"),
        ("file", "stop is there"),
    ],
)
def test_time_limits_and_a_stop_file_end_a_run_with_a_save(what, reason, tmp_path):
    ends = run_ranks(stopped_by, 2, str(tmp_path), what)
    assert ends == 2 * [{"complete": False, "last_step": 1, "saved": 1}]
    assert reason in records(tmp_path, "stop")[0]["reason"]
    if what == "file":
        again = run_ranks(run, 2, str(tmp_path), {})
        assert all(e["complete"].startswith("UserError:") for e in again)
        assert "delete it to let the run go on" in again[0]["complete"]


def test_a_slurm_job_keeps_time_for_a_step_and_its_saves(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", "10000")
    stop = StopRequest(tmp_path, is_first=True)
    stop.save_seconds = 100.0
    for now, wanted in ((10000 - SPARE_SECONDS - 20 - 301, None), (10000 - SPARE_SECONDS - 320, 1)):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        assert (stop.reason(10.0) is not None) == (wanted is not None)
    assert StopRequest(tmp_path, is_first=False).reason(10.0) is None


def disk_fails(folder: str, from_step: int) -> dict[str, Any]:
    write = manager_module.write_folder

    def failing(path: Path, *arguments: Any, **options: Any) -> None:
        if int(path.name[-8:]) >= from_step and dist.get_rank() == 1:
            os.fsync = lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        write(path, *arguments, **options)

    manager_module.write_folder = failing
    return run(folder, {"checkpoint": {"interval": 1}})


def test_a_run_whose_last_step_cannot_be_saved_fails_and_names_what_stands(tmp_path):
    first, second = run_ranks(disk_fails, 2, str(tmp_path), 2)
    assert first == second
    assert (first["last_step"], first["saved"]) == (STEPS, 1)
    assert (
        "ended after step 4, which could not be saved; the checkpoint of step 1"
        in (first["complete"])
    )
    failed = records(tmp_path, "save_failed")
    assert [r["step"] for r in failed] == [2, 3, 4, 4], "training went on, and the last is retried"
    assert "No space left on device" in failed[0]["reason"]


def test_a_run_goes_on_with_other_numbers_of_ranks_at_the_same_global_batch(tmp_path):
    """Accumulation follows; samples, depths and schedule are those of the straight run."""
    straight, worlds = tmp_path / "straight", (3, 2, 1)
    run_ranks(run, 1, str(straight), {})
    parts = tmp_path / "parts"
    for part, world in enumerate(worlds, 1):
        last = STEPS if part == len(worlds) else part
        run_ranks(part_of_run, world, str(parts), last, timeout=60)
    got, want = records(parts, "step"), records(straight, "step")
    assert [r["step"] for r in got] == [r["step"] for r in want] == [1, 2, 3, 4]
    for one, other in zip(got, want, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=2e-5)
        for name in ("mean_loops", "loop_work", "lr", "tokens"):
            assert one[name] == other[name], name
    starts = [r["layout"] for r in records(parts, "start")]
    assert [(s["dp"], s["accumulation"]) for s in starts] == [(w, 12 // w) for w in worlds]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_saves_are_recorded_with_what_training_waited(asynchronous, tmp_path):
    options = {"interval": 1, "asynchronous": asynchronous, "keep": 1, "keep_best": 1}
    (end,) = run_ranks(run, 1, str(tmp_path), {"checkpoint": options})
    assert end["complete"] is True
    saves = records(tmp_path, "checkpoint")
    assert [r["step"] for r in saves] == list(range(1, STEPS + 1))
    assert all((r["stall_seconds"] == r["seconds"]) != asynchronous for r in saves[:-1])
    losses = {r["step"]: r["loss"]["2"] for r in records(tmp_path, "validation")}
    best = min(losses, key=losses.__getitem__)
    kept = {int(f.name[-8:]) for f in tmp_path.glob("step_*")}
    assert kept == {best, STEPS}


class Part(Trainer):
    """Stops by itself after some step, as at the end of a job's time."""

    last = 0

    def report(self, record: dict[str, Any]) -> None:
        super().report(record)
        if record["step"] == self.last and self.is_writer:
            os.kill(os.getpid(), signal.SIGTERM)


def part_of_run(folder: str, last: int) -> dict[str, Any]:
    Part.last = last
    return run(folder, {}, Part)


def test_an_overridden_schedule_is_the_new_one_throughout(tmp_path):
    """Also a run that is only made longer follows the formula of its new length."""
    new = {"lr": 1e-4}, {"kind": "cosine", "warmup_steps": 1, "min_factor": 0.1}
    changes = {
        "optimizer": new[0],
        "schedule": new[1],
        "train": {"num_steps": 6},
        "checkpoint": {"override_schedule": True},
    }
    run_ranks(run, 1, str(tmp_path), {})
    assert "optimizer.lr was 0.003, now 0.0001" in refused(tmp_path, {"optimizer": new[0]})
    assert "train.num_steps was 4, now 6" in refused(tmp_path, {"train": {"num_steps": 6}})
    run_ranks(run, 1, str(tmp_path), changes)
    resumed = tiny_config(merged(RUN, changes))
    for record in records(tmp_path, "step")[STEPS:]:
        factor = lr_factor(record["step"] - 1, resumed.schedule, 6)
        assert record["lr"] == factor * 1e-4 and record["lr_factor"] == factor < 1


def refused(folder: Path, changes: dict[str, Any]) -> str:
    (end,) = run_ranks(run, 1, str(folder), changes)
    return str(end["complete"])
