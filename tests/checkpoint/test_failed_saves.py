"""Saves and loads that fail: on all ranks together, with the older checkpoint in place."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_manager import OneTensor, config, names, resumed, save_steps

from harness import RankError, run_ranks
from megaparcae.checkpoint import manager as manager_module
from megaparcae.checkpoint import storage
from megaparcae.checkpoint.manager import CheckpointManager
from megaparcae.errors import UserError
from megaparcae.parallel.shard import Fragment


class HalfEach(OneTensor):
    """The first two rows are rank 0's, the others rank 1's."""

    def owned_fragments(self) -> list[Fragment]:
        row = 2 * dist.get_rank()
        weight = Fragment("model.embedding.weight", (4, 3), (row, 0), self.weight[row : row + 2])
        return [weight]

    local_fragments = owned_fragments


def no_space(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


PLACES = {
    "first file": (0, lambda: setattr(storage, "_prepare", no_space)),
    "data": (1, lambda: setattr(os, "fsync", no_space)),
    "hash": (1, lambda: setattr(storage, "_hash_files", no_space)),
    "meta": (0, lambda: setattr(storage, "_finish", no_space)),
    "pointer": (0, lambda: setattr(manager_module, "sync", no_space)),
}


def fail_second_save(folder: str, place: str) -> tuple[str | None, list[str]]:
    checkpoints = CheckpointManager(config(Path(folder)), 8)
    checkpoints.save(1, HalfEach(1))
    failing_rank, break_it = PLACES[place]
    if dist.get_rank() == failing_rank:
        break_it()
    saved = checkpoints.save(2, HalfEach(2))
    return saved.problem, sorted(p.name for p in Path(folder).glob(".tmp*"))


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_cannot_write_fails_the_save_on_all_and_the_run_goes_on(place, tmp_path):
    for saved, left in run_ranks(fail_second_save, 2, str(tmp_path), place, timeout=30):
        assert saved is not None
        assert left == []
    assert (tmp_path / "step_00000001" / "meta.json").is_file()
    if place != "pointer":
        assert names(tmp_path) == ["step_00000001"]


def fail_first_save(folder: str) -> str:
    if dist.get_rank() == 1:
        os.fsync = no_space
    try:
        CheckpointManager(config(Path(folder)), 8).save(1, HalfEach(1))
    except OSError as error:
        return str(error)
    return "saved"


def test_without_an_older_one_all_ranks_end_with_the_cause(tmp_path):
    said = run_ranks(fail_first_save, 2, str(tmp_path), timeout=30)
    assert said[0] == said[1]
    assert "No space left on device" in said[0] and str(tmp_path) in said[0]


def die_in_second_save(folder: str, place: str) -> None:
    checkpoints = CheckpointManager(config(Path(folder)), 8)
    checkpoints.save(1, HalfEach(1))

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), 9)

    setattr(storage, place, die)
    checkpoints.save(2, HalfEach(2))


@pytest.mark.parametrize("place", ["_write_fragments", "_hash_files", "_finish"])
def test_a_kill_during_a_save_costs_that_save_only(place, tmp_path):
    with pytest.raises(RankError, match="died"):
        run_ranks(die_in_second_save, 2, str(tmp_path), place, timeout=30)
    assert list(tmp_path.glob(".tmp-step_*"))
    step, _ = run_ranks(resume_halves, 2, str(tmp_path), timeout=30)[0]
    assert step == 1
    assert not list(tmp_path.glob(".tmp*")), "what was left takes no space after the resume"


def resume_halves(folder: str) -> tuple[int, float]:
    engine = HalfEach()
    step = CheckpointManager(config(Path(folder)), 8).resume(engine)
    return step, float(engine.owned_fragments()[0].tensor.mean())


def test_a_disk_that_fills_up_during_the_save_leaves_the_older_one(tmp_path, monkeypatch):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")

    class Big(OneTensor):
        def owned_fragments(self) -> list[Fragment]:
            return [Fragment("model.big", (600, 600), (0, 0), torch.zeros(600, 600))]

    try:
        checkpoints = save_steps(disk, 1)
        monkeypatch.setattr(checkpoints, "_too_little_space", lambda _: None)
        assert checkpoints.save(2, Big()).folder is None
        assert sorted(p.name for p in disk.iterdir()) == ["latest", "step_00000001"]
        assert checkpoints.save(3, OneTensor(3)).folder is not None
        assert resumed(disk)[0] == 3
    finally:
        subprocess.run(["umount", str(disk)], check=True)


class Wider(OneTensor):
    def local_fragments(self) -> list[Fragment]:
        return [Fragment("model.embedding.weight", (4, 6), (0, 0), torch.zeros(4, 6))]


class OtherOptimizer(OneTensor):
    def local_fragments(self) -> list[Fragment]:
        momentum = Fragment("optimizer.momentum.x", (4, 3), (0, 0), self.state)
        return [*self.owned_fragments(), momentum]


def test_what_does_not_fit_is_said_in_one_sentence(tmp_path):
    save_steps(tmp_path / "a", 1)
    wider = config(tmp_path / "b", checkpoint={"init_from": str(tmp_path / "a")})
    with pytest.raises(UserError, match=r"embedding.weight is \(4, 3\), but this model's"):
        CheckpointManager(wider, 8).resume(Wider())
    allowed = config(tmp_path / "a", checkpoint={"override_schedule": True})
    with pytest.raises(UserError, match="has no optimizer.momentum.x"):
        CheckpointManager(allowed, 8).resume(OtherOptimizer())
