"""Made-up shards: documents of log-normal length, tokens that are random or not there at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megaparcae.data.indexed import DTYPE_CODES, HEADER, MAGIC, VERSION
from megaparcae.data.writer import IndexedWriter

VOCABULARY = 32768
TOKENS = np.dtype(np.uint16)
SIDECAR = {"tokenizer": {"identity": "made up", "vocab_size": VOCABULARY, "bos_id": 0, "eos_id": 1}}
"""Vouches for the ids, as every shard's of ours does."""


def made_up_lengths(count: int, mean: int, seed: int = 0) -> np.ndarray:
    """int32 [count]: log-normal with sigma 1, as of pages of the web; at least 1."""
    lengths = np.random.default_rng(seed).lognormal(np.log(mean) - 0.5, 1.0, count)
    return np.maximum(lengths, 1).astype(np.int32)


def write_random_shard(prefix: Path, num_tokens: int, mean_length: int) -> None:
    """A shard of about num_tokens random tokens."""
    lengths = made_up_lengths(-(-num_tokens // mean_length), mean_length)
    random = np.random.default_rng(1)
    with IndexedWriter(prefix, TOKENS) as writer:
        for some in np.array_split(lengths, -(-len(lengths) // 4096)):
            tokens = random.integers(2, VOCABULARY, int(some.sum()), dtype=TOKENS)
            writer.add_many(tokens, some)
        writer.close(SIDECAR)


def write_sparse_shard(prefix: Path, lengths: np.ndarray) -> int:
    """A shard whose .bin has the right size and nothing on the disk; its number of tokens."""
    ends = np.cumsum(lengths, dtype=np.int64)
    header = HEADER.pack(MAGIC, VERSION, DTYPE_CODES[TOKENS], len(lengths), len(lengths) + 1)
    with Path(f"{prefix}.idx").open("wb") as index:
        index.write(header)
        lengths.astype("<i4").tofile(index)
        ((ends - lengths) * TOKENS.itemsize).astype("<i8").tofile(index)
        np.arange(len(lengths) + 1, dtype="<i8").tofile(index)
    with Path(f"{prefix}.bin").open("wb") as tokens:
        tokens.truncate(int(ends[-1]) * TOKENS.itemsize)
    return int(ends[-1])
