"""The record beside a shard, `{prefix}.json`: which tokenizer and which text it was made from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megaparcae.data.tokenizer import Tokenizer

TOOL = "megaparcae preprocess 1"
LISTED_SOURCES = 1000


@dataclass
class SourceRecord:
    """What one input gave."""

    path: str
    bytes: int
    documents: int = 0
    """Of the first JSON key."""
    _digest: hashlib._Hash = field(default_factory=hashlib.sha256)

    def add(self, fingerprint: str, documents: int) -> None:
        """Count a block, blocks in order."""
        self._digest.update(fingerprint.encode())
        self.documents += documents

    def as_dict(self) -> dict[str, int | str]:
        """For the sidecar."""
        fingerprint = self._digest.hexdigest()
        return {
            "path": self.path,
            "bytes": self.bytes,
            "documents": self.documents,
            "fingerprint": fingerprint,
        }


@dataclass
class KeyTotals:
    """Counts of one JSON key."""

    documents: int = 0
    empty: int = 0
    tokens: int = 0
    bytes: int = 0


def tokenizer_record(tokenizer: Tokenizer) -> dict[str, int | str | None]:
    """Identity of a tokenizer."""
    return {
        "kind": tokenizer.kind,
        "path": str(tokenizer.path),
        "identity": tokenizer.identity,
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id,
    }


def build_sidecar(
    key: str,
    totals: KeyTotals,
    dtype: np.dtype,
    append_eod: bool,
    tokenizer: Tokenizer,
    sources: Sequence[SourceRecord],
) -> dict[str, Any]:
    """Contents of the sidecar of a new shard; the writer adds `files` (bytes and checksums)."""
    records = [source.as_dict() for source in sources]
    together = hashlib.sha256("".join(str(r["fingerprint"]) for r in records).encode())
    return {
        "tool": TOOL,
        "json_key": key,
        "tokenizer": tokenizer_record(tokenizer),
        "engine": tokenizer.engine,
        "dtype": dtype.name,
        "append_eod": append_eod,
        "documents": totals.documents,
        "empty_documents": totals.empty,
        "tokens": totals.tokens,
        "text_bytes": totals.bytes,
        "source_fingerprint": together.hexdigest(),
        "num_sources": len(records),
        "sources": records[:LISTED_SOURCES],
    }
