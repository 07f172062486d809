"""Looking at shards, joining and dividing them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from text_fixtures import CharacterTokenizer, command, run, twenty

from megaparcae.data.indexed import HEADER, IndexedDataset
from megaparcae.data.inspect import describe, verify
from megaparcae.data.reshape import merge, split
from megaparcae.errors import UserError


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    path, _ = twenty(tmp_path)
    run(path, tmp_path / "out", append_eod=True)
    return str(tmp_path / "out_text_document")


def change(path: str, dtype: str, offset: int, value: int) -> None:
    numbers = np.memmap(path, dtype=dtype, mode="r+", offset=offset, shape=(1,))
    numbers[0] = value
    numbers.flush()


def without_sidecar(prefix: str) -> IndexedDataset:
    Path(f"{prefix}.json").unlink()
    return IndexedDataset(prefix)


def test_a_whole_shard_has_no_findings(prefix: str) -> None:
    shard = IndexedDataset(prefix)
    assert verify(shard) == []
    text = describe(shard)
    assert "20 documents" in text and "bytes/token" in text and "longest 1,996" in text


def test_a_changed_token_is_found(prefix: str) -> None:
    middle = IndexedDataset(prefix)
    change(f"{prefix}.bin", "u2", 2 * 70, 258)
    assert "another checksum" in verify(middle)[0]
    change(f"{prefix}.bin", "u2", 2 * 70, 259)
    assert "token 70 has id 259" in verify(middle)[0]


def test_a_lost_end_of_text_is_found(prefix: str) -> None:
    shard = IndexedDataset(prefix)
    change(f"{prefix}.bin", "u2", 2 * (int(shard.lengths[0]) - 1), 5)
    assert "document 0 does not end with the end-of-text id 1" in verify(shard)[0]


def test_wrong_pointers_and_borders_are_found(prefix: str) -> None:
    shard = without_sidecar(prefix)
    change(f"{prefix}.idx", "i8", HEADER.size + 20 * 4 + 3 * 8, 12)
    change(f"{prefix}.idx", "i8", HEADER.size + 20 * 12, 1)
    findings = verify(shard)
    assert "document 3 starts at byte 12" in findings[0]
    assert "document borders do not run from 0" in findings[1]


@pytest.mark.parametrize("num_parts", [1, 3, 20])
def test_split_and_merge_restore_the_shard(prefix: str, tmp_path: Path, num_parts: int) -> None:
    parts = split(prefix, str(tmp_path / "part"), num_parts)
    assert all(part.num_documents >= 1 for part in parts)
    whole = merge([part.prefix for part in parts], str(tmp_path / "whole"))
    for suffix in (".bin", ".idx"):
        assert Path(prefix + suffix).read_bytes() == Path(whole.prefix + suffix).read_bytes()
    before = IndexedDataset(prefix).sidecar
    assert before is not None and whole.sidecar is not None
    for name in ("documents", "tokens", "tokenizer", "num_sources"):
        assert whole.sidecar[name] == before[name]
    assert all(verify(part) == [] for part in [*parts, whole])


def test_merge_refuses_what_does_not_belong_together(prefix: str, tmp_path: Path) -> None:
    path, _ = twenty(tmp_path)
    run(path, tmp_path / "wide", dtype="int32")
    with pytest.raises(UserError, match="merge needs one dtype"):
        merge([prefix, str(tmp_path / "wide_text_document")], str(tmp_path / "m"))
    other = CharacterTokenizer()
    other.identity = "another"
    run(path, tmp_path / "other", other)
    with pytest.raises(UserError, match="another tokenizer"):
        merge([prefix, str(tmp_path / "other_text_document")], str(tmp_path / "m"))
    with pytest.raises(UserError, match="already"):
        merge([prefix], prefix)
    with pytest.raises(UserError, match="--parts=21 must be between 1 and 20"):
        split(prefix, str(tmp_path / "p"), 21)


@pytest.mark.slow
def test_the_command_line(prefix: str, tmp_path: Path) -> None:
    assert "20 documents hold" in command("inspect_data.py", "verify", prefix).stdout
    done = command(
        "inspect_data.py", "split", prefix, "--output-prefix", tmp_path / "p", "--parts", 2
    )
    assert done.returncode == 0 and "p_1" in done.stdout
    change(f"{prefix}.bin", "u2", 2 * 70, 258)
    done = command("inspect_data.py", "verify", prefix)
    assert done.returncode == 2 and "is not the file" in done.stderr
    done = command("inspect_data.py", "describe", "nowhere")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
