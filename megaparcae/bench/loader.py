"""Reading rows of a shard, and building the indices that say where they are."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megaparcae.bench.measure import PeakMemory, Variant, in_processes, take_turns, timed
from megaparcae.bench.options import LoaderOptions
from megaparcae.bench.report import Report
from megaparcae.bench.shards import (
    TOKENS,
    VOCABULARY,
    made_up_lengths,
    write_random_shard,
    write_sparse_shard,
)
from megaparcae.config.schema import DataConfig, DatasetConfig
from megaparcae.data.build import open_all_documents
from megaparcae.data.dataset import TokenDataset
from megaparcae.data.index_cache import IndexSpec, cached_index
from megaparcae.data.indexed import IndexedDataset
from megaparcae.data.split import DocumentSplit

PACKINGS = ("concatenate", "best_fit")
READ_BLOCK = 1 << 23
"""Tokens read at once where all are read."""


def run(options: LoaderOptions) -> Report:
    """Tables `reading` and `index`."""
    with tempfile.TemporaryDirectory(prefix="bench-loader-") as name:
        folder = Path(name)
        prefix = options.data or str(folder / "tokens")
        if options.data is None:
            write_random_shard(Path(prefix), options.megabytes * 10**6 // 2, options.mean_length)
        tables = {
            "reading": reading(prefix, folder, options),
            "index": index_costs(Path(f"{prefix}.bin"), folder, options),
        }
    return Report("loader", options, tables)


def reading(prefix: str, folder: Path, options: LoaderOptions) -> list[dict[str, Any]]:
    """Samples/s in the order of training, from warm maps, against slices of the same size.

    Ours also finds each row, puts it together from its documents and joins `rows` of them; the
    slices are only copied.
    """
    shard = IndexedDataset(prefix)
    vocabulary = ((shard.sidecar or {}).get("tokenizer") or {}).get("vocab_size", VOCABULARY)
    variants = {"memmap slices": _slices(shard, options)}
    for packing in PACKINGS:
        for mask in (False, True):
            data = DataConfig(
                train=(DatasetConfig(prefix=prefix),),
                packing=packing,  # type: ignore[arg-type]
                cache_dir=str(folder),
                document_mask=mask,
            )
            dataset = open_all_documents(
                data, sequence_length=options.sequence_length, vocab_size=vocabulary
            )
            name = f"{packing}, document ids" if mask else packing
            variants[name] = _reader(dataset, options)
    return take_turns(variants, options.repeats).rows("memmap slices", samples=1)


def _slices(shard: IndexedDataset, options: LoaderOptions) -> Variant:
    """Seconds per sample of copies of S + 1 tokens from random places of a bare memmap."""
    tokens = np.memmap(shard.bin_path, shard.dtype, "r")
    _warm(tokens)
    width = options.sequence_length + 1
    random = np.random.default_rng(2)

    def read() -> None:
        for start in random.integers(0, len(tokens) - width, options.rows).tolist():
            tokens[start : start + width].copy()

    return _per_sample(read, options)


def _reader(dataset: TokenDataset, options: LoaderOptions) -> Variant:
    """Seconds per sample of consecutive sample ids, which are in random places."""
    _warm(dataset.sets[0].shard.tokens)
    first = iter(range(0, 10**12, options.rows))

    def read() -> None:
        dataset.rows(next(first) + np.arange(options.rows))

    return _per_sample(read, options)


def _warm(tokens: np.ndarray) -> None:
    """Look at every page, so that this mapping has it."""
    tokens[:: mmap.PAGESIZE // tokens.itemsize].sum()


def _per_sample(read: Any, options: LoaderOptions) -> Variant:
    def run() -> float:
        count, begin, now = 0, time.perf_counter(), 0.0
        while now < options.seconds:
            read()
            count += options.rows
            now = time.perf_counter() - begin
        return now / count

    return run


def index_costs(read_file: Path, folder: Path, options: LoaderOptions) -> list[dict[str, Any]]:
    """Building each index of many documents, against a cumsum of their lengths and against reading
    their tokens, at the rate at which `read_file` is read from the page cache and from the disk.
    """
    prefix = folder / "sparse"
    lengths = made_up_lengths(options.documents, options.mean_length)
    num_tokens = write_sparse_shard(prefix, lengths)
    share = num_tokens * TOKENS.itemsize / read_file.stat().st_size
    variants: dict[str, Variant] = {
        "cumsum": timed(lambda: np.cumsum(lengths, dtype=np.int64)),
        **{name: _builder(name, prefix, folder, options) for name in PACKINGS},
    }
    timings = take_turns(variants, options.repeats, warmups=0)
    reads = {
        "reading, cached": timed(lambda: _read_all(read_file)),
        "reading, from disk": lambda: _read_evicted(read_file),
    }
    read_timings = take_turns(reads, options.repeats)
    for name, seconds in read_timings.seconds.items():
        timings.seconds[f"tokens, {name}"] = [one * share for one in seconds]
    table = timings.rows("cumsum", documents=options.documents)
    for row in table:
        row["cumsums"] = 1 / row.pop("speedup")
        row["reads"] = row["seconds"] / timings.median("tokens, reading, cached")
        del row["speedup_low"], row["speedup_high"]
        if row["variant"] in PACKINGS:
            (peak,) = in_processes(_peak, [(row["variant"], prefix, folder, options)])
            row["peak_megabytes"] = peak / 1e6
    return table


def _builder(packing: str, prefix: Path, folder: Path, options: LoaderOptions) -> Variant:
    """Seconds of an index into an empty folder, files included."""
    spec = IndexSpec(
        packing=packing,
        sequence_length=options.sequence_length,
        reuse=True,
        split=DocumentSplit(),
    )

    def build() -> float:
        shard = IndexedDataset(prefix)
        with tempfile.TemporaryDirectory(dir=folder) as cache:
            return timed(lambda: cached_index(shard, spec, cache))()

    return build


def _peak(packing: str, prefix: Path, folder: Path, options: LoaderOptions) -> int:
    """Resident memory that a build adds in this process, bytes: mapped pages of the shard's index
    among them."""
    build = _builder(packing, prefix, folder, options)
    memory = PeakMemory()
    build()
    return memory.bytes()


def _blocks(path: Path) -> Iterator[np.ndarray]:
    tokens = np.memmap(path, TOKENS, "r")
    return (tokens[i : i + READ_BLOCK] for i in range(0, len(tokens), READ_BLOCK))


def _read_all(path: Path) -> None:
    """Every token once, into a buffer that stays in the processor's reach."""
    buffer = np.empty(READ_BLOCK, TOKENS)
    for block in _blocks(path):
        buffer[: len(block)] = block


def _read_evicted(path: Path) -> float:
    """Seconds of reading a file that has been thrown out of the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return timed(lambda: _read_all(path))()
