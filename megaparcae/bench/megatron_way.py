"""The way of Megatron's tools/preprocess_data.py, as a stand-in for it:

python -m megaparcae.bench.megatron_way --input JSONL --output-prefix P --tokenizer-model T

A pool maps over lines; ids come back as Python lists and one process appends them to
megatron-core's IndexedDatasetBuilder, or to a plain copy of what it does where it is not installed.
Tokenizers are called directly, without Megatron's layers around them, which is faster than it is.
"""

from __future__ import annotations

import argparse
import json
import time
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import numpy as np

from megaparcae.data.indexed import DTYPE_CODES, HEADER, MAGIC, VERSION, best_dtype
from megaparcae.data.tokenizer import Tokenizer, load_tokenizer

CHUNK = 32
"""Lines of one task, as there."""


class PlainBuilder:
    """The part of IndexedDatasetBuilder that is used here, with the same files."""

    def __init__(self, bin_path: str, dtype: type[Any]) -> None:
        self.file = Path(bin_path).open("wb")  # noqa: SIM115 - closed by finalize
        self.dtype = np.dtype(dtype)
        self.lengths: list[int] = []
        self.borders = [0]

    def add_document(self, ids: list[int], lengths: list[int]) -> None:
        """One document, of sequences with these lengths."""
        self.file.write(np.array(ids, self.dtype).tobytes())
        self.lengths.extend(lengths)
        self.borders.append(len(self.lengths))

    def finalize(self, idx_path: str) -> None:
        """Write the index."""
        self.file.close()
        lengths = np.array(self.lengths, np.int32)
        pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * self.dtype.itemsize
        with Path(idx_path).open("wb") as index:
            code = DTYPE_CODES[self.dtype]
            index.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(self.borders)))
            index.write(lengths.tobytes() + pointers.tobytes())
            index.write(np.array(self.borders, np.int64).tobytes())


class Encoder:
    """What a worker of the pool does with a line."""

    tokenizer: Tokenizer

    def __init__(self, model: str, append_eod: bool) -> None:
        self.model, self.append_eod = model, append_eod

    def initializer(self) -> None:
        """Once in every worker."""
        Encoder.tokenizer = load_tokenizer(self.model, fast=False)

    def encode(self, line: str) -> tuple[list[int], list[int], int]:
        """Ids, lengths of sequences, characters of the line."""
        ids = Encoder.tokenizer.encode(json.loads(line)["text"])
        if ids and self.append_eod:
            assert Encoder.tokenizer.eod_id is not None
            ids.append(Encoder.tokenizer.eod_id)
        return ids, [len(ids)], len(line)


def make_builder(path: str, dtype: type[Any]) -> Any:
    """megatron-core's where it is installed."""
    try:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    except ImportError:
        return PlainBuilder(path, dtype)
    return IndexedDatasetBuilder(path, dtype)


def main() -> None:
    """Write the shard, and beside it seconds from the start of the pool to the end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--input", required=True)
    parser.add_argument("--output-prefix", required=True)
    parser.add_argument("--tokenizer-model", required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--append-eod", action="store_true")
    args = parser.parse_args()
    dtype = best_dtype(load_tokenizer(args.tokenizer_model, fast=False).vocab_size).type
    prefix = f"{args.output_prefix}_text_document"
    builder = make_builder(f"{prefix}.bin", dtype)
    encoder = Encoder(args.tokenizer_model, args.append_eod)
    begin = time.perf_counter()
    with (
        Path(args.input).open(encoding="utf-8") as lines,
        Pool(args.workers, initializer=encoder.initializer) as pool,
    ):
        for ids, lengths, _ in pool.imap(encoder.encode, lines, CHUNK):
            builder.add_document(ids, lengths)
    builder.finalize(f"{prefix}.idx")
    record = {"seconds": time.perf_counter() - begin, "builder": type(builder).__module__}
    Path(f"{args.output_prefix}.times.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
