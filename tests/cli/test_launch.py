"""launch/*.sh under DeepSpeed's own launcher: killed, told to stop, given a wrong option."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from command_lines import launch, only_error
from test_training import assert_same_run, wait_for
from training_runs import make_shard, records, train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    made = make_shard(tmp_path_factory.mktemp("shard"))
    return {**made, "train.num_steps": 40, "validation.interval": 10, "checkpoint.interval": 10}


@pytest.fixture(scope="module")
def straight(options, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing interrupts."""
    run_dir = tmp_path_factory.mktemp("straight")
    train({**options, "checkpoint.dir": run_dir}, world=2)
    return run_dir


def wait_for_step(run_dir: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while not (run_dir / "log.jsonl").exists() or step not in records(run_dir):
        assert time.monotonic() < deadline, f"step {step} was not made"
        time.sleep(0.02)


def kill_all(pid: int) -> None:
    """kill -9 of a launch and everything below it."""
    for process in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
        process.kill()


def test_a_launch_killed_with_all_its_ranks_goes_on_bit_for_bit(options, straight, tmp_path):
    run = {**options, "checkpoint.dir": tmp_path}
    first = launch(run)
    wait_for_step(tmp_path, 12)
    wait_for(tmp_path / "latest")  # the save of step 10 is written beside the training
    kill_all(first.pid)
    first.communicate(timeout=60)
    made = max(records(tmp_path))
    assert made < 40, "the run was over before it could be killed"
    second = launch(run)
    said, _ = second.communicate(timeout=180)
    assert second.returncode == 0, said
    assert "resumed" in said
    assert_same_run(tmp_path, straight)


def test_a_launch_told_to_stop_saves_once_ends_with_75_and_goes_on(options, straight, tmp_path):
    run = {**options, "checkpoint.dir": tmp_path, "checkpoint.interval": 0}
    first = launch(run)
    wait_for_step(tmp_path, 3)
    first.send_signal(signal.SIGTERM)
    said, _ = first.communicate(timeout=120)
    assert first.returncode == 75, said
    (stopped_at,) = records(tmp_path, "checkpoint")
    assert stopped_at < 40
    second = launch(run)
    said, _ = second.communicate(timeout=180)
    assert second.returncode == 0, said
    assert_same_run(tmp_path, straight)
    lines = (tmp_path / "log.jsonl").read_text().count('"kind": "checkpoint"')
    assert lines == 2, "one at the stop, one after the last step"


def test_a_mistake_that_only_the_ranks_can_see_is_said_once(options, tmp_path):
    wrong = launch({**options, "checkpoint.dir": tmp_path, "data.train": "/nowhere/shard"})
    said, _ = wrong.communicate(timeout=120)
    assert wrong.returncode == 2, said
    assert "/nowhere/shard" in only_error(said)
    assert os.listdir(tmp_path) == []
