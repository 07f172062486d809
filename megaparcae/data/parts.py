"""Finished blocks on disk: one file each, named by what it was made from.

The name is a hash of the block's contents and of every setting that changes its tokens, so a part
can never be taken for another input, and an input may move or be renamed between two runs.

Layout: length of the header (8 bytes), header (JSON), then for each key lengths int32, tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import MutableSequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from megaparcae.data.blocks import Block
from megaparcae.data.indexed import best_dtype
from megaparcae.data.records import Record, count_numbers, load_block, read_records
from megaparcae.data.tokenizer import Tokenizer
from megaparcae.data.writer import fit_tokens
from megaparcae.errors import UserError

FORMAT = 1
"""Counted up whenever the same input gives other parts."""
DOCUMENTS_AT_ONCE = 2048


@dataclass(frozen=True)
class PartSettings:
    """Everything besides text and tokenizer that decides the tokens of a block."""

    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    keep_empty: bool = False
    skip_errors: bool = False
    dtype: str | None = None
    """uint16 or int32; None is chosen by the vocabulary."""

    def token_dtype(self, tokenizer: Tokenizer) -> np.dtype:
        """Dtype of the shard."""
        return np.dtype(self.dtype) if self.dtype else best_dtype(tokenizer.vocab_size)

    def hash(self, tokenizer: Tokenizer) -> str:
        """Name of settings and tokenizer."""
        values = [FORMAT, asdict(self), tokenizer.identity, tokenizer.eod_id]
        values.append(self.token_dtype(tokenizer).name)
        return hashlib.blake2b(json.dumps(values).encode(), digest_size=16).hexdigest()


class BadRecord(Exception):
    """A record that cannot be used, under --on-error stop: (number in its block, reason)."""


@dataclass
class Part:
    """Header of a part file."""

    fingerprint: str = ""
    """Of the block's contents."""
    num_numbers: int = 0
    """Lines (rows, files) of the block."""
    num_documents: list[int] = field(default_factory=list)
    """Per key, as the next three."""
    num_empty: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)
    skipped: list[tuple[int, str]] = field(default_factory=list)
    """Records left out: (number, reason)."""
    repaired: list[tuple[int, str]] = field(default_factory=list)
    """Records with replaced characters: (number, reason)."""


class _Column:
    """Tokens of one key of a block, gathered in small arrays and joined now and then."""

    def __init__(self, dtype: np.dtype, vocab_size: int) -> None:
        self.dtype, self.vocab_size = dtype, vocab_size
        self.loose: list[np.ndarray] = []
        self.joined: list[np.ndarray] = []
        self.lengths: list[int] = []
        self.num_empty = self.num_bytes = 0

    def add(self, ids: np.ndarray, eod: np.ndarray | None, keep_empty: bool) -> None:
        if not len(ids):
            self.num_empty += 1
            if not keep_empty:
                return
        self.lengths.append(len(ids) + (eod is not None))
        self.loose.append(ids)
        if eod is not None:
            self.loose.append(eod)
        if len(self.loose) >= DOCUMENTS_AT_ONCE:
            self.join()

    def join(self) -> None:
        if not self.loose:
            return
        tokens = np.concatenate(self.loose)
        if len(tokens) and int(tokens.max()) >= self.vocab_size:
            raise UserError(
                f"the tokenizer gave id {tokens.max()} but reports a vocabulary of "
                f"{self.vocab_size}; use a tokenizer file that agrees with itself"
            )
        self.joined.append(fit_tokens(tokens, self.dtype))
        self.loose = []

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        self.join()
        tokens = np.concatenate(self.joined) if self.joined else np.zeros(0, self.dtype)
        return np.array(self.lengths, dtype=np.int32), tokens


def make_part(
    block: Block,
    tokenizer: Tokenizer,
    settings: PartSettings,
    folder: Path,
    position: MutableSequence[int],
) -> tuple[Part, Path]:
    """Tokenise a block into its part file, or find it finished.

    `position[0]` holds the number of the record at work, for whoever finds this process dead.
    Raises BadRecord under --on-error stop.
    """
    contents = load_block(block, settings.keys)
    path = folder / f"{settings.hash(tokenizer)}-{contents.fingerprint}.part"
    dtype = settings.token_dtype(tokenizer)
    finished = read_header(path, dtype)
    if finished is not None:
        return finished, path
    columns = [_Column(dtype, tokenizer.vocab_size) for _ in settings.keys]
    eod = np.array([tokenizer.eod_id], dtype=np.uint32) if settings.append_eod else None
    part = Part(contents.fingerprint)
    last = -1
    for record in read_records(contents, settings.keys):
        last = position[0] = record.number
        _add_record(record, part, columns, tokenizer, settings, eod)
    part.num_numbers = count_numbers(contents, last)
    arrays = [column.arrays() for column in columns]
    part.num_documents = [len(lengths) for lengths, _ in arrays]
    part.num_empty = [column.num_empty for column in columns]
    part.num_tokens = [len(tokens) for _, tokens in arrays]
    part.num_bytes = [column.num_bytes for column in columns]
    _write(path, part, arrays)
    return part, path


def read_header(path: Path, dtype: np.dtype) -> Part | None:
    """Header of a part, None when there is none or the file is not whole."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            part = Part(**json.loads(file.read(size)))
            data = 4 * sum(part.num_documents) + dtype.itemsize * sum(part.num_tokens)
            return part if os.fstat(file.fileno()).st_size == 8 + size + data else None
    except (OSError, ValueError, TypeError):
        return None


def read_arrays(path: Path, part: Part, dtype: np.dtype) -> list[tuple[np.ndarray, np.ndarray]]:
    """Mapped (lengths, tokens) of every key."""
    with path.open("rb") as file:
        offset = 8 + int.from_bytes(file.read(8), "little")
    raw = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    arrays = []
    for num_documents, num_tokens in zip(part.num_documents, part.num_tokens, strict=True):
        middle = offset + 4 * num_documents
        end = middle + num_tokens * dtype.itemsize
        arrays.append((raw[offset:middle].view(np.int32), raw[middle:end].view(dtype)))
        offset = end
    return arrays


def _add_record(
    record: Record,
    part: Part,
    columns: list[_Column],
    tokenizer: Tokenizer,
    settings: PartSettings,
    eod: np.ndarray | None,
) -> None:
    if record.problem:
        if not settings.skip_errors:
            raise BadRecord(record.number, record.problem)
        part.skipped.append((record.number, record.problem))
        return
    if record.repaired:
        part.repaired.append((record.number, record.repaired))
    ids = tokenizer.encode_batch(record.texts)
    for column, one, num_bytes in zip(columns, ids, record.num_bytes, strict=True):
        column.num_bytes += num_bytes
        column.add(one, eod, settings.keep_empty)


def _write(path: Path, part: Part, arrays: list[tuple[np.ndarray, np.ndarray]]) -> None:
    header = json.dumps(asdict(part)).encode()
    temporary = path.with_suffix(f".tmp-{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for lengths, tokens in arrays:
            file.write(lengths.data)
            file.write(tokens.data)
    temporary.replace(path)
