"""What a loss is measured on: rows of a token dataset, or text cut into windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megaparcae.data.blocks import iterate_blocks
from megaparcae.data.dataset import TokenDataset
from megaparcae.data.inputs import find_sources
from megaparcae.data.records import load_block, place, read_records
from megaparcae.data.tokenizer import Tokenizer
from megaparcae.errors import UserError
from megaparcae.eval.token_bytes import token_bytes

TEXTS_AT_ONCE = 64


@dataclass(frozen=True)
class Row:
    """Inputs are tokens[:-1], labels tokens[1:]; all labels count."""

    tokens: np.ndarray
    """int64 [L + 1]."""
    documents: np.ndarray | None = None
    """int32 [L], when attention stays inside a document."""


@dataclass(frozen=True)
class LossRows:
    """A set of rows, read when they are needed."""

    lengths: list[int]
    """Inputs of each row."""
    read: Callable[[Sequence[int]], list[Row]]
    bytes_of_token: np.ndarray | None
    """int64 [vocabulary]; None when no tokenizer is known: then there are no bits per byte."""
    text_bytes: int | None = None
    """UTF-8 bytes of the text where it is known exactly; else they are counted by token."""

    def first(self, count: int) -> LossRows:
        """The first `count` rows; their bytes are counted by token."""
        if count >= len(self.lengths):
            return self
        return LossRows(self.lengths[:count], self.read, self.bytes_of_token)


def dataset_rows(data: TokenDataset, num_rows: int, tokenizer: Tokenizer | None) -> LossRows:
    """The first rows of a dataset: a pure function of its config, whatever reads them."""

    def read(numbers: Sequence[int]) -> list[Row]:
        rows = data.rows(np.array(numbers, np.int64))
        documents = rows.document_ids
        return [
            Row(tokens, None if documents is None else documents[i])
            for i, tokens in enumerate(rows.tokens.astype(np.int64))
        ]

    sizes = None if tokenizer is None else token_bytes(tokenizer)
    return LossRows([data.sequence_length] * num_rows, read, sizes)


def text_rows(inputs: Sequence[str], tokenizer: Tokenizer, length: int, key: str) -> LossRows:
    """Text files (txt, jsonl, parquet; also .gz, .zst), every token scored exactly once.

    A document is BOS and its tokens, cut into windows of `length` labels; a window's first input is
    the last token of the one before. A tokenizer without BOS and EOS leaves the document's first
    token unscored, and text_bytes counts it all the same.
    """
    rows: list[Row] = []
    num_bytes = 0
    start = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
    opening = np.array([] if start is None else [start], np.int64)
    for texts, sizes in _texts(inputs, key):
        num_bytes += sum(sizes)
        for ids in tokenizer.encode_batch(texts):
            tokens = np.concatenate([opening, ids.astype(np.int64)])
            cuts = range(0, len(tokens) - 1, length)
            rows += [Row(tokens[cut : cut + length + 1]) for cut in cuts]
    if not rows:
        raise UserError(f"--data {' '.join(inputs)}: no text in it; give files with some")

    def read(numbers: Sequence[int]) -> list[Row]:
        return [rows[number] for number in numbers]

    lengths = [len(row.tokens) - 1 for row in rows]
    return LossRows(lengths, read, token_bytes(tokenizer), num_bytes)


def _texts(inputs: Sequence[str], key: str):  # type: ignore[no-untyped-def]
    """(texts, their bytes) of all documents, in order, some at a time."""
    for block in iterate_blocks(find_sources(inputs)):
        texts: list[str] = []
        sizes: list[int] = []
        for record in read_records(load_block(block, [key]), [key]):
            if record.problem:
                raise UserError(f"{place(block, record.number)}: {record.problem}")
            texts += record.texts
            sizes += record.num_bytes
            if len(texts) >= TEXTS_AT_ONCE:
                yield texts, sizes
                texts, sizes = [], []
        if texts:
            yield texts, sizes
