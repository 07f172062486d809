"""Records go to log.jsonl whatever becomes of wandb and TensorBoard."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest

from megaparcae.config.schema import LogConfig, RunConfig
from megaparcae.train.metrics import make_sinks


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
    assert wandb.run.logged[0]["loss/1"] == 2.0
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


def test_wandb_that_is_not_installed_is_named(config, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert len(write_five(config, tmp_path)) == 5
    assert "pip install wandb" in caplog.text


def test_only_the_first_rank_writes(config, tmp_path):
    assert make_sinks(config, tmp_path, is_writer=False) == []
    assert not list(tmp_path.iterdir())
