"""Whole runs with wandb absent, offline, failing in the middle: exit code 0, a complete log."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import struct
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos import OPTIONS, train_rank, write_shard

from harness import start_ranks
from megaparcae.config.load import build_config, dump_config
from megaparcae.log import read_records

NUM_STEPS = 8


def train(config: str, console: str, how: str) -> None:
    """A run on this rank, with wandb in a certain state."""
    sys.modules.pop("wandb", None)
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        os.environ.pop(name, None)
    os.environ["HOME"] = str(Path(config).parent)  # no key there
    match how:
        case "absent":
            sys.modules["wandb"] = None  # type: ignore[assignment]
        case "fails in the middle" | "cannot start":
            sys.modules["wandb"] = failing_wandb(how)
        case "dies after step 7":
            die_after(7)
    train_rank(config, console)


def failing_wandb(how: str) -> types.ModuleType:
    calls: list[object] = []

    def log(_record: object) -> None:
        calls.append(_record)
        if len(calls) > 3:
            raise ConnectionError("no route to host")

    def init(**_options: object) -> object:
        if how == "cannot start":
            raise RuntimeError("api_key not configured")
        return types.SimpleNamespace(log=log, define_metric=lambda *_, **__: None, finish=finish)

    def finish() -> None:
        raise RuntimeError("already gone")

    module = types.ModuleType("wandb")
    module.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    module.init = init  # type: ignore[attr-defined]
    return module


def die_after(step: int) -> None:
    from megaparcae.train.trainer import Trainer

    report = Trainer.report

    def dying(self: Trainer, record: dict[str, Any]) -> None:
        report(self, record)
        if record["step"] == step:
            os.kill(os.getpid(), signal.SIGKILL)

    Trainer.report = dying  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("shard") / "shard"
    write_shard(prefix)
    return prefix


def run(folder: Path, shard: Path, how: str) -> tuple[int | None, str]:
    """Exit code, and what the run said."""
    tree = {
        **OPTIONS,
        "data": {**OPTIONS["data"], "train": str(shard)},
        "train": {**OPTIONS["train"], "num_steps": NUM_STEPS},
        "checkpoint": {"interval": 5, "dir": str(folder / "run"), "asynchronous": False},
        "log": {"wandb_project": "test", "health_interval": 0},
    }
    config, console = folder / "config.yaml", folder / "console.txt"
    config.write_text(dump_config(build_config(tree, where="test")))
    console.unlink(missing_ok=True)
    arguments = (str(config), str(console), how)
    processes, _ = start_ranks(train, 1, *arguments, scratch=str(folder), init=False)
    processes[0].join(60)
    return processes[0].exitcode, console.read_text()


def steps(folder: Path) -> list[int]:
    return [r["step"] for r in read_records(folder / "run" / "log.jsonl") if r["kind"] == "step"]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("absent", "wandb is not installed: pip install wandb; going on without it"),
        ("cannot start", "wandb could not start (api_key not configured) and is off"),
        ("fails in the middle", "wandb failed (no route to host) and is off from here"),
    ],
)
def test_the_run_goes_on_without_wandb(tmp_path, shard, how, message):
    code, said = run(tmp_path, shard, how)
    assert code == 0, said
    assert said.count(message) == 1 and "Traceback" not in said, said
    assert steps(tmp_path) == list(range(1, NUM_STEPS + 1))


def test_offline_no_point_is_lost_by_a_crash_after_the_last_save(tmp_path, shard):
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("wandb is not installed")
    code, said = run(tmp_path, shard, "dies after step 7")
    assert code == -signal.SIGKILL, said
    code, said = run(tmp_path, shard, "offline")
    assert code == 0, said
    assert "wandb sync" in said, said
    assert steps(tmp_path) == [*range(1, 8), *range(6, NUM_STEPS + 1)]
    files = (tmp_path / "run").glob("wandb/offline-run-*/*.wandb")
    *died, resumed = sorted(list(logged_steps(path)) for path in files)
    assert resumed == list(range(6, NUM_STEPS + 1)), "none is dropped for a step seen before"
    for first in died:  # there is none when the run died before wandb had started
        assert first == list(range(1, len(first) + 1)), "what had arrived when the run died"


def logged_steps(path: Path) -> Iterator[int]:
    """Steps of the step records in a wandb file: a LevelDB log of protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, payload = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:  # a block's rest is too short for a header
            position += 32768 - position % 32768
            continue
        length, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        payload += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or its last piece
            record = Record.FromString(payload)
            payload = b""
            figures = {"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
            if "step/loss" in figures:
                yield json.loads(figures["step"])
