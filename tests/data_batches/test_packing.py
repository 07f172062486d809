"""Rows from documents: both packings against plain references."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fake_shards import counting_shard, write_index

from megaparcae.data.best_fit import Counts, pack_best_fit
from megaparcae.data.indexed import IndexedDataset
from megaparcae.data.packing import RowIndex, build_index, index_dtypes, open_index
from megaparcae.data.rows import document_ids, documents_of, read_tokens
from megaparcae.data.split import DocumentSplit

BOS = 60000
ALL = DocumentSplit()


def build(
    shard: IndexedDataset,
    packing: str,
    sequence_length: int,
    *,
    reuse: bool = True,
    split: DocumentSplit = ALL,
) -> tuple[RowIndex, Counts]:
    counts = Counts()
    blocks = list(
        build_index(
            shard,
            split,
            packing=packing,
            sequence_length=sequence_length,
            reuse=reuse,
            counts=counts,
        )
    )
    arrays = {
        name: np.concatenate(
            [block[name] for block in blocks if name in block] + [np.zeros(0, dtype)]
        )
        for name, dtype in index_dtypes(packing).items()
    }
    arrays = {name: arrays[name].astype(dtype) for name, dtype in index_dtypes(packing).items()}
    return open_index(packing, arrays, sequence_length), counts


def read(
    shard: IndexedDataset, index: RowIndex, sequence_length: int, rows: list[int] | None = None
) -> np.ndarray:
    numbers = np.arange(index.num_rows) if rows is None else np.array(rows)
    file = memoryview(shard.tokens.view(np.uint8))
    bos = BOS if index.adds_bos else None
    return read_tokens(file, index.segments(numbers), sequence_length + 1, shard.dtype, bos)


def reference_rows(lengths: list[int], sequence_length: int, reuse: bool) -> list[list[tuple]]:
    """Best-fit, one row at a time: (first token, tokens) of each piece; (0, 0) is a lone BOS."""
    starts = np.cumsum([0] + lengths)
    pool = []
    for start, length in zip(starts.tolist(), lengths, strict=False):
        cut = range(0, length, sequence_length) if reuse else range(min(length, 1))
        pool += [(start + at, min(length - at, sequence_length)) for at in cut]
    rows: list[list[tuple]] = []
    while True:  # rounds
        tails, made = [], 0
        while True:
            row, gap, rest = [], sequence_length + 1, list(pool)
            while gap > 1 and (fitting := [p for p in rest if p[1] + 1 <= gap]):
                best = max(fitting, key=lambda p: p[1])  # the first of the longest
                rest.remove(best)
                row.append(best)
                gap -= best[1] + 1
            tail = None
            if gap > 1:
                if not rest:
                    break
                start, length = min(rest, key=lambda p: p[1])
                rest.remove((start, length))
                row.append((start, gap - 1))
                tail = (start + gap - 1, length - gap + 1)
            elif gap == 1:
                row.append((0, 0))
            pool, made = rest, made + 1
            rows.append(row)
            if tail and reuse:
                tails.append(tail)
            if not pool:
                break
        pool += tails
        if not made or not pool:
            return rows


def test_neighbouring_stream_rows_share_exactly_one_token(tmp_path: Path) -> None:
    shard = counting_shard(tmp_path / "s", [7, 30, 0, 13, 50])  # tokens 0 .. 99
    rows = read(shard, build(shard, "concatenate", 8)[0], 8)
    for k, row in enumerate(rows):
        assert row.tolist() == list(range(8 * k, 8 * k + 9))
    assert len(rows) == 12  # 97 tokens; 98 and 99 fill no row


def test_long_and_short_documents_together_are_the_token_stream(tmp_path: Path) -> None:
    shard = counting_shard(tmp_path / "s", [100] + [3] * 10)
    index, counts = build(shard, "concatenate", 32)
    rows = read(shard, index, 32)
    stream = np.concatenate([rows[:1, 0], rows[:, 1:].ravel()])
    assert (stream == np.arange(len(stream))).all()
    assert counts.num_tokens == 130
    assert counts.dropped_tokens == 130 - len(stream) == 1


def test_short_documents_many_times_over_equal_the_plain_builder(tmp_path: Path) -> None:
    shard = counting_shard(tmp_path / "s", [5, 5])
    index, _ = build(shard, "concatenate", 4)
    stream = np.arange(10)
    rows = read(shard, index, 4, [0, 1] * 100_000)
    expected = [stream[0:5], stream[4:9]]
    assert (rows.reshape(-1, 2, 5) == np.array(expected)).all()


def test_a_held_out_document_leaves_the_stream_without_a_gap(tmp_path: Path) -> None:
    shard = counting_shard(tmp_path / "s", [4] * 50)
    split = DocumentSplit("train", 0.3, seed=3)
    kept = np.flatnonzero(split.mask(0, 50))
    assert 20 < len(kept) < 50
    expected = np.concatenate([np.arange(4 * d, 4 * d + 4) for d in kept])
    index, _ = build(shard, "concatenate", 7, split=split)
    rows = read(shard, index, 7)
    for k, row in enumerate(rows):
        assert row.tolist() == expected[7 * k : 7 * k + 8].tolist()
    ids = document_ids(shard, index, index.segments(np.arange(len(rows))), len(rows), 7)
    documents = documents_of(shard, rows[:, :-1].ravel().astype(np.int64)).reshape(
        rows[:, 1:].shape
    )
    assert (np.diff(ids, axis=1) == (np.diff(documents, axis=1) != 0)).all()
    assert (ids[:, 0] == 0).all()


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_best_fit_by_sizes_equals_best_fit_row_by_row(seed: int, reuse: bool) -> None:
    rng = np.random.default_rng(seed)
    sequence_length = int(rng.choice([1, 2, 5, 16, 40]))
    lengths = rng.integers(1, rng.choice([3, 20, 100]), rng.integers(1, 120))
    starts = np.cumsum(lengths) - lengths
    blocks = list(pack_best_fit([(starts, lengths)], sequence_length, reuse=reuse, counts=Counts()))
    got = []
    for piece_starts, piece_lengths, width in blocks:
        ends = np.cumsum(width)
        for end, size in zip(ends, width, strict=True):
            pair = zip(piece_starts[end - size : end], piece_lengths[end - size : end], strict=True)
            got.append([(int(a), int(b)) for a, b in pair])
    expected = reference_rows(lengths.tolist(), sequence_length, reuse)
    # Equal compositions are made together, so rows may come in another order only within a round.
    assert sorted(len(row) for row in got) == sorted(len(row) for row in expected)
    assert sorted(sorted(b for _, b in row) for row in got) == sorted(
        sorted(b for _, b in row) for row in expected
    )


def packed(tmp_path: Path, lengths: list[int], **options: bool) -> tuple:
    shard = counting_shard(tmp_path / "s", lengths, "uint16")
    index, counts = build(shard, "best_fit", 32, **options)
    return shard, index, counts, read(shard, index, 32)


def test_best_fit_loses_no_token_but_the_last_row_when_tails_are_reused(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(1, 120, 300).tolist()
    _, _, counts, rows = packed(tmp_path, lengths)
    used = rows[rows != BOS]
    assert len(np.unique(used)) == len(used)
    assert counts.num_tokens == sum(lengths)
    assert counts.dropped_tokens == sum(lengths) - len(used) <= 32
    assert (rows[:, 0] == BOS).all()
    assert 0 < counts.cropped_tokens < sum(lengths)


def test_best_fit_drops_and_counts_cropped_tails_when_asked_to(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(20, 60, 300).tolist()
    _, _, counts, rows = packed(tmp_path, lengths, reuse=False)
    used = rows[rows != BOS]
    assert counts.dropped_tokens == sum(lengths) - len(used)
    assert counts.cropped_tokens <= counts.dropped_tokens <= counts.cropped_tokens + 33
    begins = np.cumsum(lengths) - lengths
    columns = np.flatnonzero(rows.ravel() == BOS)
    after = rows.ravel()[columns[columns + 1 < rows.size] + 1]
    assert np.isin(after[after != BOS], begins).all(), "a piece that is not a document's beginning"


def test_every_piece_of_a_packed_row_opens_with_bos_and_is_one_document(tmp_path: Path) -> None:
    lengths = [100] + [3] * 10 + [15, 31, 32, 33, 1, 2]
    shard, index, _, rows = packed(tmp_path, lengths)
    ids = document_ids(shard, index, index.segments(np.arange(len(rows))), len(rows), 32)
    for row, own in zip(rows[:, :-1].astype(np.int64), ids, strict=True):
        for number in range(own.max() + 1):
            piece = row[own == number]
            assert piece[0] == BOS
            assert (np.diff(piece[1:]) == 1).all()
            assert len(set(documents_of(shard, piece[1:]))) <= 1


def test_a_gap_of_one_token_takes_a_lone_bos(tmp_path: Path) -> None:
    shard = counting_shard(tmp_path / "s", [6, 6], "uint16")
    index, counts = build(shard, "best_fit", 7)
    rows = read(shard, index, 7)
    assert rows.tolist() == [[BOS, 0, 1, 2, 3, 4, 5, BOS], [BOS, 6, 7, 8, 9, 10, 11, BOS]]
    assert counts.dropped_tokens == 0


def test_rows_are_the_same_in_any_order_and_company(tmp_path: Path) -> None:
    lengths = np.random.default_rng(1).integers(1, 90, 200).tolist()
    shard, index, _, rows = packed(tmp_path, lengths)
    some = [5, 0, 5, index.num_rows - 1]
    assert (read(shard, index, 32, some) == rows[some]).all()


def test_tokens_beyond_two_to_the_32_bytes_are_found(tmp_path: Path) -> None:
    write_index(tmp_path / "big", np.full(3, 900_000_000, np.int32), "int32")
    with (tmp_path / "big.bin").open("wb") as file:
        file.truncate(3 * 900_000_000 * 4)
        file.seek(-16, 2)
        file.write(np.arange(1, 5, dtype=np.int32).tobytes())
    shard = IndexedDataset(tmp_path / "big")
    assert shard.pointers.tolist() == [0, 3_600_000_000, 7_200_000_000]
    for packing in ("concatenate", "best_fit"):
        index, counts = build(shard, packing, 999_999)
        assert counts.num_tokens == 2_700_000_000
        segments = index.segments(np.array([index.num_rows - 1]))
        assert (segments.starts >= 0).all()
        assert (segments.starts + segments.lengths).max() > 2**31
    index, _ = build(shard, "concatenate", 999_999)
    assert read(shard, index, 999_999, [index.num_rows - 1])[0, -1] in (0, 1, 2, 3, 4)


@pytest.mark.parametrize("size", [1, 7, 2000])
def test_a_small_buffer_of_documents_loses_no_more_than_one_row(size: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 2000)
    starts = np.cumsum(lengths) - lengths
    blocks = [(starts[i : i + size], lengths[i : i + size]) for i in range(0, 2000, size)]
    counts = Counts()
    rows = list(pack_best_fit(blocks, 40, reuse=True, counts=counts))
    used = sum(int(piece_lengths.sum()) for _, piece_lengths, _ in rows)
    assert used == lengths.sum() - counts.dropped_tokens
    assert counts.dropped_tokens <= 40
