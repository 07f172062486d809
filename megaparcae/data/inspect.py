"""Looking at shards: what is in one, and whether every number in it holds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megaparcae.data.indexed import IndexedDataset

CHUNK = 1 << 20
"""Documents or tokens looked at together."""
MAX_FINDINGS = 10


def describe(shard: IndexedDataset) -> str:
    """Counts, where the shard comes from, and a histogram of document lengths."""
    lengths = shard.lengths
    lines = [
        f"{shard.prefix}: {shard.num_documents:,} documents, {shard.num_tokens:,} tokens "
        f"({shard.dtype}), {shard.bin_path.stat().st_size / 1e6:,.2f} MB",
    ]
    record = shard.sidecar
    if record is None:
        lines.append("no sidecar: tokenizer and source unknown")
    else:
        tokenizer = record.get("tokenizer", {})
        lines.append(
            f"tokenizer {tokenizer.get('path')} ({str(tokenizer.get('identity'))[:12]}), "
            f"{tokenizer.get('vocab_size')} ids, "
            f"end of text {'on' if record.get('append_eod') else 'off'}"
        )
        text, tokens = record.get("text_bytes", 0), max(record.get("tokens", 0), 1)
        lines.append(
            f"{text / 1e6:,.2f} MB of text, {text / tokens:.3f} bytes/token, "
            f"{record.get('empty_documents', 0):,} empty documents left out or kept by choice, "
            f"{record.get('num_sources', 0)} inputs"
        )
    if len(lengths):
        quantiles = np.quantile(lengths, [0, 0.1, 0.5, 0.9, 1]).astype(int)
        names = ("shortest", "10 %", "median", "90 %", "longest")
        lines.append(
            ", ".join(f"{name} {value:,}" for name, value in zip(names, quantiles, strict=True))
        )
        lines += _histogram(lengths)
    return "\n".join(lines)


def verify(shard: IndexedDataset) -> list[str]:
    """Everything that is wrong with a shard (opening it has checked header and sizes)."""
    findings: list[str] = []
    for check in (_pointers, _borders, _ids, _ends, _checksums):
        for finding in check(shard):
            findings.append(finding)
            if len(findings) >= MAX_FINDINGS:
                return [*findings, "... and perhaps more"]
    return findings


def _histogram(lengths: np.ndarray) -> list[str]:
    """One bar for every power of two."""
    exponents = np.zeros(33, dtype=np.int64)
    tokens = np.zeros(33, dtype=np.int64)
    for start in range(0, len(lengths), CHUNK):
        chunk = np.asarray(lengths[start : start + CHUNK], dtype=np.int64)
        bins = np.frexp(np.maximum(chunk, 0))[1]  # bin b holds 2^(b-1) .. 2^b - 1
        exponents += np.bincount(bins, minlength=33)
        tokens += np.bincount(bins, weights=chunk, minlength=33).astype(np.int64)
    used = np.flatnonzero(exponents)
    rows = []
    for b in range(used[0], used[-1] + 1):
        bar = "#" * round(40 * exponents[b] / exponents.max())
        name = f"{(1 << b) >> 1:,} - {max((1 << b) - 1, 0):,}"
        share = tokens[b] / max(tokens.sum(), 1)
        rows.append(f"{name:>21} tokens: {exponents[b]:>11,} documents, {share:6.1%} {bar}")
    return rows


def _pointers(shard: IndexedDataset) -> Iterator[str]:
    expected, item = 0, shard.dtype.itemsize
    for start in range(0, shard.num_documents, CHUNK):
        lengths = np.asarray(shard.lengths[start : start + CHUNK], dtype=np.int64)
        pointers = shard.pointers[start : start + CHUNK]
        if (lengths < 0).any():
            yield f"document {start + int(np.argmax(lengths < 0))} has a negative length"
            return
        ends = expected + np.cumsum(lengths) * item
        starts = np.concatenate([[expected], ends[:-1]])
        wrong = np.flatnonzero(pointers != starts)
        if len(wrong):
            document = start + int(wrong[0])
            yield (
                f"document {document} starts at byte {pointers[wrong[0]]}, by the lengths before "
                f"it at byte {starts[wrong[0]]} ({len(wrong)} such)"
            )
            return
        expected = int(ends[-1])


def _borders(shard: IndexedDataset) -> Iterator[str]:
    borders = shard.document_indices
    if not len(borders) or borders[0] != 0 or borders[-1] != shard.num_documents:
        yield f"document borders do not run from 0 to {shard.num_documents}"
    for start in range(0, len(borders), CHUNK):
        if (np.diff(borders[start : start + CHUNK + 1]) < 0).any():
            yield f"document borders decrease near border {start}"
            return


def _ids(shard: IndexedDataset) -> Iterator[str]:
    vocabulary = (shard.sidecar or {}).get("tokenizer", {}).get("vocab_size")
    limit = vocabulary if vocabulary is not None else np.iinfo(shard.dtype).max + 1
    for start in range(0, shard.num_tokens, CHUNK):
        chunk = shard.tokens[start : start + CHUNK]
        wrong = np.flatnonzero((chunk < 0) | (chunk >= limit))
        if len(wrong):
            yield (
                f"token {start + int(wrong[0])} has id {chunk[wrong[0]]}, the limit is {limit - 1}"
            )
            return


def _ends(shard: IndexedDataset) -> Iterator[str]:
    record = shard.sidecar or {}
    if not record.get("append_eod"):
        return
    eos = record.get("tokenizer", {}).get("eos_id")
    for start in range(0, shard.num_documents, CHUNK):
        lengths = np.asarray(shard.lengths[start : start + CHUNK], dtype=np.int64)
        ends = shard.pointers[start : start + CHUNK] // shard.dtype.itemsize + lengths - 1
        bad = lengths == 0
        inside = ~bad & (ends >= 0) & (ends < shard.num_tokens)
        bad[inside] = shard.tokens[ends[inside]] != eos
        if bad.any():
            document = start + int(np.argmax(bad))
            yield f"document {document} does not end with the end-of-text id {eos}"
            return


def _checksums(shard: IndexedDataset) -> Iterator[str]:
    files = (shard.sidecar or {}).get("files", {})
    for kind, path in (("bin", shard.bin_path), ("idx", shard.idx_path)):
        recorded = files.get(kind, {}).get("sha256")
        if recorded is not None and recorded != _sha256(path):
            yield f"{path} has another checksum than {shard.prefix}.json says: it was changed"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(CHUNK):
            digest.update(data)
    return digest.hexdigest()
