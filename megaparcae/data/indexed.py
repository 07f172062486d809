"""Token shards in Megatron's MMIDIDX format: `{prefix}.bin` holds tokens, `{prefix}.idx` where.

Layout of the .idx, little-endian: magic (9 bytes), version u64 = 1, dtype code u8, number of
sequences N u64, number of document borders D u64, lengths int32 [N] in tokens, pointers int64 [N]
in bytes, document borders int64 [D] (the first is 0, the last is N). A third file, `{prefix}.json`,
says where a shard of ours came from; Megatron's shards have none.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from megaparcae.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.int8),
    3: np.dtype(np.int16),
    4: np.dtype(np.int32),
    5: np.dtype(np.int64),
    6: np.dtype(np.float64),
    7: np.dtype(np.float32),
    8: np.dtype(np.uint16),
}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}
UINT16_VOCABULARY = 65500
"""Below this many ids tokens are uint16, from here on int32: Megatron's rule to the letter."""
QUICK_BYTES = 65536


class ShardError(UserError):
    """A shard that is missing, damaged or put together from two runs."""


def best_dtype(vocab_size: int) -> np.dtype:
    """Smallest dtype of tokens that holds every id of the vocabulary, added tokens included."""
    return np.dtype(np.uint16 if vocab_size < UINT16_VOCABULARY else np.int32)


def with_suffix(prefix: str | Path, suffix: str) -> Path:
    """`prefix` + `suffix`; a prefix may hold dots, so pathlib's own with_suffix is wrong here."""
    return Path(f"{prefix}{suffix}")


def quick_fingerprint(path: Path) -> str:
    """SHA-256 of size, first and last 64 KiB: tells two runs' files apart without reading them."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(QUICK_BYTES))
        file.seek(max(0, size - QUICK_BYTES))
        digest.update(file.read(QUICK_BYTES))
    return digest.hexdigest()


class IndexedDataset:
    """A shard, memory-mapped; documents are numbered 0 .. num_documents - 1.

    A document is one stored sequence. Shards of ours hold one sequence a document; Megatron's can
    hold several or none, and `document_indices` keeps those borders as they are.

    lengths [N] int32 tokens; pointers [N] int64 bytes; document_indices [D] int64; tokens: all.
    Raises ShardError, one sentence: file, what was read, what was expected, the likely cause.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        self.idx_path, self.bin_path = _existing_files(self.prefix)
        self.dtype, num_sequences, num_borders = _read_header(self.idx_path)
        raw = np.memmap(self.idx_path, dtype=np.uint8, mode="r")
        start = HEADER.size
        self.lengths = raw[start : start + 4 * num_sequences].view(np.int32)
        start += 4 * num_sequences
        self.pointers = raw[start : start + 8 * num_sequences].view(np.int64)
        start += 8 * num_sequences
        self.document_indices = raw[start : start + 8 * num_borders].view(np.int64)
        self.sidecar = _read_sidecar(self.prefix)
        self._check_files_belong_together()
        self.tokens: np.ndarray
        if self.bin_path.stat().st_size:
            self.tokens = np.memmap(self.bin_path, dtype=self.dtype, mode="r")
        else:
            self.tokens = np.zeros(0, self.dtype)
        # A plain ndarray view: slicing a memmap costs several times the slice itself.
        self._plain_tokens = self.tokens.view(np.ndarray)

    @property
    def num_documents(self) -> int:
        """Number of stored sequences N."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens in the .bin."""
        return len(self.tokens)

    def __len__(self) -> int:
        return self.num_documents

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str]]:
        return IndexedDataset, (self.prefix,)

    def get(self, document: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens [offset, offset + length) of a document, a view into the mapped file.

        Raises IndexError for a document or a range that is not there.
        """
        total = int(self.lengths[document])
        stop = total if length is None else offset + length
        if not 0 <= offset <= stop <= total:
            raise IndexError(
                f"{self.prefix}: tokens [{offset}, {stop}) of document {document}, "
                f"which has {total} tokens"
            )
        start = int(self.pointers[document]) // self.dtype.itemsize
        return self._plain_tokens[start + offset : start + stop]

    def _check_files_belong_together(self) -> None:
        actual = self.bin_path.stat().st_size
        expected = 0
        if self.num_documents:
            expected = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize
        mixed = actual > expected
        if self.sidecar and not mixed:
            recorded = self.sidecar.get("files", {}).get("bin", {}).get("bytes")
            mixed = actual != expected and recorded == actual
        if mixed:
            raise ShardError(
                f"{self.bin_path} has {actual} bytes but {self.idx_path} describes {expected}: "
                "the two files come from different runs; copy both from one run or preprocess again"
            )
        if actual < expected:
            raise ShardError(
                f"{self.bin_path} has {actual} bytes but {self.idx_path} ends at byte {expected}: "
                "the .bin is cut short (disk full, unfinished copy?); copy it or preprocess again"
            )
        if self.sidecar:
            self._check_fingerprints(self.sidecar)

    def _check_fingerprints(self, sidecar: dict[str, Any]) -> None:
        for kind, path in (("bin", self.bin_path), ("idx", self.idx_path)):
            recorded = sidecar.get("files", {}).get(kind, {}).get("quick")
            if recorded is not None and recorded != quick_fingerprint(path):
                raise ShardError(
                    f"{path} is not the file that {self.prefix}.json describes (other "
                    "fingerprint): files of different runs are mixed, or it was changed; copy all "
                    "three files from the same run or preprocess again"
                )


def _existing_files(prefix: str) -> tuple[Path, Path]:
    """Paths of the .idx and .bin; refuses a prefix that is a file name or leads nowhere."""
    for suffix in (".bin", ".idx"):
        if prefix.endswith(suffix) and Path(prefix).exists():
            raise ShardError(
                f"shard prefix {prefix!r} ends with {suffix}: give the prefix without the ending, "
                f"{prefix.removesuffix(suffix)!r}"
            )
    idx, binary = with_suffix(prefix, ".idx"), with_suffix(prefix, ".bin")
    for path in (idx, binary):
        if not path.is_file():
            near = sorted(p.name.removesuffix(".idx") for p in Path(idx.parent).glob("*.idx"))
            hint = (
                f"shards in {idx.parent}: {', '.join(near[:5])}" if near else "no shard lies there"
            )
            raise ShardError(f"shard {prefix!r}: {path} does not exist; check the prefix ({hint})")
    return idx, binary


def _read_header(path: Path) -> tuple[np.dtype, int, int]:
    """Dtype, number of sequences and of document borders; the file's size must agree with them."""
    size = path.stat().st_size
    if size == 0:
        raise ShardError(
            f"{path} is empty (0 bytes): the run that wrote it did not finish; preprocess again"
        )
    with path.open("rb") as file:
        head = file.read(HEADER.size)
    if not MAGIC.startswith(head[:9]) or (len(head) >= 9 and head[:9] != MAGIC):
        raise ShardError(
            f"{path} starts with {head[:9]!r}, an MMIDIDX index with {MAGIC!r}: this is "
            "another kind of file; give the prefix of a shard that Megatron or we wrote"
        )
    if len(head) < HEADER.size:
        raise _cut_short(path, size, f"the header alone takes {HEADER.size}")
    _, version, code, num_sequences, num_borders = HEADER.unpack(head)
    if version != VERSION:
        raise ShardError(
            f"{path} says version {version}, this reader knows version {VERSION}: written by "
            "a newer or another tool, or damaged; preprocess again"
        )
    if code not in DTYPES:
        raise ShardError(
            f"{path} says dtype code {code}, known are 1 to 8: the header is damaged; "
            "preprocess again"
        )
    expected = HEADER.size + 12 * num_sequences + 8 * num_borders
    if size < expected:
        raise _cut_short(path, size, f"{num_sequences} documents take {expected}")
    if size not in (expected, expected + num_sequences):  # Megatron's modes: one byte a sequence
        raise ShardError(
            f"{path} has {size} bytes, {num_sequences} documents take {expected}: something was "
            "appended or the header is damaged; preprocess again"
        )
    return DTYPES[code], int(num_sequences), int(num_borders)


def _cut_short(path: Path, size: int, need: str) -> ShardError:
    return ShardError(
        f"{path} has {size} bytes but {need}: the index is cut short (disk full, "
        "unfinished copy?); copy it again or preprocess again"
    )


def _read_sidecar(prefix: str) -> dict[str, Any] | None:
    """Contents of `{prefix}.json`, or None for a shard without one."""
    path = with_suffix(prefix, ".json")
    if not path.is_file():
        return None
    try:
        sidecar = json.loads(path.read_bytes())
    except ValueError as error:
        raise ShardError(
            f"{path} is not JSON ({error}): the shard's record is damaged; remove it to use "
            "the shard unchecked, or preprocess again"
        ) from None
    if not isinstance(sidecar, dict):
        raise ShardError(f"{path} holds no JSON object; remove it to use the shard unchecked")
    return sidecar
