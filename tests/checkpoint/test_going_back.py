"""A run that goes back to an earlier checkpoint keeps what it writes from there."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_manager import OneTensor, config, names, resumed, save_steps

from megaparcae.checkpoint.manager import CheckpointManager
from megaparcae.checkpoint.storage import newest_folder
from megaparcae.errors import UserError


def truncate(folder: Path, step: int) -> None:
    data = next((folder / f"step_{step:08d}").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])


def test_saves_after_a_fall_back_are_kept_though_damaged_ones_have_later_steps(tmp_path):
    save_steps(tmp_path, 100, 200, 300, keep=0)
    truncate(tmp_path, 200)
    truncate(tmp_path, 300)
    manager = CheckpointManager(config(tmp_path, checkpoint={"keep": 1}), 8)
    assert manager.resume(OneTensor()) == 100
    manager.save(110, OneTensor(110))
    assert "step_00000110" in names(tmp_path) and "step_00000100" not in names(tmp_path)
    assert resumed(tmp_path)[0] == 110


def test_damaged_ones_do_not_count_among_those_to_keep(tmp_path):
    save_steps(tmp_path, 100, 200, keep=0)
    truncate(tmp_path, 200)
    manager = CheckpointManager(config(tmp_path, checkpoint={"keep": 2}), 8)
    assert manager.resume(OneTensor()) == 100
    manager.save(250, OneTensor(250))
    assert {"step_00000100", "step_00000250"} <= set(names(tmp_path))


def test_a_new_run_in_an_old_folder_is_the_one_that_goes_on(tmp_path):
    save_steps(tmp_path, 100, 200)
    never = CheckpointManager(config(tmp_path, checkpoint={"resume": "never", "keep": 1}), 8)
    assert never.resume(OneTensor()) == 0
    never.save(5, OneTensor(5))
    assert names(tmp_path) == ["step_00000005", "step_00000100", "step_00000200"]
    assert resumed(tmp_path)[0] == 5
    assert newest_folder(tmp_path).name == "step_00000005"


def test_latest_may_be_set_back_by_hand(tmp_path, caplog):
    save_steps(tmp_path, 1, 2)
    (tmp_path / "latest").write_text("step_00000001")
    assert resumed(tmp_path)[0] == 1
    assert newest_folder(tmp_path).name == "step_00000001"
    (tmp_path / "latest").write_text("step_00000009")
    assert resumed(tmp_path)[0] == 2
    assert "latest names no checkpoint; trying the newest" in caplog.text


def test_a_later_one_is_better_than_none(tmp_path):
    save_steps(tmp_path, 1, 2)
    (tmp_path / "latest").write_text("step_00000001")
    truncate(tmp_path, 1)
    assert resumed(tmp_path)[0] == 2


def test_the_same_step_may_be_saved_again(tmp_path):
    save_steps(tmp_path, 1, 2)
    CheckpointManager(config(tmp_path), 8).save(2, OneTensor(7))
    assert (resumed(tmp_path)[1].weight == 7).all()
    assert not list(tmp_path.glob(".tmp*"))


def test_a_folder_of_another_format_is_refused(tmp_path):
    save_steps(tmp_path, 1)
    meta = tmp_path / "step_00000001" / "meta.json"
    meta.write_text(meta.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(UserError, match="format 2, but this version reads format 1"):
        resumed(tmp_path)
