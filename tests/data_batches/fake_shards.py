"""Shards for tests, written byte by byte: not by the writer that belongs to the reader."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megaparcae.data.indexed import IndexedDataset

CODES = {"uint16": 8, "int32": 4}


def write_shard(
    prefix: Path, documents: Sequence[Sequence[int] | np.ndarray], dtype: str = "uint16"
) -> str:
    """`{prefix}.bin/.idx` with these documents; returns the prefix."""
    lengths = np.array([len(document) for document in documents], np.int32)
    tokens = np.concatenate([np.asarray(document, dtype) for document in documents])
    write_index(prefix, lengths, dtype)
    Path(f"{prefix}.bin").write_bytes(tokens.astype(dtype).tobytes())
    return str(prefix)


def write_index(prefix: Path, lengths: np.ndarray, dtype: str = "uint16") -> None:
    """The .idx alone."""
    pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * np.dtype(dtype).itemsize
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, CODES[dtype], len(lengths), len(lengths) + 1)
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(header + lengths.astype("<i4").tobytes() + pointers.astype("<i8").tobytes())
        file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())


def counting_documents(lengths: Sequence[int]) -> list[np.ndarray]:
    """Documents whose tokens, joined, are 0, 1, 2, ..."""
    ends = np.cumsum(lengths)
    return [np.arange(end - length, end) for length, end in zip(lengths, ends, strict=True)]


def counting_shard(prefix: Path, lengths: Sequence[int], dtype: str = "int32") -> IndexedDataset:
    """A shard of counting_documents, opened."""
    return IndexedDataset(write_shard(prefix, counting_documents(lengths), dtype))
