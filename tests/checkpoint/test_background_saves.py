"""Saves beside the training: what was there is written, and failures cost that save only."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_failed_saves import HalfEach, no_space, resume_halves
from test_manager import OneTensor, config, names, resumed, save_steps

from harness import RankError, run_ranks
from megaparcae.checkpoint import manager as manager_module
from megaparcae.checkpoint import storage
from megaparcae.checkpoint.manager import CheckpointManager


def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Saves stop before their first file until the event is set."""
    gate, write = threading.Event(), manager_module.write_folder

    def wait_and_write(*arguments, **options):
        gate.wait(20)
        write(*arguments, **options)

    monkeypatch.setattr(manager_module, "write_folder", wait_and_write)
    return gate


def test_training_may_change_the_weights_while_they_are_written(tmp_path, monkeypatch):
    gate = held(monkeypatch)
    manager, engine = CheckpointManager(config(tmp_path), 8), OneTensor(3)
    manager.begin(3, engine)
    engine.weight.fill_(4)
    engine.state.fill_(4)
    engine.updates = 4
    assert not manager.over() and not names(tmp_path)
    gate.set()
    result = manager.wait()
    assert (result.step, result.folder) == (3, tmp_path / "step_00000003")
    assert manager.wait() is None
    step, read = resumed(tmp_path)
    assert (step, read.updates) == (3, 3)
    assert (read.weight == 3).all() and (read.state == -3).all()


def test_the_same_memory_takes_every_save(tmp_path):
    manager = CheckpointManager(config(tmp_path), 8)
    places = []
    for step in (1, 2):
        manager.begin(step, OneTensor(float(step)))
        manager.wait()
        places.append(manager.copies.flat[torch.float32].data_ptr())
    assert places[0] == places[1]
    assert (resumed(tmp_path)[1].weight == 2).all()


def fail_in_the_background(folder: str) -> tuple[str | None, list[str]]:
    manager = CheckpointManager(config(Path(folder)), 8)
    manager.save(1, HalfEach(1))
    if dist.get_rank() == 1:
        os.fsync = no_space
    manager.begin(2, HalfEach(2))
    flag = torch.zeros(1)
    for _ in range(20):  # the training's own collectives go on beside
        dist.all_reduce(flag)
    result = manager.wait()
    return result.problem, names(Path(folder))


def test_a_rank_that_fails_in_the_background_fails_the_save_on_all(tmp_path):
    for problem, left in run_ranks(fail_in_the_background, 2, str(tmp_path), timeout=30):
        assert "No space left on device" in problem
        assert left == ["step_00000001"]


def die_in_the_background(folder: str) -> None:
    manager = CheckpointManager(config(Path(folder)), 8)
    manager.save(1, HalfEach(1))
    if dist.get_rank() == 1:
        storage._hash_files = lambda *_: os.kill(os.getpid(), 9)
    manager.begin(2, HalfEach(2))
    manager.wait()


def test_a_kill_while_files_are_written_leaves_the_older_one(tmp_path):
    with pytest.raises(RankError, match="died with exit code -9"):
        run_ranks(die_in_the_background, 2, str(tmp_path), timeout=30)
    assert list(tmp_path.glob(".tmp-step_*"))
    assert run_ranks(resume_halves, 2, str(tmp_path), timeout=30)[0][0] == 1


def test_the_first_save_that_fails_in_the_background_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(manager_module, "write_folder", no_space)
    manager = CheckpointManager(config(tmp_path), 8)
    manager.begin(1, OneTensor(1))
    with pytest.raises(OSError, match="No space left on device"):
        manager.wait()


def test_the_best_by_validation_loss_stay(tmp_path):
    manager = CheckpointManager(config(tmp_path, checkpoint={"keep": 1, "keep_best": 2}), 8)
    losses = {1: 3.0, 2: 1.0, 3: None, 4: 2.0, 5: float("nan"), 6: 2.5}
    for step, loss in losses.items():
        manager.save(step, OneTensor(step), validation_loss=loss)
    assert names(tmp_path) == [f"step_{n:08d}" for n in (2, 4, 6)]


def test_one_that_another_process_found_damaged_does_not_count(tmp_path):
    save_steps(tmp_path, 100, 200, keep=0)
    data = next((tmp_path / "step_00000200").glob("*.distcp"))
    content = data.read_bytes()
    data.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert resumed(tmp_path)[0] == 100
    assert "not what was written" in (tmp_path / "step_00000200" / "damaged.txt").read_text()
    save_steps(tmp_path, 250, keep=2)
    assert names(tmp_path) == ["step_00000100", "step_00000200", "step_00000250"]
    (tmp_path / "latest").write_text("step_00000200")
    data.write_bytes(content)
    assert resumed(tmp_path)[0] == 200, "it was restored by hand"
    assert not (tmp_path / "step_00000200" / "damaged.txt").exists()


def test_one_that_lost_a_file_since_does_not_count(tmp_path):
    save_steps(tmp_path, 1, 2, keep=0)
    next((tmp_path / "step_00000002").glob("*.distcp")).unlink()
    save_steps(tmp_path, 3, keep=2)
    assert "step_00000001" in names(tmp_path)
