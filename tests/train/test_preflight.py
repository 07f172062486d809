"""Machines that disagree or are unfit are found before training, by name."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from harness import run_ranks
from megaparcae.config.load import build_config
from megaparcae.config.schema import RunConfig
from megaparcae.data.indexed import IndexedDataset
from megaparcae.data.writer import IndexedWriter
from megaparcae.engine.distributed import MeetingError, Process, init_distributed, set_deterministic
from megaparcae.errors import UserError
from megaparcae.train import preflight as module
from megaparcae.train.preflight import clock_skew, local_facts, preflight
from megaparcae.train.safety import TrainingError

MODEL = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "vocab_size": 100}


def config(folder: Path) -> RunConfig:
    return build_config({"model": MODEL, "checkpoint": {"dir": str(folder)}}, where="test")


def check(folder: str, fault: str | None) -> str:
    """What a rank says of two machines, of which the second has a fault."""
    rank = dist.get_rank()
    module.socket.gethostname = lambda: f"node-{rank}"
    module.DISK_BYTES, module.LARGE, module.SIZE = 1 << 20, 1 << 13, 64
    if rank == 1:
        break_this_rank(fault)
    process = Process(rank, dist.get_world_size(), torch.device("cpu"))
    try:
        preflight(config(Path(folder)), process, [])
    except (UserError, TrainingError) as error:
        return f"{type(error).__name__}: {error}"
    return "fit"


def break_this_rank(fault: str | None) -> None:
    match fault:
        case "version":
            version = module.version
            module.version = lambda name: "2.0" if name == "torch" else version(name)
        case "option":
            module.dump_config = lambda _: "another"
        case "sum":
            real = dist.all_reduce
            dist.all_reduce = lambda values, **group: (real(values, **group), values[:1].add_(1))
        case "product":
            checksum = module.checksum
            module.checksum = lambda tensor: checksum(tensor) + 1
        case "folder":
            module.Path = lambda path: Path(path) / "a folder of its own"


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (None, "fit"),
        ("version", f"UserError: torch differs: rank 0 (node-0) has {torch.__version__}, rank 1"),
        ("option", "UserError: configuration differs: rank 0 (node-0) has"),
        ("sum", "TrainingError: rank 1 (node-1) got 1 wrong ones of 1 sums"),
        ("product", "TrainingError: rank 1 (node-1) computes another matrix product than rank 0"),
        ("folder", "UserError: checkpoint.dir="),
    ],
)
def test_a_fault_of_one_machine_is_named_on_all(fault, says, tmp_path):
    first, second = run_ranks(check, 2, str(tmp_path), fault, timeout=30)
    assert first.startswith(says) and second.startswith(says), (first, second)
    if fault == "folder":
        assert "is not the same folder on node-1 and on node-0" in first
    assert not list(tmp_path.rglob(".tmp*"))


def write_shard(prefix: Path, tokens: list[int]) -> IndexedDataset:
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add(np.array(tokens))
        writer.close()
    return IndexedDataset(prefix)


def test_a_shard_with_other_content_under_the_same_path_is_told_apart(tmp_path):
    facts = []
    for tokens in ([1, 2, 3], [1, 2, 4]):
        one = SimpleNamespace(shard=write_shard(tmp_path / "s", tokens))
        facts.append(local_facts(config(tmp_path), [SimpleNamespace(sets=[one])]).equal)
    assert module.first_difference(*facts)[0] == str(tmp_path / "s.bin")
    assert module.first_difference(facts[0], facts[0]) is None


def test_clocks_far_apart_are_worth_a_word(monkeypatch, caplog):
    monkeypatch.setattr(module, "gather", lambda mine: [mine, mine + 90.0])
    with caplog.at_level(logging.WARNING, "megaparcae"):
        assert clock_skew(["a", "b"]) == pytest.approx(90)
    assert "the clock of b is 90.0 s ahead of that of a" in caplog.text


def test_ranks_that_do_not_meet_say_so_in_one_sentence(monkeypatch):
    import deepspeed

    def lost(*_: object, **__: object) -> None:
        raise torch.distributed.DistNetworkError("The client socket has failed.\nlong story")

    monkeypatch.setattr(deepspeed, "init_distributed", lost)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "node-0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(
        MeetingError, match=r"rank 3 did not meet the other 3 at node-0:29500 \(The"
    ):
        init_distributed("cpu")


def test_deterministic_mode_is_on_for_every_library(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        set_deterministic(True)
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert not torch.backends.cudnn.benchmark
    finally:
        set_deterministic(False)
    assert not torch.are_deterministic_algorithms_enabled()
