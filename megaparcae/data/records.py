"""The documents of a block: every line, row or file becomes texts, or a reason why it cannot."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megaparcae.data.blocks import Block, read_whole
from megaparcae.errors import UserError

BOM = b"\xef\xbb\xbf"
ROWS_AT_ONCE = 256


@dataclass
class Record:
    """One document: a text per JSON key, or the reason why there is none."""

    number: int
    """Line, row or document within the block, from 0."""
    texts: list[str] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)
    """UTF-8 bytes of each text."""
    repaired: str = ""
    """What was replaced by U+FFFD, if anything."""
    problem: str = ""


@dataclass
class BlockContents:
    """Raw contents of a block, and the hash that names them."""

    block: Block
    data: bytes = b""
    fingerprint: str = ""


UNITS = {"jsonl": "line", "hub": "row", "parquet": "row", "arrow": "row", "txt": "document"}


def load_block(block: Block, keys: Sequence[str]) -> BlockContents:
    """Read and fingerprint a block (BLAKE2b of what its documents are made of)."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{block.source.format}:{block.start == 0}:{block.separator!r}:".encode())
    contents = BlockContents(block)
    if block.files:
        for path in block.files:
            data = read_whole(path)
            digest.update(f"{len(data)}:".encode() + data)
    elif block.payload is not None:
        contents.data = block.payload
        digest.update(contents.data)
    elif block.source.format == "jsonl":
        contents.data = _read_range(block)
        digest.update(contents.data)
    else:
        for columns in _tables(block, keys):
            digest.update(repr(columns).encode())
    contents.fingerprint = digest.hexdigest()
    return contents


def read_records(contents: BlockContents, keys: Sequence[str]) -> Iterator[Record]:
    """The documents of a block in order; blank lines are no documents."""
    block = contents.block
    if block.files:
        for number, path in enumerate(block.files):
            yield _text_record(number, read_whole(path), block.start == 0)
    elif block.source.format == "txt":
        pieces = contents.data.split(block.separator) if block.separator else [contents.data]
        if block.separator and not pieces[-1]:
            pieces.pop()
        for number, piece in enumerate(pieces):
            yield _text_record(number, piece, block.start == 0 and number == 0)
    elif block.source.format in ("jsonl", "hub"):
        yield from _json_lines(contents.data, keys, block.start == 0)
    else:
        number = 0
        for columns in _tables(block, keys):
            for values in zip(*columns, strict=True):
                yield _record(number, dict(zip(keys, values, strict=True)), keys)
                number += 1


def count_numbers(contents: BlockContents, last: int) -> int:
    """Lines (rows, documents) of the block, blank ones included; `last` is the last number seen."""
    if contents.block.source.format in ("jsonl", "hub"):
        data = contents.data
        return data.count(b"\n") + (not data.endswith(b"\n") and len(data) > 0)
    return last + 1


def place(block: Block, number: int) -> str:
    """`file, line 7`, for a number counted from the start of the source."""
    if block.files:
        return block.files[number]
    name = "stdin" if block.source.path == "-" else block.source.path
    return f"{name}, {UNITS[block.source.format]} {number + 1}"


def _read_range(block: Block) -> bytes:
    """The lines that start in [start, stop)."""
    with open(block.source.path, "rb") as file:
        if block.start == 0:
            data = file.read(block.stop)
        else:
            file.seek(block.start - 1)
            data = file.read(block.stop - block.start + 1)
            first = data.find(b"\n")
            if first < 0 or first == len(data) - 1:
                return b""
            data = data[first + 1 :]
        if data and not data.endswith(b"\n"):
            data += file.readline()
    return data


def _json_lines(data: bytes, keys: Sequence[str], is_start: bool) -> Iterator[Record]:
    if is_start:
        data = data.removeprefix(BOM)
    start = number = 0
    while start < len(data):
        end = data.find(b"\n", start)
        end = len(data) if end < 0 else end
        line = data[start:end]
        if line.strip():
            yield _json_record(number, line, keys)
        start, number = end + 1, number + 1


def _json_record(number: int, line: bytes, keys: Sequence[str]) -> Record:
    text, repaired = _decode(line)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Record(number, problem=f"not JSON: {error}")
    record = _record(number, value, keys)
    record.repaired = repaired or record.repaired
    return record


def _record(number: int, value: Any, keys: Sequence[str]) -> Record:
    if not isinstance(value, dict):
        kind = type(value).__name__
        return Record(number, problem=f"not a JSON object with keys, but a {kind}")
    record = Record(number)
    for key in keys:
        text = value.get(key)
        if isinstance(text, bytes):
            text, repaired = _decode(text)
            record.repaired = record.repaired or repaired
        if not isinstance(text, str):
            if key not in value:
                has = ", ".join(list(value)[:8]) or "none"
                record.problem = f"no key {key!r} (its keys: {has}); see --json-keys"
            else:
                record.problem = f"key {key!r} holds {_kind(text)}, not text"
            return record
        _append(record, text)
    return record


def _text_record(number: int, data: bytes, may_have_bom: bool) -> Record:
    if may_have_bom:
        data = data.removeprefix(BOM)
    text, repaired = _decode(data)
    record = Record(number, repaired=repaired)
    _append(record, text)
    return record


def _decode(data: bytes) -> tuple[str, str]:
    """Text of UTF-8 bytes, and what was replaced by U+FFFD in it, if anything."""
    try:
        return data.decode(), ""
    except UnicodeDecodeError as error:
        return data.decode(errors="replace"), f"invalid UTF-8 (byte 0x{data[error.start]:02x})"


def _append(record: Record, text: str) -> None:
    """Add a text; lone surrogates, which no encoder takes, become U+FFFD."""
    try:
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError:
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        size = len(text.encode())
        record.repaired = "lone surrogate"
    record.texts.append(text)
    record.num_bytes.append(size)


def _kind(value: Any) -> str:
    names = {"NoneType": "null", "list": "a list", "dict": "an object", "bool": "a truth value"}
    return names.get(type(value).__name__, "a number")


def _tables(block: Block, keys: Sequence[str]) -> Iterator[list[list[Any]]]:
    """Columns of `keys`, ROWS_AT_ONCE rows at a time, of a row group or of record batches."""
    import pyarrow
    from pyarrow import parquet

    path = block.source.path
    if block.source.format == "parquet":
        file = parquet.ParquetFile(path)
        _check_columns(path, file.schema_arrow.names, keys)
        batches = file.iter_batches(
            ROWS_AT_ONCE, row_groups=[block.start], columns=list(keys), use_threads=False
        )
        yield from (_columns(batch, keys) for batch in batches)
        return
    with pyarrow.memory_map(path) as mapped:
        reader = pyarrow.ipc.open_stream(mapped)
        _check_columns(path, reader.schema.names, keys)
        for number, batch in enumerate(reader):
            if number >= block.stop:
                return
            if number < block.start:
                continue
            for row in range(0, batch.num_rows, ROWS_AT_ONCE):
                yield _columns(batch.slice(row, ROWS_AT_ONCE), keys)


def _columns(batch: Any, keys: Sequence[str]) -> list[list[Any]]:
    """Values of the columns; text as bytes, since no file is bound to hold valid UTF-8."""
    return [_as_bytes(batch.column(key)).to_pylist() for key in keys]


def _as_bytes(column: Any) -> Any:
    from pyarrow import large_binary, types

    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    is_text = types.is_string(column.type) or types.is_large_string(column.type)
    return column.cast(large_binary()) if is_text else column


def _check_columns(path: str, names: Sequence[str], keys: Sequence[str]) -> None:
    for key in keys:
        if key not in names:
            raise UserError(
                f"--json-keys {key}: {path} has no such column (its columns: {', '.join(names)})"
            )
