"""Validation loss, perplexity and bits per byte at any list of depths.

Every row's loss is a float64 sum, and the rows are added in order with exact rounding:
the result does not depend on batches or ranks beyond the noise of the model's own arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from megaparcae.errors import UserError
from megaparcae.eval.batching import by_length, padded, reported
from megaparcae.eval.ranks import Ranks
from megaparcae.eval.rows import LossRows, Row
from megaparcae.eval.scoring import ScoredBatch, Scorer, Targets

# B rows, S positions, n labels


@dataclass(frozen=True, kw_only=True)
class DepthLoss:
    """The loss at one number of loops."""

    num_loops: int
    loss: float
    """Mean -log p in nats per token."""
    perplexity: float
    """exp(loss)."""
    bits_per_byte: float | None
    """Nats of the tokens that stand for text / (ln 2 x their bytes)."""
    num_tokens: int
    num_bytes: int | None
    num_rows: int


@dataclass(frozen=True)
class _RowSums:
    """Of one row at one depth."""

    num_loops: int
    row: int
    nats: float
    text_nats: float
    num_tokens: int
    num_bytes: int


def evaluate_loss(
    scorer: Scorer, rows: LossRows, *, batch_tokens: int, ranks: Ranks | None = None
) -> list[DepthLoss]:
    """The loss over all rows at each of the scorer's depths; equal on every rank."""
    ranks = ranks or Ranks()
    _check_vocabulary(scorer, rows)
    batches = ranks.share(by_length(rows.lengths, batch_tokens))
    sums: list[_RowSums] = []
    for numbers in reported(batches, len(batches), "loss"):
        sums += _score_batch(scorer, rows, numbers)
    sums = sorted(ranks.gather(sums), key=lambda one: one.row)
    return [
        _total(loops, [s for s in sums if s.num_loops == loops], rows) for loops in scorer.num_loops
    ]


def _score_batch(scorer: Scorer, rows: LossRows, numbers: Sequence[int]) -> list[_RowSums]:
    read = rows.read(numbers)
    labels = np.concatenate([row.tokens[1:] for row in read])
    borders = np.cumsum([0, *(len(row.tokens) - 1 for row in read)])
    sizes = None if rows.bytes_of_token is None else rows.bytes_of_token[labels]
    found = []
    for loops, scores in scorer.score(make_batch(read, numbers, scorer.device)).items():
        for i, number in enumerate(numbers):
            part = slice(borders[i], borders[i + 1])
            nats, row_sizes = scores.losses[part], None if sizes is None else sizes[part]
            text = 0.0 if row_sizes is None else float(nats[row_sizes > 0].sum())
            num_bytes = 0 if row_sizes is None else int(row_sizes.sum())
            found.append(_RowSums(loops, number, float(nats.sum()), text, len(nats), num_bytes))
    return found


def make_batch(rows: Sequence[Row], numbers: Sequence[int], device: torch.device) -> ScoredBatch:
    """Rows side by side, all their labels scored, row after row."""
    lengths = [len(row.tokens) - 1 for row in rows]
    positions = np.concatenate([np.arange(length) for length in lengths])
    documents = None
    if rows[0].documents is not None:
        documents = padded([row.documents for row in rows if row.documents is not None], -1)

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return ScoredBatch(
        ids=tensor(padded([row.tokens[:-1] for row in rows], 0)),
        targets=Targets(
            rows=tensor(np.repeat(np.arange(len(rows)), lengths)),
            positions=tensor(positions),
            ids=tensor(np.concatenate([row.tokens[1:] for row in rows])),
        ),
        numbers=np.array(numbers, np.int64),
        documents=None if documents is None else tensor(documents),
    )


def _total(loops: int, sums: Sequence[_RowSums], rows: LossRows) -> DepthLoss:
    num_tokens = sum(one.num_tokens for one in sums)
    loss = math.fsum(one.nats for one in sums) / num_tokens
    num_bytes, bits = None, None
    if rows.bytes_of_token is not None:
        num_bytes = rows.text_bytes or sum(one.num_bytes for one in sums)
        nats = math.fsum(one.text_nats for one in sums)
        bits = nats / math.log(2) / num_bytes if num_bytes else None
    return DepthLoss(
        num_loops=loops,
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)),
        bits_per_byte=bits,
        num_tokens=num_tokens,
        num_bytes=num_bytes,
        num_rows=len(sums),
    )


def _check_vocabulary(scorer: Scorer, rows: LossRows) -> None:
    sizes = rows.bytes_of_token
    if sizes is not None and len(sizes) > scorer.config.vocab_size:
        raise UserError(
            f"the tokenizer has {len(sizes)} tokens, but model.vocab_size="
            f"{scorer.config.vocab_size}; give the model's own tokenizer with --tokenizer"
        )


def loss_table(losses: Sequence[DepthLoss]) -> str:
    """For the terminal."""
    lines = [f"{'T':>4} {'loss':>10} {'perplexity':>12} {'bits/byte':>10}"]
    for one in losses:
        bits = "-" if one.bits_per_byte is None else f"{one.bits_per_byte:.6f}"
        lines.append(f"{one.num_loops:>4} {one.loss:>10.6f} {one.perplexity:>12.4f} {bits:>10}")
    first = losses[0]
    size = f"{first.num_tokens} tokens in {first.num_rows} rows"
    if first.num_bytes is not None:
        size += f", {first.num_bytes} bytes of text"
    return "\n".join([*lines, size])


def as_records(losses: Sequence[DepthLoss]) -> list[dict[str, float | int | None]]:
    """For --json."""
    return [asdict(one) for one in losses]
