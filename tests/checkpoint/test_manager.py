"""A run's checkpoints over time: what is kept, what is damaged, what fits."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from megaparcae.checkpoint.manager import CheckpointManager
from megaparcae.checkpoint.model_tensors import read_model_tensors
from megaparcae.checkpoint.storage import newest_folder
from megaparcae.config.load import build_config
from megaparcae.config.schema import RunConfig
from megaparcae.errors import UserError
from megaparcae.parallel.shard import Fragment

MODEL = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "vocab_size": 100}


class OneTensor:
    """An engine with one weight and one state."""

    def __init__(self, value: float = 0.0) -> None:
        self.weight = torch.full((4, 3), value)
        self.state = torch.full((4, 3), -value)
        self.updates = int(value)

    def owned_fragments(self) -> list[Fragment]:
        upper = Fragment("model.embedding.weight", (4, 3), (0, 0), self.weight[:2])
        lower = Fragment("model.embedding.weight", (4, 3), (2, 0), self.weight[2:])
        return [upper, lower, Fragment("optimizer.exp_avg.x", (4, 3), (0, 0), self.state)]

    local_fragments = owned_fragments

    def step_count(self) -> int:
        return self.updates

    def finish_load(self, updates: int) -> None:
        self.updates = updates


def config(folder: Path, **sections: dict[str, object]) -> RunConfig:
    checkpoint = {"dir": str(folder), **sections.pop("checkpoint", {})}
    model = {**MODEL, **sections.pop("model", {})}
    return build_config({"model": model, "checkpoint": checkpoint, **sections}, where="test")


def save_steps(folder: Path, *steps: int, **checkpoint: object) -> CheckpointManager:
    manager = CheckpointManager(config(folder, checkpoint=checkpoint), 8)
    for step in steps:
        manager.save(step, OneTensor(step))
    return manager


def resumed(folder: Path, **sections: dict[str, object]) -> tuple[int, OneTensor]:
    engine = OneTensor()
    step = CheckpointManager(config(folder, **sections), 8).resume(engine)
    return step, engine


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step_*"))


def test_the_newest_is_restored_with_its_states(tmp_path):
    save_steps(tmp_path, 1, 2)
    step, engine = resumed(tmp_path)
    assert (step, engine.updates) == (2, 2)
    assert (engine.weight == 2).all() and (engine.state == -2).all()
    assert (tmp_path / "latest").read_text() == "step_00000002\n"


def test_old_ones_go_but_those_to_keep(tmp_path):
    save_steps(tmp_path, *range(1, 8), keep=2, keep_every=3)
    assert names(tmp_path) == [f"step_{n:08d}" for n in (3, 6, 7)]
    save_steps(tmp_path / "all", 1, 2, 3, keep=0)
    assert len(names(tmp_path / "all")) == 3


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing", "no meta"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path, damage, caplog):
    save_steps(tmp_path, 1, 2)
    data = next((tmp_path / "step_00000002").glob("*.distcp"))
    content = data.read_bytes()
    match damage:
        case "truncated":
            data.write_bytes(content[:-1])
        case "changed":
            data.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case "missing":
            data.unlink()
        case "no meta":
            (tmp_path / "step_00000002" / "meta.json").write_text("")
    step, engine = resumed(tmp_path)
    assert step == 1 and (engine.weight == 1).all()


def test_an_emptied_pointer_and_a_save_that_was_cut_short_do_not_matter(tmp_path):
    save_steps(tmp_path, 1, 2)
    (tmp_path / "latest").write_text("")
    (tmp_path / ".tmp-step_00000003").mkdir()
    assert resumed(tmp_path)[0] == 2


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_again_by_itself(tmp_path):
    save_steps(tmp_path, 1, 2)
    for data in tmp_path.glob("step_*/*.distcp"):
        data.write_bytes(b"")
    with pytest.raises(UserError, match=r"are damaged \(step_00000002, step_00000001\).*never"):
        resumed(tmp_path)
    assert resumed(tmp_path, checkpoint={"resume": "never"})[0] == 0


def test_modes_of_resuming(tmp_path):
    with pytest.raises(UserError, match="resume=must"):
        resumed(tmp_path, checkpoint={"resume": "must"})
    assert resumed(tmp_path)[0] == 0
    save_steps(tmp_path, 1)
    assert resumed(tmp_path, checkpoint={"resume": "never"})[0] == 0


def test_another_model_is_refused_by_name(tmp_path):
    save_steps(tmp_path, 1)
    with pytest.raises(UserError, match=r"model.hidden_size was 32, now 64"):
        resumed(tmp_path, model={"hidden_size": 64})
    with pytest.raises(UserError, match=r"vocabulary 100 padded to 128, now 200 padded to 256"):
        resumed(tmp_path, model={"vocab_size": 200})


def test_changed_training_options_need_a_word(tmp_path):
    save_steps(tmp_path, 1)
    with pytest.raises(UserError, match=r"optimizer.lr was 0.008, now 0.001"):
        resumed(tmp_path, optimizer={"lr": 1e-3})
    allowed = {"override_schedule": True}
    assert resumed(tmp_path, optimizer={"lr": 1e-3}, checkpoint=allowed)[0] == 1
    assert resumed(tmp_path, parallel={"zero_stage": 1}, log={"interval": 7})[0] == 1
    with pytest.raises(UserError, match=r"trained with 8 sequences a step, now 16"):
        CheckpointManager(config(tmp_path), 16).resume(OneTensor())


def test_a_full_disk_leaves_older_checkpoints_alone(tmp_path, monkeypatch):
    manager = save_steps(tmp_path, 1)
    full = type("Usage", (), {"free": 10})()
    monkeypatch.setattr("shutil.disk_usage", lambda _: full)
    assert manager.save(2, OneTensor(2)).folder is None
    assert names(tmp_path) == ["step_00000001"]
    with pytest.raises(OSError, match="MB free, but a checkpoint takes"):
        save_steps(tmp_path / "other", 1)


def test_a_new_run_may_start_from_other_weights(tmp_path):
    save_steps(tmp_path / "a", 5)
    step, engine = resumed(tmp_path / "b", checkpoint={"init_from": str(tmp_path / "a")})
    assert (step, engine.updates) == (0, 0)
    assert (engine.weight == 5).all() and (engine.state == 0).all()


def test_weights_are_read_without_a_process_group(tmp_path):
    save_steps(tmp_path, 3)
    tensors = read_model_tensors(newest_folder(tmp_path))
    assert list(tensors) == ["embedding.weight"]
    assert (tensors["embedding.weight"] == 3).all()
    with pytest.raises(UserError, match="holds no checkpoint"):
        newest_folder(tmp_path / "nothing")


class Evil:
    def __reduce__(self):
        return print, ("run by a checkpoint",)


def test_metadata_that_would_run_code_is_refused(tmp_path, capsys):
    save_steps(tmp_path, 1)
    folder = tmp_path / "step_00000001"
    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    meta = json.loads((folder / "meta.json").read_text())
    assert ".metadata" in meta["files"]
    with pytest.raises(UserError):
        newest_folder(folder)
    (folder / "meta.json").unlink()
    with pytest.raises(UserError, match="no part of a checkpoint"):
        read_model_tensors(folder)
    assert "run by" not in capsys.readouterr().out


def test_config_is_saved_in_the_checkpoint(tmp_path):
    save_steps(tmp_path, 1)
    text = (tmp_path / "step_00000001" / "config.yaml").read_text()
    assert "hidden_size: 32" in text
