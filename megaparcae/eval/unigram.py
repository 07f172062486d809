"""The loss of a model that knows only how often each token occurs: what any training must beat."""

from __future__ import annotations

import numpy as np

from megaparcae.config.schema import RunConfig
from megaparcae.data.indexed import IndexedDataset
from megaparcae.data.split import DocumentSplit, document_blocks
from megaparcae.errors import UserError

BLOCK = 1 << 14


def unigram_entropy(config: RunConfig) -> float:
    """Entropy in nats per token of the token frequencies of a run's validation documents.

    H = -sum p log p with p counted on these documents themselves, so no unigram model does better
    on them. Raises UserError when the run holds nothing out.
    """
    entries = config.data.validation or config.data.train
    split = (
        DocumentSplit()
        if config.data.validation
        else DocumentSplit("validation", config.data.validation_fraction, config.train.seed)
    )
    counts = np.zeros(0, np.int64)
    for entry in entries:
        counts = _sum(counts, token_counts(IndexedDataset(entry.prefix), split))
    if not counts.sum():
        raise UserError(
            f"data.validation_fraction={config.data.validation_fraction} holds no document out; "
            "raise it or give data.validation"
        )
    return entropy(counts)


def token_counts(shard: IndexedDataset, split: DocumentSplit) -> np.ndarray:
    """int64 [largest id + 1]: how often each token occurs in a part of a shard."""
    counts = np.zeros(0, np.int64)
    for starts, lengths in document_blocks(shard, split, BLOCK):
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            counts = _sum(counts, np.bincount(shard.tokens[start : start + length]))
    return counts


def entropy(counts: np.ndarray) -> float:
    """-sum p log p in nats, p = counts / their sum."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def _sum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    short, long = sorted((a, b), key=len)
    total = long.copy()
    total[: len(short)] += short
    return total
