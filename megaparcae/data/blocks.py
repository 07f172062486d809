"""Inputs cut into blocks: what one worker handles at a time.

A block is a range of a file that the worker reads itself, or bytes that had to be read in order
(compressed files, stdin). Block borders depend on the contents alone, so that an interrupted run
finds its finished blocks again.
"""

from __future__ import annotations

import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from megaparcae.data.inputs import COMPRESSIONS, HUB, STDIN, Source
from megaparcae.errors import UserError

SMALLEST_BLOCK, LARGEST_BLOCK = 1 << 20, 8 << 20
FILES_PER_BLOCK = 256


@dataclass(frozen=True)
class Block:
    """A piece of a source; `start`/`stop` are bytes, row groups or record batches of `source`."""

    source: Source
    start: int = 0
    stop: int = 0
    payload: bytes | None = None
    """The bytes themselves where a worker cannot read them alone."""
    separator: bytes = b"\n"
    files: tuple[str, ...] = ()
    """Text files of one document each."""
    progress: int = 0
    """Stored bytes of the input that are consumed once this block is done."""


def iterate_blocks(sources: Sequence[Source], separator: bytes | None = None) -> Iterator[Block]:
    """Blocks of all sources, in order. `separator` divides a .txt file into documents."""
    bundle: list[Source] = []
    for source in sources:
        if source.format == "txt" and separator is None and source.path != STDIN:
            bundle.append(source)
            if len(bundle) == FILES_PER_BLOCK or sum(s.size for s in bundle) >= SMALLEST_BLOCK:
                yield _bundle(bundle)
                bundle = []
            continue
        if bundle:
            yield _bundle(bundle)
            bundle = []
        yield from _blocks_of(source, separator)
    if bundle:
        yield _bundle(bundle)


def block_size(offset: int) -> int:
    """Bytes of the block that starts at `offset`: about 3 % of what came before."""
    return min(max(offset // 32, SMALLEST_BLOCK), LARGEST_BLOCK)


def open_decompressed(path: str, stored: BinaryIO) -> BinaryIO:
    """The contents of an open file, decompressed by the ending of its name."""
    if path.endswith(".gz"):
        return gzip.GzipFile(fileobj=stored, mode="rb")  # type: ignore[return-value]
    if path.endswith(".zst"):
        try:
            import zstandard
        except ImportError:
            raise UserError(f"{path}: reading .zst needs `pip install zstandard`") from None
        reader = zstandard.ZstdDecompressor().stream_reader(stored, read_across_frames=True)
        return io.BufferedReader(reader, 1 << 20)
    return stored


def read_whole(path: str) -> bytes:
    """All bytes of a file, decompressed; UserError for a damaged one."""
    with open(path, "rb") as stored:
        return _read(path, open_decompressed(path, stored), -1)


def _bundle(sources: list[Source]) -> Block:
    paths = tuple(source.path for source in sources)
    return Block(sources[0], files=paths, progress=sum(source.size for source in sources))


def _blocks_of(source: Source, separator: bytes | None) -> Iterator[Block]:
    compressed = source.path.endswith(COMPRESSIONS)
    match source.format:
        case "jsonl" if source.path != STDIN and not compressed:
            yield from _ranges(source)
        case "jsonl":
            yield from _stream(source, b"\n")
        case "txt":
            yield from _stream(source, separator)
        case "parquet":
            yield from _row_groups(source)
        case "arrow":
            yield from _record_batches(source)
        case "hub":
            yield from _hub_rows(source)


def _ranges(source: Source) -> Iterator[Block]:
    """Byte ranges; a line belongs to the range in which it starts."""
    start = 0
    while start < source.size:
        stop = min(start + block_size(start), source.size)
        yield Block(source, start, stop, progress=stop - start)
        start = stop


def _stream(source: Source, separator: bytes | None) -> Iterator[Block]:
    """Whole records read in order; without a separator all is one document."""
    if source.path == STDIN:
        yield from _cut(source, sys.stdin.buffer, None, separator)
        return
    with open(source.path, "rb") as stored:
        yield from _cut(source, open_decompressed(source.path, stored), stored, separator)


def _cut(
    source: Source, file: BinaryIO, stored: BinaryIO | None, separator: bytes | None
) -> Iterator[Block]:
    offset = reported = 0
    rest = bytearray()
    while data := _read(source.path, file, block_size(offset)):
        rest += data
        end = rest.rfind(separator, len(rest) - len(data) - len(separator)) if separator else -1
        if separator is None or end < 0:
            continue
        end += len(separator)
        done = stored.tell() - reported if stored else 0
        payload = bytes(memoryview(rest)[:end])
        yield Block(source, offset, payload=payload, separator=separator, progress=done)
        offset, reported = offset + end, reported + done
        del rest[:end]
    if rest or (separator is None and not offset):
        left = max(source.size - reported, 0)
        yield Block(source, offset, payload=bytes(rest), separator=separator or b"", progress=left)


def _read(path: str, file: BinaryIO, size: int) -> bytes:
    try:
        return file.read(size)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        reason = str(error)
    except Exception as error:
        if type(error).__name__ != "ZstdError":
            raise
        reason = str(error)
    raise UserError(
        f"--input {path}: cannot be decompressed ({reason}); the file is damaged or cut short, "
        "fetch it again"
    )


def _row_groups(source: Source) -> Iterator[Block]:
    import pyarrow
    from pyarrow import parquet

    try:
        num_groups = parquet.ParquetFile(source.path).num_row_groups
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"--input {source.path}: not a parquet file ({error})") from None
    for group in range(num_groups):
        share = source.size * (group + 1) // num_groups - source.size * group // num_groups
        yield Block(source, group, group + 1, progress=share)


def _record_batches(source: Source) -> Iterator[Block]:
    """Runs of record batches of about a block's size, told by the bytes of the mapped file."""
    import pyarrow

    start = offset = 0
    with pyarrow.memory_map(source.path) as file:
        try:
            reader = pyarrow.ipc.open_stream(file)
        except pyarrow.ArrowInvalid as error:
            raise UserError(f"--input {source.path}: not an Arrow stream ({error})") from None
        for batch, _ in enumerate(reader):
            if file.tell() - offset >= block_size(offset):
                yield Block(source, start, batch + 1, progress=file.tell() - offset)
                start, offset = batch + 1, file.tell()
        if file.tell() > offset:
            yield Block(source, start, sys.maxsize, progress=source.size - offset)


def _hub_rows(source: Source) -> Iterator[Block]:
    """Rows of a dataset by name, streamed and passed on as JSON lines."""
    lines: list[bytes] = []
    size = offset = 0
    for line in _hub_lines(source):
        lines.append(line)
        size += len(line)
        if size >= block_size(offset):
            yield Block(source, offset, payload=b"".join(lines))
            lines, size, offset = [], 0, offset + size
    if lines:
        yield Block(source, offset, payload=b"".join(lines))


def _hub_lines(source: Source) -> Iterator[bytes]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(f"--input {source.path}: needs `pip install datasets`") from None

    name, config, split = ([*source.path.removeprefix(HUB).split(":"), "", ""])[:3]
    number = 0
    try:
        for row in load_dataset(name, config or None, split=split or "train", streaming=True):
            yield json.dumps(row, default=str).encode() + b"\n"
            number += 1
    except Exception as error:  # the library and those under it raise many kinds
        reason = " ".join(str(error).split())
        where = f", after {number} rows" if number else ""
        raise UserError(
            f"--input {source.path}{where}: {type(error).__name__}: {reason}; check name and "
            "network (--resume keeps what is done)"
        ) from None
