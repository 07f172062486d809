"""Megatron's own reader and builder (megatron-core, a test dependency) against ours, both ways."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from text_fixtures import CharacterTokenizer, lines, run

from megaparcae.data.indexed import IndexedDataset
from megaparcae.data.writer import IndexedWriter

torch = pytest.importorskip("torch")
megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")

DOCUMENTS = [[1, 2, 3], [], [4], [5, 6, 7, 8, 9]]


def build(prefix: Path, documents: list[list[int]], dtype: type) -> None:
    """A shard by Megatron's builder."""
    builder = megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(torch.tensor(document, dtype=torch.int64), [len(document)])
    builder.finalize(f"{prefix}.idx")


def require_same_files(ours: Path | str, theirs: Path | str) -> None:
    for suffix in (".bin", ".idx"):
        assert Path(f"{ours}{suffix}").read_bytes() == Path(f"{theirs}{suffix}").read_bytes()


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_each_reads_what_the_other_wrote_and_the_files_are_the_same(tmp_path: Path, dtype) -> None:
    with IndexedWriter(tmp_path / "ours", np.dtype(dtype)) as writer:
        for document in DOCUMENTS:
            writer.add(np.array(document, dtype))
        writer.close({"tool": "test"})
    build(tmp_path / "theirs", DOCUMENTS, dtype)
    theirs, ours = megatron.IndexedDataset(f"{tmp_path}/ours"), IndexedDataset(tmp_path / "theirs")
    assert [theirs[i].tolist() for i in range(4)] == DOCUMENTS
    assert [ours.get(i).tolist() for i in range(4)] == DOCUMENTS
    require_same_files(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.parametrize("vocab_size, dtype", [(259, np.uint16), (70_000, np.int32)])
def test_preprocessing_of_several_keys_gives_the_files_of_megatrons_builder(
    tmp_path: Path, vocab_size: int, dtype: type
) -> None:
    records = [{"a": "one", "b": "two"}, {"a": "", "b": "four"}, {"a": "naïve", "b": "x" * 999}]
    tokenizer = CharacterTokenizer(vocab_size=vocab_size)
    run(lines(tmp_path, *records), tmp_path / "ours", tokenizer, keys=("a", "b"), append_eod=True)
    for key in "ab":
        documents = [[*tokenizer.encode(one[key]), 1] for one in records if one[key]]
        build(tmp_path / f"theirs_{key}", documents, dtype)
        require_same_files(tmp_path / f"ours_{key}_document", tmp_path / f"theirs_{key}")
        theirs = megatron.IndexedDataset(f"{tmp_path}/ours_{key}_document")
        assert [theirs[i].tolist() for i in range(len(theirs))] == documents


def test_we_read_megatron_documents_of_several_sentences_or_none(tmp_path: Path) -> None:
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "t.bin"), dtype=np.int32)
    builder.add_document(torch.tensor([1, 2, 3]), [2, 1])
    builder.add_document(torch.tensor([], dtype=torch.int64), [])
    builder.add_document(torch.tensor([4]), [1])
    builder.finalize(str(tmp_path / "t.idx"))
    shard = IndexedDataset(tmp_path / "t")
    assert [shard.get(i).tolist() for i in range(3)] == [[1, 2], [3], [4]]
    assert shard.document_indices.tolist() == [0, 2, 2, 3]


def test_megatron_reads_tokens_of_ours_beyond_two_to_the_32_bytes(tmp_path: Path) -> None:
    tokens = 900_000_000
    writer = IndexedWriter(tmp_path / "big", np.dtype(np.int32))
    writer._lengths.write(np.full(3, tokens, np.int32))  # as if three such documents were added
    writer.num_documents = 3
    writer.close()
    with (tmp_path / "big.bin").open("r+b") as file:
        file.truncate(3 * tokens * 4)  # sparse
        file.seek(-16, 2)
        file.write(np.array([1, 2, 3, 4], np.int32).tobytes())
    for shard in (megatron.IndexedDataset(f"{tmp_path}/big"), IndexedDataset(tmp_path / "big")):
        assert shard.get(2, tokens - 4, 4).tolist() == [1, 2, 3, 4]
