"""Tables and listings for people: what a run will draw, and what is in a sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megaparcae.data.dataset import TokenDataset
from megaparcae.data.rows import documents_of
from megaparcae.errors import UserError


@dataclass(frozen=True)
class SamplePiece:
    """A stretch of one document in a sample."""

    column: int
    """Place of its first token in the sample, its BOS not counted."""
    document: int
    """Number of the document in its shard."""
    offset: int
    """Place of the first token in the document."""
    length: int
    document_length: int


def draw_table(dataset: TokenDataset, num_samples: int) -> str:
    """One line per set: weight, samples that a run of num_samples draws, epochs, tokens, losses."""
    header = (
        "set",
        "weight",
        "share",
        "samples",
        "epochs",
        "tokens",
        "rows",
        "cropped",
        "left out",
    )
    lines = [header]
    drawn = dataset.blend.count(num_samples)
    for one, share, samples in zip(dataset.sets, dataset.blend.shares, drawn, strict=True):
        rows, total = one.index.num_rows, max(1, one.counts.num_tokens)
        lines.append(
            (
                one.name,
                "by size" if one.weight is None else f"{one.weight:g}",
                f"{share:.4f}",
                f"{samples:,}",
                f"{samples / rows:.3f}" if rows else "-",
                f"{samples * dataset.sequence_length:,}",
                f"{rows:,}",
                f"{one.counts.cropped_tokens / total:.2%}",
                f"{one.counts.dropped_tokens:,}",
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    table = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join(table)


def plan_epochs(dataset: TokenDataset, num_epochs: int, global_batch_size: int) -> tuple[int, str]:
    """(steps of exactly num_epochs passes, one sentence about them).

    The last partial batch is not run: its samples are left out and counted.
    """
    samples = dataset.num_samples_for_epochs(num_epochs)
    steps, rest = divmod(samples, global_batch_size)
    if not steps:
        raise UserError(
            f"data.num_epochs={num_epochs} gives {samples} samples, fewer than "
            f"train.global_batch_size={global_batch_size}; use a smaller batch or more epochs"
        )
    left_out = sum(one.counts.dropped_tokens for one in dataset.sets if one.weight != 0)
    return steps, (
        f"data.num_epochs={num_epochs}: {dataset.num_samples:,} samples an epoch, {steps:,} steps "
        f"of {global_batch_size} use {steps * global_batch_size:,} samples "
        f"({steps * global_batch_size * dataset.sequence_length:,} tokens); left out: {rest} "
        f"samples of the last partial batch and, each epoch, {left_out:,} tokens that fill no row"
    )


def sample_pieces(dataset: TokenDataset, sample_id: int) -> list[SamplePiece]:
    """The documents in a sample, in order."""
    sets, _, rows = dataset.blend.locate(np.array([sample_id]))
    one = dataset.sets[int(sets[0])]
    segments = one.index.segments(rows)
    pieces = []
    for column, start, length in zip(
        segments.columns.tolist(), segments.starts.tolist(), segments.lengths.tolist(), strict=True
    ):
        token = start
        while token < start + length:
            document = int(documents_of(one.shard, np.array([token]))[0])
            offset = token - int(one.shard.pointers[document]) // one.shard.dtype.itemsize
            total = int(one.shard.lengths[document])
            taken = min(total - offset, start + length - token)
            pieces.append(SamplePiece(column + token - start, document, offset, taken, total))
            token += taken
    return pieces


def describe_sample(
    dataset: TokenDataset, sample_id: int, decode: Callable[[np.ndarray], str] | None = None
) -> str:
    """Listing of a sample: where it is from, and each document's part in it, with its text."""
    sets, epochs, rows = dataset.blend.locate(np.array([sample_id]))
    one = dataset.sets[int(sets[0])]
    tokens = dataset.rows(np.array([sample_id])).tokens[0]
    lines = [
        f"sample {sample_id}: set {one.name}, epoch {epochs[0]}, row {rows[0]}; {len(tokens)} "
        f"tokens, {dataset.sequence_length} inputs and the label of the last one"
    ]
    for piece in sample_pieces(dataset, sample_id):
        end = piece.column + piece.length
        whole = piece.length == piece.document_length
        part = "whole" if whole else f"[{piece.offset}, {piece.offset + piece.length}) of its"
        bos = "BOS + " if one.index.adds_bos else ""
        lines.append(
            f"  [{piece.column}, {end})  {bos}document {piece.document}, {part} "
            f"{piece.document_length} tokens"
        )
        if decode is not None:
            lines.append(f"    {decode(tokens[piece.column : end])!r}")
    return "\n".join(lines)
