"""Shards: what is written is read, by us and by Megatron's own reader; damage is named."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from megaparcae.data.indexed import HEADER, IndexedDataset, ShardError, best_dtype
from megaparcae.data.writer import IndexedWriter
from megaparcae.errors import UserError

DOCUMENTS = [[1, 2, 3], [], [4], [5, 6, 7, 8, 9]]


def write(prefix: Path, documents: list[list[int]] = DOCUMENTS, dtype: str = "uint16") -> str:
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            writer.add(np.array(document, np.int64))
        writer.close({"tool": "test"})
    return str(prefix)


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_written_documents_are_read_back(tmp_path: Path, dtype: str) -> None:
    shard = IndexedDataset(write(tmp_path / "a.b", dtype=dtype))
    assert [shard.get(i).tolist() for i in range(4)] == DOCUMENTS
    assert shard.get(3, 1, 2).tolist() == [6, 7]
    assert (shard.num_documents, shard.num_tokens, shard.dtype) == (4, 9, np.dtype(dtype))
    assert shard.document_indices.tolist() == [0, 1, 2, 3, 4]
    assert shard.sidecar is not None and shard.sidecar["tool"] == "test"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.b.bin", "a.b.idx", "a.b.json"]
    with pytest.raises(IndexError):
        shard.get(3, 1, 5)


def test_a_pickled_shard_opens_its_files_again(tmp_path: Path) -> None:
    shard = pickle.loads(pickle.dumps(IndexedDataset(write(tmp_path / "a"))))
    assert shard.get(0).tolist() == [1, 2, 3]


def test_a_shard_without_documents_opens(tmp_path: Path) -> None:
    shard = IndexedDataset(write(tmp_path / "a", []))
    assert (shard.num_documents, shard.num_tokens) == (0, 0)


def test_an_exception_keeps_the_old_shard_and_leaves_nothing_else(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a")
    before = sorted((p.name, p.read_bytes()) for p in tmp_path.iterdir())
    with pytest.raises(RuntimeError), IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        writer.add(np.array([1]))
        raise RuntimeError
    assert sorted((p.name, p.read_bytes()) for p in tmp_path.iterdir()) == before


def test_the_dtype_follows_the_vocabulary_as_megatron_does() -> None:
    sizes = [300, 65499, 65500, 65536, 70000]
    assert [best_dtype(size).name for size in sizes] == ["uint16"] * 2 + ["int32"] * 3


def test_an_id_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    ids = [65535, 65536, 69999]
    assert IndexedDataset(write(tmp_path / "a", [ids], "int32")).get(0).tolist() == ids
    assert IndexedDataset(write(tmp_path / "b", [ids[:1]], "uint16")).get(0).tolist() == ids[:1]
    with pytest.raises(UserError, match="cannot hold token id 69999"):
        write(tmp_path / "c", [ids], "uint16")
    with pytest.raises(UserError, match="cannot hold token id -1"):
        write(tmp_path / "c", [[3, -1]], "uint16")
    assert not list(tmp_path.glob("c*"))


def test_an_unwritable_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write in folder .*file/x"):
        IndexedWriter(tmp_path / "file" / "x" / "shard", np.dtype(np.uint16))


def test_pointers_beyond_four_gigabytes(tmp_path: Path) -> None:
    tokens, prefix = 900_000_000, tmp_path / "big"
    writer = IndexedWriter(prefix, np.dtype(np.int32))
    writer.close()
    lengths = np.full(3, tokens, np.int32)
    pointers = np.arange(3, dtype=np.int64) * tokens * 4
    index = (
        HEADER.pack(b"MMIDIDX\x00\x00", 1, 4, 3, 4)
        + lengths.tobytes()
        + pointers.tobytes()
        + np.arange(4, dtype=np.int64).tobytes()
    )
    Path(f"{prefix}.idx").write_bytes(index)
    with Path(f"{prefix}.bin").open("r+b") as file:
        file.truncate(3 * tokens * 4)
        file.seek(-16, 2)
        file.write(np.array([1, 2, 3, 4], np.int32).tobytes())
    shard = IndexedDataset(prefix)
    assert shard.pointers.tolist() == [0, 3_600_000_000, 7_200_000_000]
    assert shard.get(2, tokens - 4, 4).tolist() == [1, 2, 3, 4]


def test_the_index_of_huge_documents_is_computed_in_64_bits(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "big", np.dtype(np.int32))
    writer._lengths.write(np.full(3, 900_000_000, np.int32))
    writer.num_documents = 3
    writer.close()
    pointers = np.fromfile(tmp_path / "big.idx", np.int64, count=3, offset=HEADER.size + 12)
    assert pointers.tolist() == [0, 3_600_000_000, 7_200_000_000]


def damage_empty(prefix: str) -> None:
    Path(f"{prefix}.idx").write_bytes(b"")


def damage_cut(prefix: str) -> None:
    Path(f"{prefix}.idx").write_bytes(Path(f"{prefix}.idx").read_bytes()[:40])


def damage_version(prefix: str) -> None:
    data = bytearray(Path(f"{prefix}.idx").read_bytes())
    data[9:17] = struct.pack("<Q", 2)
    Path(f"{prefix}.idx").write_bytes(data)


def damage_bin(prefix: str) -> None:
    data = Path(f"{prefix}.bin").read_bytes()
    Path(f"{prefix}.bin").write_bytes(data[:-2])


def damage_mixed(prefix: str) -> None:
    other = write(Path(f"{prefix}-other"), [[1] * 50, [2]])
    Path(f"{other}.bin").replace(f"{prefix}.bin")


def damage_mixed_same_size(prefix: str) -> None:
    other = write(Path(f"{prefix}-other"), [[9, 9, 9], [], [9], [9] * 5])
    Path(f"{other}.bin").replace(f"{prefix}.bin")


def damage_magic(prefix: str) -> None:
    Path(f"{prefix}.idx").write_bytes(b"PK\x03\x04" + bytes(100))


@pytest.mark.parametrize(
    "damage, message",
    [
        (damage_empty, r"a\.idx is empty \(0 bytes\)"),
        (damage_cut, r"a\.idx has 40 bytes but 4 documents take 122: the index is cut short"),
        (damage_version, r"a\.idx says version 2, this reader knows version 1"),
        (damage_bin, r"a\.bin has 16 bytes but .*a\.idx ends at byte 18: the \.bin is cut short"),
        (damage_mixed, r"a\.bin has 102 bytes but .* describes 18: .* different runs"),
        (damage_mixed_same_size, r"is not the file that .*a\.json describes"),
        (damage_magic, r"another kind of file"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage, message: str) -> None:
    prefix = write(tmp_path / "a")
    damage(prefix)
    with pytest.raises(ShardError, match=message):
        IndexedDataset(prefix)


def test_a_wrong_prefix_is_named_with_what_lies_there(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a")
    with pytest.raises(ShardError, match="give the prefix without the ending"):
        IndexedDataset(prefix + ".bin")
    with pytest.raises(ShardError, match=r"b\.idx does not exist; .*: a\)"):
        IndexedDataset(tmp_path / "b")


def test_a_shard_without_a_sidecar_is_accepted(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a")
    Path(f"{prefix}.json").unlink()
    assert IndexedDataset(prefix).sidecar is None


def test_a_whole_shard_is_appended_with_its_document_borders(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a"), write(tmp_path / "b", [[7], [8, 8]])
    with IndexedWriter(tmp_path / "c", np.dtype(np.uint16)) as writer:
        writer.add(np.array([0]))
        writer.add_shard(IndexedDataset(first))
        writer.add_shard(IndexedDataset(second))
        writer.add(np.array([3]))
        writer.close()
    joined = IndexedDataset(tmp_path / "c")
    assert [joined.get(i).tolist() for i in range(8)] == [[0], *DOCUMENTS, [7], [8, 8], [3]]
    assert joined.document_indices.tolist() == list(range(9))
