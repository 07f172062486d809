"""Which documents of a shard belong to training and which are held out, document by document."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megaparcae.data.hashing import hash_u64
from megaparcae.data.indexed import IndexedDataset

HASH_BLOCK = 1 << 15
"""Documents hashed at once: the temporaries stay in the processor's cache."""


@dataclass(frozen=True)
class DocumentSplit:
    """Document i is held out when hash(seed, i) < fraction, so it stays there as a shard grows."""

    part: Literal["all", "train", "validation"] = "all"
    fraction: float = 0.0
    seed: int = 0

    def identity(self) -> str:
        """What a cached index depends on; a part that takes all documents depends on no seed."""
        if self.takes_all:
            return "all"
        return f"{self.part}, validation_fraction {self.fraction!r}, seed {self.seed}"

    @property
    def takes_all(self) -> bool:
        """No document is left out."""
        return self.part == "all" or (self.part == "train" and self.fraction == 0)

    def mask(self, first: int, stop: int) -> np.ndarray:
        """bool [stop - first]: the documents of this part among first .. stop - 1."""
        if self.takes_all:
            return np.ones(stop - first, bool)
        threshold = np.uint64(int(self.fraction * 2**64))
        held_out = np.empty(stop - first, bool)
        for block in range(first, stop, HASH_BLOCK):
            documents = np.arange(block, min(block + HASH_BLOCK, stop), dtype=np.uint64)
            below = hash_u64(self.seed, "validation split", documents) < threshold
            held_out[block - first : block - first + len(documents)] = below
        return held_out if self.part == "validation" else ~held_out


def document_blocks(
    shard: IndexedDataset, split: DocumentSplit, block_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(first token in the .bin, length in tokens), int64, of the part's non-empty documents."""
    itemsize = shard.dtype.itemsize
    for first in range(0, shard.num_documents, block_size):
        stop = min(first + block_size, shard.num_documents)
        lengths = np.array(shard.lengths[first:stop], np.int64)
        starts = np.array(shard.pointers[first:stop])
        starts //= itemsize
        kept = split.mask(first, stop) & (lengths > 0)
        yield (starts, lengths) if kept.all() else (starts[kept], lengths[kept])
