"""Rows of tokens by global sample id: what training and validation read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megaparcae.data.best_fit import Counts
from megaparcae.data.blend import Blend
from megaparcae.data.indexed import IndexedDataset
from megaparcae.data.packing import RowIndex
from megaparcae.data.rows import document_ids, read_tokens
from megaparcae.errors import UserError

# n rows, S sequence length


@dataclass(frozen=True)
class TokenSet:
    """One part (train, validation, all) of one shard, cut into rows."""

    option: str
    """Where it stands in the config, such as data.train[0]."""
    shard: IndexedDataset
    index: RowIndex
    counts: Counts
    weight: float | None = None
    check_ids: bool = False
    """Hold every token that is read against the vocabulary: nothing vouches for the shard."""

    @property
    def name(self) -> str:
        """The shard's prefix."""
        return self.shard.prefix


@dataclass(frozen=True)
class Rows:
    """A batch: inputs are tokens[:, :-1], labels tokens[:, 1:]."""

    sample_ids: np.ndarray
    """int64 [n]."""
    tokens: np.ndarray
    """[n, S + 1] in the shards' dtype, perhaps read-only; whoever makes a batch widens it once."""
    document_ids: np.ndarray | None
    """int32 [n, S]: 0, 1, 2, ... along the row, by the document an input belongs to; None unless
    data.document_mask is on."""


class TokenDataset:
    """Sets, and the blend that says which row of which set a sample id is.

    A pure function of (config, seed, sample id): it has no state, any id can be read at any time,
    from any thread. Ids have no end: after an epoch comes the next one, in another order.
    """

    def __init__(
        self,
        sets: Sequence[TokenSet],
        blend: Blend,
        *,
        sequence_length: int,
        vocab_size: int,
        bos_id: int | None,
        document_mask: bool = False,
    ) -> None:
        self.sets = tuple(sets)
        self.blend = blend
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size
        self.bos_id = bos_id
        self.document_mask = document_mask
        self._files = [one.shard.tokens.view(np.uint8).data for one in self.sets]

    @property
    def num_samples(self) -> int:
        """Rows of one epoch: every row of every set that is drawn."""
        return self.blend.num_samples

    def num_samples_for_epochs(self, num_epochs: int) -> int:
        """Samples of exactly num_epochs passes over every row.

        Raises UserError when weights decide how often each set is seen.
        """
        drawn = [one for one in self.sets if one.weight != 0]
        if len(drawn) > 1 and drawn[0].weight is not None:
            raise UserError(
                f"data.num_epochs={num_epochs} is not defined with weights, which repeat some sets "
                "more than others; leave every weight null (one epoch is then every row once), or "
                "leave data.num_epochs null and set train.num_steps"
            )
        return num_epochs * self.num_samples

    def rows(self, sample_ids: np.ndarray) -> Rows:
        """The rows of these samples, in their order (ids int64 [n], 0 or more)."""
        sample_ids = np.asarray(sample_ids, np.int64)
        sets, _, numbers = self.blend.locate(sample_ids)
        present = [0] if len(self.sets) == 1 else np.unique(sets).tolist()
        if len(present) == 1:
            return Rows(sample_ids, *self._read(present[0], numbers))
        dtype = np.result_type(*{one.shard.dtype for one in self.sets})
        tokens = np.empty((len(sample_ids), self.sequence_length + 1), dtype)
        ids = np.empty(tokens[:, :-1].shape, np.int32) if self.document_mask else None
        for number in present:
            where = np.flatnonzero(sets == number)
            tokens[where], part_ids = self._read(number, numbers[where])
            if ids is not None and part_ids is not None:
                ids[where] = part_ids
        return Rows(sample_ids, tokens, ids)

    def _read(self, number: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Tokens [n, S + 1] in the shard's dtype, and document ids, of rows of one set."""
        one = self.sets[number]
        segments = one.index.segments(rows)
        bos_id = self.bos_id if one.index.adds_bos else None
        width = self.sequence_length + 1
        tokens = read_tokens(self._files[number], segments, width, one.shard.dtype, bos_id)
        if one.check_ids:
            self._check_range(one, tokens)
        if not self.document_mask:
            return tokens, None
        ids = document_ids(one.shard, one.index, segments, len(rows), self.sequence_length)
        return tokens, ids

    def _check_range(self, one: TokenSet, tokens: np.ndarray) -> None:
        low = 0 if tokens.dtype.kind == "u" else int(tokens.min(initial=0))
        high = int(tokens.max(initial=0))
        if low < 0 or high >= self.vocab_size:
            raise UserError(
                f"{one.option} ({one.name}) holds the token id {low if low < 0 else high}, but "
                f"model.vocab_size={self.vocab_size} allows 0 to {self.vocab_size - 1}; the shard "
                "belongs to another tokenizer: preprocess the text with the run's own, or set "
                "model.vocab_size to the shard's"
            )
