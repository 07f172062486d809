"""Shards joined and divided, documents untouched."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megaparcae.data.indexed import IndexedDataset, with_suffix
from megaparcae.data.writer import IndexedWriter
from megaparcae.errors import UserError

SUMMED = ("documents", "empty_documents", "tokens", "text_bytes")
DOCUMENTS_AT_ONCE = 1 << 14


def merge(prefixes: Sequence[str], output_prefix: str) -> IndexedDataset:
    """One shard of several, in the given order; they must share dtype and tokenizer."""
    shards = [IndexedDataset(prefix) for prefix in prefixes]
    _require_free(prefixes, output_prefix)
    first = shards[0]
    for shard in shards[1:]:
        if shard.dtype != first.dtype:
            raise UserError(
                f"{shard.prefix} holds {shard.dtype}, {first.prefix} {first.dtype}: merge needs "
                "one dtype; preprocess one of them again with --dtype"
            )
        for name in ("identity", "vocab_size"):
            ours, theirs = _tokenizer(first, name), _tokenizer(shard, name)
            if None not in (ours, theirs) and ours != theirs:
                raise UserError(
                    f"{shard.prefix} was made with another tokenizer than {first.prefix}; "
                    "merge only shards of one tokenizer"
                )
    with IndexedWriter(output_prefix, first.dtype) as writer:
        for shard in shards:
            writer.add_shard(shard)
        writer.close(_merged_sidecar(shards))
    return IndexedDataset(output_prefix)


def split(prefix: str, output_prefix: str, num_parts: int) -> list[IndexedDataset]:
    """`{output_prefix}_{i}`, i in 0 .. num_parts - 1: runs of documents with about equal tokens."""
    shard = IndexedDataset(prefix)
    if not 1 <= num_parts <= shard.num_documents:
        raise UserError(
            f"--parts={num_parts} must be between 1 and {shard.num_documents}, the "
            f"documents of {prefix}"
        )
    width = len(str(num_parts - 1))
    outputs = [f"{output_prefix}_{i:0{width}d}" for i in range(num_parts)]
    for output in outputs:
        _require_free([prefix], output)
    cuts = _cuts(shard, num_parts)
    for i, output in enumerate(outputs):
        _write_documents(shard, cuts[i], cuts[i + 1], output)
    return [IndexedDataset(output) for output in outputs]


def _cuts(shard: IndexedDataset, num_parts: int) -> list[int]:
    """First document of each part, and the end; every part has a document."""
    wanted = np.arange(1, num_parts) * (shard.num_tokens * shard.dtype.itemsize) // num_parts
    cuts = [0, *np.searchsorted(shard.pointers, wanted).tolist(), shard.num_documents]
    for i in range(1, num_parts):
        cuts[i] = min(max(cuts[i], cuts[i - 1] + 1), shard.num_documents - (num_parts - i))
    return cuts


def _write_documents(shard: IndexedDataset, first: int, last: int, output: str) -> None:
    with IndexedWriter(output, shard.dtype) as writer:
        for start in range(first, last, DOCUMENTS_AT_ONCE):
            for document in range(start, min(start + DOCUMENTS_AT_ONCE, last)):
                writer.add(shard.get(document))
        sidecar = None
        if shard.sidecar is not None:
            sidecar = {**shard.sidecar, "documents": last - first, "tokens": writer.num_tokens}
            share = writer.num_tokens / max(shard.num_tokens, 1)
            sidecar["text_bytes"] = round(shard.sidecar.get("text_bytes", 0) * share)
            sidecar["part_of"] = {"shard": shard.prefix, "documents": [first, last]}
        writer.close(sidecar)


def _merged_sidecar(shards: Sequence[IndexedDataset]) -> dict[str, Any] | None:
    """Sums of the parts' records; None when a part has none."""
    records = [shard.sidecar for shard in shards if shard.sidecar is not None]
    if len(records) < len(shards):
        return None
    merged = {**records[0], "append_eod": all(record.get("append_eod") for record in records)}
    for name in SUMMED:
        merged[name] = sum(record.get(name, 0) for record in records)
    merged.pop("part_of", None)
    sources = {s["fingerprint"]: s for record in records for s in record.get("sources", [])}
    merged["sources"], merged["num_sources"] = list(sources.values()), len(sources)
    together = "".join(str(record.get("source_fingerprint")) for record in records)
    merged["source_fingerprint"] = hashlib.sha256(together.encode()).hexdigest()
    merged["merged_from"] = [
        {"shard": shard.prefix, "source_fingerprint": record.get("source_fingerprint")}
        for shard, record in zip(shards, records, strict=True)
    ]
    return merged


def _tokenizer(shard: IndexedDataset, name: str) -> str | int | None:
    value: str | int | None = (shard.sidecar or {}).get("tokenizer", {}).get(name)
    return value


def _require_free(inputs: Sequence[str], output: str) -> None:
    here = {Path(prefix).resolve() for prefix in inputs}
    if Path(output).resolve() in here or with_suffix(output, ".idx").exists():
        raise UserError(
            f"--output-prefix {output}: a shard of that name is there already; choose another name"
        )
