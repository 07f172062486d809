"""Packing indices on disk: built once, never used for other data or settings, safe to share."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_shards import counting_documents, counting_shard, write_shard

from megaparcae.data import index_cache
from megaparcae.data.index_cache import IndexSpec, cached_index
from megaparcae.data.indexed import IndexedDataset
from megaparcae.data.split import DocumentSplit
from megaparcae.errors import UserError

SPEC = IndexSpec("best_fit", 16, True, DocumentSplit())
LENGTHS = np.random.default_rng(0).integers(1, 40, 200).tolist()


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """What the logger says, also when another test has set it up for a command line."""
    monkeypatch.setattr(logging.getLogger("megaparcae"), "propagate", True)
    caplog.set_level(logging.INFO, "megaparcae")
    return caplog


def folders(base: Path) -> list[str]:
    names = (path.name for path in base.glob("*.index-*"))
    return sorted(name for name in names if not name.startswith("."))


def test_the_second_call_reads_what_the_first_built(tmp_path: Path, heard) -> None:
    shard = counting_shard(tmp_path / "s", LENGTHS)
    first, counts = cached_index(shard, SPEC)
    assert "none yet; building" in heard.text
    heard.clear()
    second, counts_again = cached_index(shard, SPEC)
    assert heard.text == ""
    rows = np.arange(first.num_rows)
    assert (first.segments(rows).starts == second.segments(rows).starts).all()
    assert counts == counts_again
    assert len(folders(tmp_path)) == 1


@pytest.mark.parametrize(
    "change, words",
    [
        ({"sequence_length": 64}, "sequence_length was 16, is 64"),
        ({"packing": "concatenate"}, "packing was best_fit, is concatenate"),
        ({"reuse": False}, "cropped_tail was reuse, is drop"),
        ({"tokenizer": "other"}, "tokenizer was None, is other"),
    ],
)
def test_changed_settings_build_anew_and_say_what_changed(
    tmp_path: Path, heard, change: dict, words: str
) -> None:
    shard = counting_shard(tmp_path / "s", LENGTHS)
    cached_index(shard, SPEC)
    heard.clear()
    cached_index(shard, replace(SPEC, **change))
    assert words in heard.text
    assert len(folders(tmp_path)) == 2


def test_another_seed_or_share_of_the_split_builds_anew(tmp_path: Path) -> None:
    shard = counting_shard(tmp_path / "s", LENGTHS)
    for split in (
        DocumentSplit("train", 0.1, 1),
        DocumentSplit("train", 0.1, 2),
        DocumentSplit("train", 0.2, 1),
        DocumentSplit("validation", 0.1, 1),
    ):
        cached_index(shard, replace(SPEC, split=split))
    assert len(folders(tmp_path)) == 4


def test_a_document_edited_in_place_builds_anew_and_says_so(tmp_path: Path, heard) -> None:
    shard = counting_shard(tmp_path / "s", LENGTHS)
    cached_index(shard, SPEC)
    with (tmp_path / "s.bin").open("r+b") as file:
        file.seek(400)
        file.write(b"\1\2\3\4")
    later = time.time() + 5
    os.utime(tmp_path / "s.bin", (later, later))
    heard.clear()
    cached_index(IndexedDataset(tmp_path / "s"), SPEC)
    assert ".bin modified was" in heard.text
    assert len(folders(tmp_path)) == 2


def test_an_edit_that_hides_its_time_is_found_by_its_content(tmp_path: Path) -> None:
    shard = counting_shard(tmp_path / "s", LENGTHS)
    cached_index(shard, SPEC)
    before = (tmp_path / "s.bin").stat()
    (tmp_path / "s.bin").write_bytes(bytes(before.st_size))
    os.utime(tmp_path / "s.bin", ns=(before.st_atime_ns, before.st_mtime_ns))
    cached_index(IndexedDataset(tmp_path / "s"), SPEC)
    assert len(folders(tmp_path)) == 2


def test_shards_of_one_name_share_a_cache_folder_without_mixing(tmp_path: Path) -> None:
    shards = []
    for name, lengths in (("a", [50, 60]), ("b", [9] * 30)):
        (tmp_path / name).mkdir()
        shards.append(counting_shard(tmp_path / name / "s", lengths))
    indices = [cached_index(shard, SPEC, str(tmp_path / "cache"))[0] for shard in shards]
    assert indices[0].num_rows != indices[1].num_rows
    assert len(folders(tmp_path / "cache")) == 2
    assert not folders(tmp_path / "a")


@pytest.mark.parametrize("damage", ["truncate", "remove", "meta"])
def test_a_damaged_index_is_built_again(tmp_path: Path, heard, damage: str) -> None:
    shard = counting_shard(tmp_path / "s", LENGTHS)
    expected, _ = cached_index(shard, SPEC)
    folder = tmp_path / folders(tmp_path)[0]
    match damage:
        case "truncate":
            os.truncate(folder / "starts.npy", 200)
        case "remove":
            (folder / "lengths.npy").unlink()
        case "meta":
            (folder / "meta.json").write_text('{"key": ')
    index, _ = cached_index(shard, SPEC)
    assert "damaged" in heard.text
    assert index.num_rows == expected.num_rows


def test_an_unwritable_folder_of_the_shard_sends_the_index_elsewhere_with_a_message(
    tmp_path: Path, heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = counting_shard(tmp_path / "s", LENGTHS)
    can_write = index_cache._can_write
    monkeypatch.setattr(
        index_cache, "_can_write", lambda base: base != tmp_path and can_write(base)
    )
    monkeypatch.setattr(index_cache.tempfile, "tempdir", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    index, _ = cached_index(shard, SPEC)
    assert index.num_rows > 0
    assert f"{tmp_path} cannot be written" in heard.text
    assert not folders(tmp_path)


def test_a_finished_index_is_used_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = counting_shard(tmp_path / "s", LENGTHS)
    cached_index(shard, SPEC)
    monkeypatch.setattr(index_cache, "_can_write", lambda base: False)
    assert cached_index(shard, SPEC)[0].num_rows > 0


def test_a_cache_dir_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    shard = counting_shard(tmp_path / "s", LENGTHS)
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match=r"data.cache_dir=.*file"):
        cached_index(shard, SPEC, str(tmp_path / "file"))


CHILD = """
import sys, time
from pathlib import Path
from megaparcae.log import setup_logging
from megaparcae.data import index_cache
from megaparcae.data.index_cache import IndexSpec, cached_index
from megaparcae.data.indexed import IndexedDataset
from megaparcae.data.split import DocumentSplit
prefix, cache, delay, built = sys.argv[1], sys.argv[2], float(sys.argv[3]), Path(sys.argv[4])
setup_logging(0)
index_cache.MESSAGE_AFTER_S = 0.2
plain = index_cache.build_index
def slow(*args, **options):
    built.touch()
    yield from plain(*args, **options)
    time.sleep(delay)
index_cache.build_index = slow
spec = IndexSpec("best_fit", 16, True, DocumentSplit())
index, counts = cached_index(IndexedDataset(prefix), spec, cache)
print(index.num_rows, counts.num_tokens)
"""


def start(prefix: str, cache: Path, delay: float, built: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", CHILD, prefix, str(cache), str(delay), str(built)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    )


def test_one_process_builds_while_the_other_waits_and_says_so(tmp_path: Path) -> None:
    prefix = write_shard(tmp_path / "s", counting_documents(LENGTHS), "int32")
    first = start(prefix, tmp_path / "cache", 3.0, tmp_path / "first")
    while not (tmp_path / "first").exists():
        assert first.poll() is None, first.communicate()
        time.sleep(0.01)
    second = start(prefix, tmp_path / "cache", 1.0, tmp_path / "second")
    outputs = [process.communicate(timeout=30) for process in (first, second)]
    assert first.returncode == second.returncode == 0, outputs
    assert outputs[0][0] == outputs[1][0] != ""
    assert not (tmp_path / "second").exists(), "both built"
    assert "waiting for another process" in outputs[1][1]


def test_processes_with_caches_of_their_own_both_work(tmp_path: Path) -> None:
    prefix = write_shard(tmp_path / "s", counting_documents(LENGTHS), "int32")
    ranks = [start(prefix, tmp_path / f"c{i}", 0.0, tmp_path / f"built{i}") for i in range(2)]
    outputs = [process.communicate(timeout=30) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] != ""
    assert all(len(folders(tmp_path / f"c{i}")) == 1 for i in range(2))


def test_a_killed_builder_leaves_no_lock_and_no_half_index(tmp_path: Path) -> None:
    prefix = write_shard(tmp_path / "s", counting_documents(LENGTHS), "int32")
    first = start(prefix, tmp_path / "cache", 60.0, tmp_path / "first")
    while not (tmp_path / "first").exists():
        time.sleep(0.01)
    first.kill()
    first.communicate()
    assert not folders(tmp_path / "cache")
    index, _ = cached_index(IndexedDataset(prefix), SPEC, str(tmp_path / "cache"))
    assert index.num_rows > 0


def test_builders_that_do_not_see_each_others_lock_do_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError("no locks on this file system")

    shard = counting_shard(tmp_path / "s", LENGTHS)
    monkeypatch.setattr(index_cache.fcntl, "flock", no_locks)
    plain = index_cache.build_index
    inner: list[int] = []

    def overtaken(*args, **options):
        yield from plain(*args, **options)
        if not inner:  # another builder begins later and is done first
            inner.append(0)
            inner[0] = cached_index(shard, SPEC)[0].num_rows

    monkeypatch.setattr(index_cache, "build_index", overtaken)
    outer, _ = cached_index(shard, SPEC)
    assert outer.num_rows == inner[0] > 0
    assert len(folders(tmp_path)) == 1
    assert not list(tmp_path.glob(".*.index-*")), "a temporary folder was left behind"
