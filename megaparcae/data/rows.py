"""From segments of the token file to arrays of tokens and of document numbers."""

from __future__ import annotations

import numpy as np

from megaparcae.data.indexed import IndexedDataset
from megaparcae.data.packing import RowIndex, Segments, expand_ranges

# n rows, S positions, P segments


def read_tokens(
    file: memoryview, segments: Segments, width: int, dtype: np.dtype, bos_id: int | None
) -> np.ndarray:
    """Rows [n, width] in the file's dtype: the segments, behind a BOS each if bos_id is given.

    `file` is the bytes of the .bin. Joining bytes takes half the time of assigning array slices.
    """
    begins = segments.starts * dtype.itemsize
    ends = begins + segments.lengths * dtype.itemsize
    stretches = [file[i:j] for i, j in zip(begins.tolist(), ends.tolist(), strict=True)]
    if bos_id is None:
        joined = b"".join(stretches)
    else:
        bos = dtype.type(bos_id).tobytes()
        joined = bos.join([b"", *stretches])
    return np.frombuffer(joined, dtype).reshape(-1, width)


def document_ids(
    shard: IndexedDataset, index: RowIndex, segments: Segments, num_rows: int, sequence_length: int
) -> np.ndarray:
    """int32 [n, S]: 0 for the first document of the row, 1 for the second, and so on.

    A BOS belongs to the document behind it, an EOD to the one before it. Two pieces of one document
    in the same row count as two.
    """
    borders = np.zeros((num_rows, sequence_length + 1), np.int32)
    if index.adds_bos:
        borders[segments.rows, segments.columns - 1] = 1
    else:
        rows, columns = _document_borders(shard, segments)
        borders[rows, columns] = 1
    borders[:, 0] = 0
    return np.cumsum(borders[:, :-1], axis=1, dtype=np.int32)


def _document_borders(shard: IndexedDataset, segments: Segments) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) where a document begins inside a segment, or a segment begins.

    A segment that does not open its row is the begin of a run, so of a document.
    """
    first = documents_of(shard, segments.starts)
    last = documents_of(shard, segments.starts + segments.lengths - 1)
    which, documents = expand_ranges(first + 1, last - first)
    begins = shard.pointers[documents] // shard.dtype.itemsize - segments.starts[which]
    rows = np.concatenate([segments.rows, segments.rows[which]])
    return rows, np.concatenate([segments.columns, segments.columns[which] + begins])


def documents_of(shard: IndexedDataset, tokens: np.ndarray) -> np.ndarray:
    """Number of the document that each token of the .bin belongs to, int64.

    The pointers lie unaligned in the .idx, where numpy's own search would copy all of them first.
    """
    targets = np.asarray(tokens, np.int64) * shard.dtype.itemsize
    low = np.zeros(len(targets), np.int64)  # pointers[low] <= target < pointers[high]
    high = np.full(len(targets), shard.num_documents, np.int64)
    for _ in range(shard.num_documents.bit_length()):
        middle = (low + high) // 2
        not_above = shard.pointers[middle] <= targets
        low = np.where(not_above, middle, low)
        high = np.where(not_above, high, middle)
    return low
