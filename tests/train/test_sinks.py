"""Records go to log.jsonl whatever becomes of wandb and TensorBoard."""

from __future__ import annotations

import json
import sys
import threading
import time
import types
from dataclasses import replace
from pathlib import Path

import pytest

from megaparcae.config.schema import LogConfig, RunConfig
from megaparcae.log import read_records
from megaparcae.train import sinks as sinks_module
from megaparcae.train.sinks import JsonLines, make_sinks


class StubRun:
    """A wandb run whose calls fail from the third on, and whose end fails."""

    def __init__(self) -> None:
        self.logged: list[dict[str, object]] = []

    def define_metric(self, *_args: object, **_options: object) -> None: ...

    def log(self, record: dict[str, object]) -> None:
        if len(self.logged) == 2:
            raise ConnectionError("no route to host")
        self.logged.append(record)

    def finish(self) -> None:
        raise RuntimeError("already gone")


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A stand-in for the package; `calls` are the options of init."""
    calls: list[dict[str, object]] = []
    run = StubRun()

    def init(**options: object) -> StubRun:
        calls.append(options)
        return run

    module = types.ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    module.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "wandb", module)
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    return types.SimpleNamespace(calls=calls, run=run, module=module)


@pytest.fixture
def config() -> RunConfig:
    return replace(RunConfig(), log=LogConfig(wandb_project="test"))


def write_five(config: RunConfig, folder: Path) -> list[dict[str, object]]:
    sinks = make_sinks(config, folder, is_writer=True)
    for step in range(1, 6):
        for sink in sinks:
            sink.write({"kind": "validation", "step": step, "loss": {"1": 2.0, "4": float("nan")}})
    for sink in sinks:
        sink.close()
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_wandb_that_fails_in_the_middle_is_left_alone_and_the_log_is_complete(
    wandb, config, tmp_path, caplog
):
    records = write_five(config, tmp_path)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    assert records[0]["loss"] == {"1": 2.0, "4": None}
    assert [record["step"] for record in wandb.run.logged] == [1, 2]
    assert wandb.run.logged[0]["validation/loss/1"] == 2.0
    assert "no route to host" in caplog.text


def test_wandb_without_a_key_is_offline(wandb, config, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_five(config, tmp_path)
    assert wandb.calls[0]["mode"] == "offline"


@pytest.mark.parametrize("mode", ["offline", "disabled", "online"])
def test_wandbs_own_variable_decides(wandb, config, tmp_path, monkeypatch, mode):
    monkeypatch.setenv("WANDB_MODE", mode)
    write_five(config, tmp_path)
    assert wandb.calls[0]["mode"] == mode


def test_wandb_that_cannot_start_does_not_stop_the_run(wandb, config, tmp_path, caplog):
    def fail(**_options: object) -> None:
        raise OSError("api.wandb.ai can't be reached")

    wandb.module.init = fail
    assert len(write_five(config, tmp_path)) == 5
    assert "could not start" in caplog.text


def test_wandb_that_ends_the_interpreter_ends_itself_only(wandb, config, tmp_path, caplog):
    def leave(**_options: object) -> None:
        raise SystemExit(1)

    wandb.module.init = leave
    assert len(write_five(config, tmp_path)) == 5
    assert "could not start" in caplog.text


def test_wandb_that_does_not_answer_holds_nothing_up(wandb, config, tmp_path, caplog, monkeypatch):
    never = threading.Event()
    wandb.run.log = lambda _record: never.wait()
    monkeypatch.setattr(sinks_module, "LAST_SECONDS", 0.1)
    monkeypatch.setattr(sinks_module, "MOST_WAITING", 2)
    started = time.monotonic()
    assert len(write_five(config, tmp_path)) == 5
    assert time.monotonic() - started < 2
    assert "does not answer" in caplog.text or "is not done" in caplog.text
    never.set()


def test_wandb_that_is_not_installed_is_named(config, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert len(write_five(config, tmp_path)) == 5
    assert "pip install wandb" in caplog.text


def test_only_the_first_rank_writes(config, tmp_path):
    assert make_sinks(config, tmp_path, is_writer=False) == []
    assert not list(tmp_path.iterdir())


def test_every_record_has_its_time(config, tmp_path):
    log = JsonLines(tmp_path / "log.jsonl")
    log.write({"kind": "step", "step": 1, "loss": float("inf")})
    log.close()
    record = json.loads((tmp_path / "log.jsonl").read_text())
    assert record["loss"] is None
    assert abs(record.pop("time") - time.time()) < 60


def test_a_line_that_was_cut_short_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"kind": "step", "step": 1}\n{"kind": "st')
    log = JsonLines(path)
    log.write({"kind": "step", "step": 2})
    log.close()
    assert [record["step"] for record in read_records(path)] == [1, 2]


def test_damaged_lines_are_left_out(tmp_path):
    path = tmp_path / "log.jsonl"
    lines = [b'{"kind": "step", "step": 1}', b"\xff\xfe\x00", b"[" * 100_000, b"3", b'{"step": 4}']
    lines += [b'{"kind": "step", "step": "5"}', b"", b'{"kind": "step", "step": 6}']
    path.write_bytes(b"\n".join(lines))
    assert [record["step"] for record in read_records(path)] == [1, 6]


class FullDisk:
    """A file that takes three bytes and then, until `is_full` is unset, nothing."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("ab", buffering=0)
        self.is_full = False
        self.taken = 0

    def write(self, data: bytes) -> int:
        if self.is_full and self.taken == 3:
            raise OSError(28, "No space left on device")
        chunk = data[:3] if self.is_full else data
        self.taken = len(chunk)
        return self.file.write(chunk)

    def close(self) -> None:
        self.file.close()


def test_what_a_full_disk_does_not_take_is_written_when_it_does(tmp_path, caplog):
    log = JsonLines(tmp_path / "log.jsonl")
    log.file.close()
    log.file = disk = FullDisk(tmp_path / "log.jsonl")  # type: ignore[assignment]
    log.write({"kind": "step", "step": 1})
    disk.is_full = True
    for step in (2, 3):
        log.write({"kind": "step", "step": step})
    assert [r["step"] for r in read_records(tmp_path / "log.jsonl")] == [1]
    disk.is_full = False
    log.write({"kind": "step", "step": 4})
    log.close()
    assert [r["step"] for r in read_records(tmp_path / "log.jsonl")] == [1, 2, 3, 4]
    assert caplog.text.count("No space left on device") == 1


def test_a_log_that_stays_incomplete_says_so(tmp_path, caplog):
    log = JsonLines(tmp_path / "log.jsonl")
    log.file.close()
    log.file = disk = FullDisk(tmp_path / "log.jsonl")  # type: ignore[assignment]
    disk.is_full = True
    log.write({"kind": "step", "step": 1})
    log.close()
    assert "misses its last" in caplog.text


def test_tensorboard_hides_the_steps_that_a_resumed_run_makes_again(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = tmp_path / "events"
    config = replace(RunConfig(), log=LogConfig(tensorboard_dir=str(folder)))
    for begin, end, loss in ((0, 7, 2.0), (5, 9, 1.0)):  # died after step 7, saved after step 5
        sinks = make_sinks(config, tmp_path, True, begin)
        for step in range(begin + 1, end + 1):
            for sink in sinks:
                sink.write({"kind": "step", "step": step, "loss": loss})
        for sink in sinks:
            sink.close()
    events = accumulator.EventAccumulator(str(folder)).Reload().Scalars("step/loss")
    assert [(event.step, event.value) for event in events] == [
        *((step, 2.0) for step in range(1, 6)),
        *((step, 1.0) for step in range(6, 10)),
    ]
