"""How documents become rows of S + 1 tokens: the two packings and the index each of them keeps.

concatenate: the documents, in the shard's order, are one stream of tokens; row k is the S + 1
tokens from S k on. S of them are inputs, each with the next one as its label, so neighbouring rows
share exactly one token (the last label of one is the first input of the next). Long documents
continue in the next row; the tokens after the last full row are left out. Nothing is added.

best_fit: a row is made of whole documents where possible, each with a BOS in front (best_fit.py).

Rows are read in an order drawn anew every epoch, so neither packing shuffles documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megaparcae.data.best_fit import BUFFER_DOCUMENTS, Counts, pack_best_fit
from megaparcae.data.indexed import IndexedDataset
from megaparcae.data.split import DocumentSplit, document_blocks

STREAM_BLOCK = 1 << 16
"""Documents whose borders are looked at together."""
PACKING_VERSION = 1
"""Part of the key of cached indices; goes up when the same options give other rows."""

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Segments:
    """Stretches of the token file that make up the requested rows, in order; all int64 [P]."""

    rows: np.ndarray
    """Which of the requested rows (0 .. n - 1)."""
    columns: np.ndarray
    """Place of the first token in the row (0 .. S)."""
    starts: np.ndarray
    """First token in the .bin."""
    lengths: np.ndarray
    """Number of tokens."""


class RowIndex(Protocol):
    """Where the tokens of every row are."""

    adds_bos: bool
    num_rows: int

    def segments(self, rows: np.ndarray) -> Segments:
        """Segments of the rows with these numbers (int64 [n])."""


class StreamIndex:
    """concatenate: runs of adjacent documents, and where each run lies in the stream.

    run_starts int64 [K] first token in the .bin; run_offsets int64 [K + 1] place in the stream.
    """

    adds_bos = False

    def __init__(self, arrays: Arrays, sequence_length: int) -> None:
        self.run_starts, self.run_offsets = arrays["run_starts"], arrays["run_offsets"]
        self.sequence_length = sequence_length
        self.num_rows = max(0, (int(self.run_offsets[-1]) - 1) // sequence_length)

    def segments(self, rows: np.ndarray) -> Segments:
        """Row k is the stream from S k to S k + S, both included."""
        first_token = np.asarray(rows, np.int64) * self.sequence_length
        first_run = np.searchsorted(self.run_offsets, first_token, "right") - 1
        last_run = (
            np.searchsorted(self.run_offsets, first_token + self.sequence_length, "right") - 1
        )
        which, runs = expand_ranges(first_run, last_run - first_run + 1)
        offsets = self.run_offsets[runs]
        begin = np.maximum(first_token[which], offsets)
        end = np.minimum(first_token[which] + self.sequence_length + 1, self.run_offsets[runs + 1])
        return Segments(
            which, begin - first_token[which], self.run_starts[runs] + begin - offsets, end - begin
        )


class BestFitIndex:
    """best_fit: starts int64 [P] and lengths int32 [P] of the pieces, row_offsets int64 [R + 1]."""

    adds_bos = True

    def __init__(self, arrays: Arrays, sequence_length: int) -> None:
        self.starts, self.lengths = arrays["starts"], arrays["lengths"]
        self.row_offsets = arrays["row_offsets"]
        self.num_rows = len(self.row_offsets) - 1

    def segments(self, rows: np.ndarray) -> Segments:
        """Every piece stands one place behind its BOS."""
        first = self.row_offsets[rows]
        which, pieces = expand_ranges(first, self.row_offsets[np.asarray(rows) + 1] - first)
        lengths = self.lengths[pieces].astype(np.int64)
        ends = np.cumsum(lengths + 1)
        first_of_row = np.searchsorted(which, np.arange(len(first)))
        row_begins = (ends - lengths - 1)[first_of_row]
        return Segments(which, ends - lengths - row_begins[which], self.starts[pieces], lengths)


def open_index(packing: str, arrays: Arrays, sequence_length: int) -> RowIndex:
    """The index of a packing over its arrays."""
    match packing:
        case "best_fit":
            return BestFitIndex(arrays, sequence_length)
        case "concatenate":
            return StreamIndex(arrays, sequence_length)
        case other:
            raise ValueError(f"data.packing={other!r}: choose best_fit or concatenate")


def build_index(
    shard: IndexedDataset,
    split: DocumentSplit,
    *,
    packing: str,
    sequence_length: int,
    reuse: bool,
    counts: Counts,
) -> Iterator[Arrays]:
    """Blocks of the index's arrays, to be put behind each other; fills in `counts`.

    Memory is bounded by a block of documents, whatever the size of the shard.
    """
    match packing:
        case "best_fit":
            documents = document_blocks(shard, split, BUFFER_DOCUMENTS)
            yield from _best_fit_blocks(documents, sequence_length, reuse, counts)
        case "concatenate":
            documents = document_blocks(shard, split, STREAM_BLOCK)
            yield from _stream_blocks(documents, sequence_length, counts)
        case other:
            raise ValueError(f"data.packing={other!r}: choose best_fit or concatenate")


def index_dtypes(packing: str) -> dict[str, str]:
    """Names and dtypes of the arrays of a packing's index."""
    if packing == "best_fit":
        return {"starts": "<i8", "lengths": "<i4", "row_offsets": "<i8"}
    return {"run_starts": "<i8", "run_offsets": "<i8"}


def _best_fit_blocks(
    documents: Iterator[tuple[np.ndarray, np.ndarray]],
    sequence_length: int,
    reuse: bool,
    counts: Counts,
) -> Iterator[Arrays]:
    yield {"row_offsets": np.zeros(1, np.int64)}
    num_pieces = 0
    rows = pack_best_fit(documents, sequence_length, reuse=reuse, counts=counts)
    for starts, lengths, pieces_per_row in rows:
        row_offsets = num_pieces + np.cumsum(pieces_per_row)
        yield {"starts": starts, "lengths": lengths, "row_offsets": row_offsets}
        num_pieces += len(starts)


def _stream_blocks(
    documents: Iterator[tuple[np.ndarray, np.ndarray]], sequence_length: int, counts: Counts
) -> Iterator[Arrays]:
    """Runs of documents that follow each other in the file without a gap; a block ends its run."""
    yield {"run_offsets": np.zeros(1, np.int64)}
    for starts, lengths in documents:
        ends = starts + lengths
        is_first = np.ones(len(starts), bool)
        is_first[1:] = starts[1:] != ends[:-1]
        run_starts, run_ends = starts[is_first], ends[np.roll(is_first, -1)]
        offsets = counts.num_tokens + np.cumsum(run_ends - run_starts)
        yield {"run_starts": run_starts, "run_offsets": offsets}
        counts.num_tokens += int(lengths.sum())
    num_rows = max(0, (counts.num_tokens - 1) // sequence_length)
    counts.dropped_tokens = counts.num_tokens - (num_rows * sequence_length + 1 if num_rows else 0)


def expand_ranges(firsts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(i, value) for the values firsts[i] .. firsts[i] + counts[i] - 1 of every i, in order."""
    which = np.repeat(np.arange(len(firsts)), counts)
    within = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    return which, np.asarray(firsts)[which] + within
