"""Streaming writer of token shards: bounded memory, nothing half-written under the final name."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from megaparcae.data.indexed import (
    DTYPE_CODES,
    HEADER,
    MAGIC,
    VERSION,
    IndexedDataset,
    quick_fingerprint,
    with_suffix,
)
from megaparcae.errors import UserError

CHUNK = 1 << 18
"""Documents, or tokens, handled at once: a few MiB whatever the size of the shard."""
MAX_LENGTH = np.iinfo(np.int32).max


class HashingFile:
    """A new file that is hashed while it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._file: BinaryIO = path.open("wb", buffering=1 << 20)
        self._digest = hashlib.sha256()

    def write(self, data: bytes | np.ndarray) -> None:
        """Append; OSError (disk full) leaves with the file's name in it."""
        view = data.data if isinstance(data, np.ndarray) else memoryview(data)
        try:
            self._file.write(view)
        except OSError as error:
            raise _named(error, self.path) from None
        self._digest.update(view)
        self.size += view.nbytes

    def close(self, sync: bool = True) -> None:
        """Flush to the disk and close."""
        try:
            self._file.flush()
            if sync:
                os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.close()
            raise _named(error, self.path) from None

    def record(self) -> dict[str, int | str]:
        """Bytes, checksum and quick fingerprint, for the sidecar."""
        return {
            "bytes": self.size,
            "sha256": self._digest.hexdigest(),
            "quick": quick_fingerprint(self.path),
        }


class IndexedWriter:
    """Writes `{prefix}.bin/.idx/.json` under temporary names and renames them in `close`.

    Used as a context manager: leaving it with an exception removes the temporary files and keeps
    whatever lay under the final name. Memory does not grow with the number of documents.
    """

    def __init__(
        self, prefix: str | Path, dtype: np.dtype, temporary_folder: Path | None = None
    ) -> None:
        """temporary_folder: of the same file system; None is the folder of the shard."""
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype)
        if self.dtype not in DTYPE_CODES:
            raise UserError(f"shards cannot hold {self.dtype}; use uint16 or int32")
        self.num_documents = 0
        self.num_tokens = 0
        require_writable_folder(Path(self.prefix).parent, "output prefix", self.prefix)
        folder = temporary_folder or Path(self.prefix).parent
        self._temporary = folder / f"{Path(self.prefix).name}.tmp-{os.getpid()}"
        self._bin = HashingFile(self._path(".bin"))
        self._lengths = HashingFile(self._path(".lengths"))
        self._borders: HashingFile | None = None
        self._num_borders = 1

    def add(self, tokens: np.ndarray) -> None:
        """Append one document, tokens [L]."""
        self.add_many(tokens, np.array([len(tokens)]))

    def add_many(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents of `lengths` [N], their tokens joined, [sum of lengths]."""
        assert len(tokens) == lengths.sum(dtype=np.int64)
        if len(lengths) and lengths.max() > MAX_LENGTH:
            raise UserError(
                f"a document has {lengths.max()} tokens, the format holds {MAX_LENGTH}: cut it"
            )
        self._bin.write(fit_tokens(tokens, self.dtype))
        self._lengths.write(lengths.astype("<i4"))
        if self._borders:
            self._write_borders(self.num_documents + np.arange(1, len(lengths) + 1))
        self.num_tokens += len(tokens)
        self.num_documents += len(lengths)

    def add_shard(self, shard: IndexedDataset) -> None:
        """Append a whole shard of the same dtype, its document borders included."""
        assert shard.dtype == self.dtype
        self._start_borders()
        first = self.num_documents
        for start in range(0, shard.num_tokens, CHUNK):
            self._bin.write(shard.tokens[start : start + CHUNK])
        for start in range(0, shard.num_documents, CHUNK):
            lengths = np.ascontiguousarray(shard.lengths[start : start + CHUNK])
            self._lengths.write(lengths)
        for start in range(1, len(shard.document_indices), CHUNK):
            self._write_borders(first + shard.document_indices[start : start + CHUNK])
        self.num_tokens += shard.num_tokens
        self.num_documents += shard.num_documents

    def close(self, sidecar: dict[str, Any] | None = None) -> None:
        """Write the index, then the sidecar (with `files`), then give all three their names."""
        self._bin.close()
        self._lengths.close(sync=False)
        index = HashingFile(self._path(".idx"))
        self._write_index(index)
        index.close()
        suffixes = [".bin", ".idx"]
        if sidecar is not None:
            files = {"bin": self._bin.record(), "idx": index.record()}
            text = json.dumps({**sidecar, "files": files}, indent=1, ensure_ascii=False)
            file = HashingFile(self._path(".json"))
            file.write(text.encode("utf-8", "replace"))
            file.close()
            suffixes.insert(1, ".json")
        # The .idx is what makes a shard: the old one goes first, the new one comes last.
        for suffix in (".idx", ".json"):
            with_suffix(self.prefix, suffix).unlink(missing_ok=True)
        for suffix in suffixes:
            self._path(suffix).replace(with_suffix(self.prefix, suffix))
        self.discard()

    def discard(self) -> None:
        """Remove the temporary files."""
        for suffix in (".bin", ".idx", ".json", ".lengths", ".borders"):
            self._path(suffix).unlink(missing_ok=True)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if error is not None:
            for file in (self._bin, self._lengths, self._borders):
                if file is not None:
                    with contextlib.suppress(OSError):
                        file.close(sync=False)
            self.discard()

    def _path(self, suffix: str) -> Path:
        return with_suffix(self._temporary, suffix)

    def _start_borders(self) -> None:
        if self._borders is None:
            self._borders = HashingFile(self._path(".borders"))
            for start in range(0, self.num_documents, CHUNK):
                stop = min(start + CHUNK, self.num_documents)
                self._write_borders(np.arange(start + 1, stop + 1, dtype="<i8"))

    def _write_borders(self, borders: np.ndarray) -> None:
        assert self._borders is not None
        self._borders.write(np.ascontiguousarray(borders, "<i8"))
        self._num_borders += len(borders)

    def _write_index(self, out: HashingFile) -> None:
        num = self.num_documents
        num_borders = self._num_borders if self._borders else num + 1
        out.write(HEADER.pack(MAGIC, VERSION, DTYPE_CODES[self.dtype], num, num_borders))
        lengths = self._path(".lengths")
        for chunk in read_chunks(lengths, "<i4"):
            out.write(chunk)
        pointer = 0
        for chunk in read_chunks(lengths, "<i4"):
            ends = pointer + np.cumsum(chunk, dtype=np.int64) * self.dtype.itemsize
            pointers = np.concatenate([[pointer], ends[:-1]]).astype("<i8")
            assert pointers[0] >= 0 and (np.diff(pointers) >= 0).all(), "pointers must not decrease"
            out.write(pointers)
            pointer = int(ends[-1])
        out.write(np.zeros(1, "<i8"))
        if self._borders:
            self._borders.close(sync=False)
            for chunk in read_chunks(self._path(".borders"), "<i8"):
                out.write(chunk)
        else:
            for start in range(0, num, CHUNK):
                out.write(np.arange(start + 1, min(start + CHUNK, num) + 1, dtype="<i8"))


def fit_tokens(tokens: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Tokens in `dtype`, checked: an id that does not fit is an error, never a smaller id."""
    if tokens.dtype == dtype or not len(tokens):
        return np.ascontiguousarray(tokens, dtype)
    limits = np.iinfo(dtype)
    largest, smallest = int(tokens.max()), int(tokens.min())
    if largest > limits.max or smallest < limits.min:
        bad = largest if largest > limits.max else smallest
        raise UserError(
            f"--dtype={dtype} cannot hold token id {bad} (largest: {limits.max}); use --dtype int32"
        )
    return tokens.astype(dtype)


def read_chunks(path: Path, dtype: str) -> list[np.ndarray]:
    """The numbers of a file, mapped, in pieces of CHUNK."""
    if not path.stat().st_size:
        return []
    numbers = np.memmap(path, dtype=dtype, mode="r")
    return [numbers[start : start + CHUNK] for start in range(0, len(numbers), CHUNK)]


def require_writable_folder(folder: Path, option: str, value: str) -> None:
    """Make the folder; a UserError of one sentence when it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write-test-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        raise UserError(
            f"{option}={value}: cannot write in folder {folder} ({error.strerror}); choose a "
            "folder that you may write to"
        ) from None


def _named(error: OSError, path: Path) -> OSError:
    return OSError(error.errno, error.strerror, str(path))
