"""Packing indices on disk: built once for everything they depend on, then memory-mapped.

An index is a folder `{shard}.index-{key}` beside the shard, in data.cache_dir, or in the machine's
temporary folder when the shard's own cannot be written. The key covers the shard's files (size,
time of change, fingerprint), packing, sequence length, split and tokenizer: what was built for
other data or settings is never used. A folder gets its name when it is complete, so builders that
don't see each other's lock (local disks, file systems without locks) do double work but no harm.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from megaparcae.data.best_fit import Counts
from megaparcae.data.indexed import IndexedDataset, quick_fingerprint
from megaparcae.data.npy import NpyAppender
from megaparcae.data.packing import (
    PACKING_VERSION,
    Arrays,
    RowIndex,
    build_index,
    index_dtypes,
    open_index,
)
from megaparcae.data.split import DocumentSplit
from megaparcae.errors import UserError
from megaparcae.log import logger

WAIT_LIMIT_S = 1800.0
"""After this long behind another builder, build a copy of one's own."""
MESSAGE_AFTER_S = 2.0
ABANDONED_AFTER_S = 86400.0
"""Age at which an unfinished folder is taken for the rest of a killed builder."""
MMAP_FROM_BYTES = 1 << 20
"""Smaller arrays are read: thousands of sets must not hold thousands of open files."""


@dataclass(frozen=True)
class IndexSpec:
    """What an index is built from, besides the shard's files."""

    packing: str
    sequence_length: int
    reuse: bool
    split: DocumentSplit
    tokenizer: str | None = None

    def key(self, shard: IndexedDataset) -> dict[str, str]:
        """Everything the index depends on, in words."""
        key = {
            "version": str(PACKING_VERSION),
            "packing": self.packing,
            "sequence_length": str(self.sequence_length),
            "split": self.split.identity(),
            "tokenizer": str(self.tokenizer),
        }
        if self.packing == "best_fit":
            key["cropped_tail"] = "reuse" if self.reuse else "drop"
        for name, path in ((".bin", shard.bin_path), (".idx", shard.idx_path)):
            stat = path.stat()
            key[f"{name} bytes"] = str(stat.st_size)
            key[f"{name} modified"] = str(stat.st_mtime_ns)
            key[f"{name} fingerprint"] = quick_fingerprint(path)
        return key


def cached_index(
    shard: IndexedDataset, spec: IndexSpec, cache_dir: str | None = None
) -> tuple[RowIndex, Counts]:
    """The index of a shard, built unless it is there; waits while another process builds it.

    Raises UserError when an explicit cache_dir cannot be written.
    """
    key = spec.key(shard)
    name = _folder_name(shard, key)
    for base in _places(shard, cache_dir):
        loaded = _load(base / name, spec)
        if loaded is None and _can_write(base):
            loaded = _build_behind_lock(base / name, shard, spec, key)
        if loaded is not None:
            return loaded
        if cache_dir is None:
            logger.warning("%s cannot be written: its packing index goes to another place", base)
    raise UserError(
        f"data.cache_dir={cache_dir}: cannot write there; choose a folder you may write to, or "
        "leave it null to keep packing indices beside the shards"
        if cache_dir is not None
        else f"no folder for the packing index of {shard.prefix} can be written; set data.cache_dir"
    )


def _places(shard: IndexedDataset, cache_dir: str | None) -> list[Path]:
    if cache_dir is not None:
        return [Path(cache_dir)]
    temporary = Path(tempfile.gettempdir()) / f"megaparcae-index-{os.getuid()}"
    return [shard.bin_path.parent, temporary]


def _folder_name(shard: IndexedDataset, key: dict[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return f"{Path(shard.prefix).name}.index-{digest[:16]}"


def _can_write(base: Path) -> bool:
    try:
        base.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=base):
            return True
    except OSError:
        return False


def _build_behind_lock(
    folder: Path, shard: IndexedDataset, spec: IndexSpec, key: dict[str, str]
) -> tuple[RowIndex, Counts]:
    with _lock(folder, shard.prefix):
        loaded = _load(folder, spec)
        if loaded is None:
            if folder.exists():
                logger.warning("%s is damaged: building it again", folder)
                shutil.rmtree(folder, ignore_errors=True)
            _remove_abandoned(folder)
            logger.info("packing index of %s: %s; building", shard.prefix, _reason(folder, key))
            _build(folder, shard, spec, key)
            loaded = _load(folder, spec)
    assert loaded is not None
    return loaded


@contextmanager
def _lock(folder: Path, prefix: str) -> Iterator[None]:
    """Hold the lock of a shard's indices, or go on without it where there are no locks.

    The kernel frees the lock of a process that dies, so none is ever left behind.
    """
    start, told = time.monotonic(), False
    with (folder.parent / f".{Path(prefix).name}.index.lock").open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - start
            except OSError:  # a file system without locks
                break
            if waited > WAIT_LIMIT_S:
                logger.warning("no packing index of %s after %.0f s: building one", prefix, waited)
                break
            if waited > MESSAGE_AFTER_S and not told:
                logger.info("waiting for another process to build an index of %s", prefix)
                told = True
            time.sleep(0.05)
        yield


def _build(folder: Path, shard: IndexedDataset, spec: IndexSpec, key: dict[str, str]) -> None:
    """Write the arrays into a temporary folder, then give it its name."""
    start, counts = time.monotonic(), Counts()
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        files = {
            name: NpyAppender(temporary / f"{name}.npy", dtype)
            for name, dtype in index_dtypes(spec.packing).items()
        }
        for block in build_index(
            shard,
            spec.split,
            packing=spec.packing,
            sequence_length=spec.sequence_length,
            reuse=spec.reuse,
            counts=counts,
        ):
            for name, array in block.items():
                files[name].append(array)
        lengths = {name: file.close() for name, file in files.items()}
        meta = {"key": key, "lengths": lengths, "counts": asdict(counts)}
        (temporary / "meta.json").write_text(json.dumps(meta, indent=1))
        temporary.chmod(0o755)
        temporary.rename(folder)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        if not folder.exists():  # otherwise another builder was faster
            raise
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    logger.info("packing index of %s: built in %.1f s", shard.prefix, time.monotonic() - start)


def _load(folder: Path, spec: IndexSpec) -> tuple[RowIndex, Counts] | None:
    """The index in a folder; None when it is not there or not whole."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        arrays: Arrays = {}
        for name, length in meta["lengths"].items():
            path = folder / f"{name}.npy"
            mapped = path.stat().st_size >= MMAP_FROM_BYTES
            arrays[name] = np.asarray(np.load(path, mmap_mode="r" if mapped else None))
            if len(arrays[name]) != length:
                return None
        return open_index(spec.packing, arrays, spec.sequence_length), Counts(**meta["counts"])
    except (OSError, ValueError, KeyError, EOFError):
        return None


def _reason(folder: Path, key: dict[str, str]) -> str:
    """Why there is none: what differs from the newest index of a shard of this name."""
    name = folder.name.rsplit(".index-", 1)[0]
    others = sorted(
        folder.parent.glob(f"{glob.escape(name)}.index-*/meta.json"),
        key=lambda p: p.stat().st_mtime,
    )
    same_part = []
    for path in others:
        other = json.loads(path.read_text()).get("key", {})
        if other.get("split", "").split(",")[0] == key["split"].split(",")[0]:
            same_part.append(other)
    if not same_part:
        return "none yet"
    changes = [
        f"{field} was {same_part[-1].get(field)}, is {value}"
        for field, value in key.items()
        if same_part[-1].get(field) != value and "fingerprint" not in field
    ]
    return "the one in the cache is for other data or settings (" + "; ".join(changes) + ")"


def _remove_abandoned(folder: Path) -> None:
    for path in folder.parent.glob(f".{glob.escape(folder.name)}.*"):
        if path.is_dir() and time.time() - path.stat().st_mtime > ABANDONED_AFTER_S:
            shutil.rmtree(path, ignore_errors=True)
