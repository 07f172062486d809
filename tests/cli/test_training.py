"""Training as a user runs it: interrupted, resumed, told to stop, given wrong options."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from training_runs import finish, make_shard, records, start, train

pytestmark = pytest.mark.slow

SAME = ("loss", "grad_norm", "lr_factor", "mean_loops", "tokens")


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return make_shard(tmp_path_factory.mktemp("shard"))


@pytest.fixture(scope="module")
def straight(options: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing interrupts, on two ranks."""
    run_dir = tmp_path_factory.mktemp("straight")
    train({**options, "checkpoint.dir": run_dir}, world=2)
    return run_dir


def wait_for(path: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


def assert_same_run(run_dir: Path, straight: Path) -> None:
    """Every step's figures are those of the straight run, bit for bit."""
    got, want = records(run_dir), records(straight)
    assert got.keys() == want.keys()
    for step, record in want.items():
        assert {k: got[step][k] for k in SAME} == {k: record[k] for k in SAME}, step
    last = [records(folder, "validation")[10]["loss"] for folder in (run_dir, straight)]
    assert last[0] == last[1]


def test_a_run_that_was_killed_goes_on_bit_for_bit(options, straight, tmp_path):
    run = {**options, "checkpoint.dir": tmp_path, "train.num_steps": 10}
    slow = {**run, "checkpoint.interval": 5}
    processes = start(slow, world=2)
    wait_for(tmp_path / "latest")
    for process in processes:
        process.kill()
    finish(processes)
    said = train(run, world=2)
    assert "resumed" in said
    assert_same_run(tmp_path, straight)


def test_a_signal_to_one_rank_saves_once_and_ends_all_with_their_own_code(
    options, straight, tmp_path
):
    run = {**options, "checkpoint.dir": tmp_path, "checkpoint.interval": 0}
    processes = start(run, world=2)
    wait_for(tmp_path / "log.jsonl")
    while not (tmp_path / "log.jsonl").read_text().count("\n"):
        time.sleep(0.01)
    processes[1].send_signal(signal.SIGTERM)
    codes, said = finish(processes)
    if codes == [0, 0]:
        pytest.skip("the run was over before the signal arrived")
    assert codes == [75, 75], said
    assert len(list(tmp_path.glob("step_*"))) == 1
    train(run, world=2)
    assert_same_run(tmp_path, straight)


def test_one_rank_continues_what_two_have_begun(options, straight, tmp_path):
    run = {**options, "checkpoint.dir": tmp_path, "checkpoint.keep": 0}
    train({**run, "checkpoint.override_schedule": "true"}, world=2)
    (tmp_path / "log.jsonl").unlink()
    for name in ("step_00000010", "latest"):
        path = tmp_path / name
        path.unlink() if path.is_file() else path.rename(tmp_path / "old")
    train(run)
    want = records(straight)
    for step, record in records(tmp_path).items():
        assert record["loss"] == pytest.approx(want[step]["loss"], rel=1e-5)
    assert set(records(tmp_path)) == set(range(6, 11))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data.train": "/nowhere/shard"}, "/nowhere/shard"),
        ({"model.num_heads": 5}, "must be divisible by model.num_heads=5"),
        ({"model.hiden_size": 32}, "hidden_size"),
        ({"model.sequence_length": 200_000}, "model.sequence_length=200000"),
        ({"train.micro_batch_size": 3}, "train.global_batch_size=8"),
        ({"model.vocab_size": 64}, "model.vocab_size"),
        ({"checkpoint.dir": "/proc/nothing/here"}, "checkpoint.dir"),
    ],
)
def test_a_users_mistake_is_one_sentence_and_exit_code_2(options, tmp_path, change, message):
    codes, said = finish(start({**options, "checkpoint.dir": tmp_path, **change}))
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert codes == [2], said
    assert len(errors) == 1 and message in errors[0], said
    assert "Traceback" not in said
    assert not list(tmp_path.glob("step_*"))


def test_two_ranks_report_a_mistake_once(options, tmp_path):
    wrong = {**options, "checkpoint.dir": tmp_path, "data.train": "/nowhere/shard"}
    codes, said = finish(start(wrong, world=2))
    assert codes == [2, 2]
    assert said.count("error: ") == 1, said


def test_everything_optional_can_be_off(options, tmp_path):
    off = {"validation.interval": 0, "checkpoint.interval": 0, "log.interval": 0}
    train({**options, **off, "checkpoint.dir": tmp_path, "train.num_steps": 2})
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_00000002"]


def test_a_run_shorter_than_the_validation_interval_validates_at_its_end(options, tmp_path):
    train({**options, "checkpoint.dir": tmp_path, "train.num_steps": 2})
    assert list(records(tmp_path, "validation")) == [2]


def test_a_run_that_holds_nothing_out_does_without_validation(options, tmp_path):
    nothing = {"data.validation_fraction": 0, "validation.interval": 1, "train.num_steps": 2}
    train({**options, **nothing, "checkpoint.dir": tmp_path})
    assert set(records(tmp_path)) == {1, 2} and not records(tmp_path, "validation")


def test_changed_options_are_named_before_a_run_goes_on(options, straight):
    codes, said = finish(start({**options, "checkpoint.dir": straight, "optimizer.lr": 0.001}))
    assert codes == [2]
    assert "optimizer.lr was 0.008, now 0.001" in said
    codes, said = finish(start({**options, "checkpoint.dir": straight, "model.hidden_size": 64}))
    assert codes == [2]
    assert "model.hidden_size was 32, now 64" in said


def test_wandb_without_a_key_or_the_package_does_not_stop_a_run(options, tmp_path):
    run = {**options, "checkpoint.dir": tmp_path, "train.num_steps": 2}
    said = train({**run, "log.wandb_project": "test"}, WANDB_MODE="offline")
    assert set(records(tmp_path)) == {1, 2}, said
