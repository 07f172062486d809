"""Losses of single tokens at several numbers of loops, from one pass through the loop.

The states of a looped model are nested: h_8 follows h_4. So the prelude and the deepest loop
run once, and every depth asked for adds a coda and a head.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megaparcae.config.schema import ModelConfig
from megaparcae.errors import UserError
from megaparcae.model.attention import AttentionContext
from megaparcae.model.batch import Batch
from megaparcae.model.depth import start_state
from megaparcae.model.loop_plan import LoopPlan
from megaparcae.model.looped_core import LoopInputs
from megaparcae.model.looped_lm import LoopedLM
from megaparcae.model.rope import rope_table
from megaparcae.model.transformer import Transformer

# B rows, S positions, d width, V vocabulary, n scored tokens

TOKENS_AT_ONCE = 1024
"""Tokens whose logits exist at the same time."""
EVALUATION_STEP = -1
"""Start states are drawn as those of validation during training."""


@dataclass(frozen=True, kw_only=True)
class Targets:
    """Which tokens to score: target[i] is what position[i] of row[i] should predict; each [n]."""

    rows: Tensor
    positions: Tensor
    ids: Tensor


@dataclass(frozen=True, kw_only=True)
class ScoredBatch:
    """Rows of tokens, padded on the right, and what of them counts."""

    ids: Tensor
    """[B, S]."""
    targets: Targets
    numbers: np.ndarray
    """int64 [B]: the row's number in the whole set; drawn start states depend on it."""
    documents: Tensor | None = None
    """[B, S], when attention stays inside a document."""
    branches: Tensor | None = None
    """[B, S]: 0 is the stem, i > 0 the i-th of several continuations, which see the stem and
    themselves; None is an ordinary row."""
    positions: Tensor | None = None
    """[B, S], with branches."""


@dataclass(frozen=True)
class Scores:
    """Of every target, in order, on the CPU."""

    losses: np.ndarray
    """float64 [n]: -log p(target) in nats."""
    hits: np.ndarray
    """bool [n]: the target is the likeliest token."""


class Scorer:
    """A model in evaluation, at fixed depths.

    `start` is the state h_0: `zero`, or `drawn` from the model's distribution as a function of
    (seed, row number). Either way a row's scores do not depend on the batch it stands in.
    """

    def __init__(
        self,
        model: LoopedLM | Transformer,
        *,
        num_loops: Sequence[int],
        start: Literal["zero", "drawn"] = "zero",
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = model.eval()
        self.config: ModelConfig = model.config
        self.num_loops = check_depths(num_loops, self.config)
        self.start = start
        self.seed = seed
        self.dtype = dtype
        self.device = next(model.parameters()).device

    @torch.no_grad()
    def score(self, batch: ScoredBatch) -> dict[int, Scores]:
        """Scores of the batch's targets by number of loops."""
        device, cast = self.device.type, self.dtype != torch.float32
        with torch.autocast(device, self.dtype) if cast else contextlib.nullcontext():
            return {loops: self._scores(x, batch.targets) for loops, x in self._outputs(batch)}

    def _outputs(self, batch: ScoredBatch) -> Iterator[tuple[int, Tensor]]:
        """(number of loops, normalised output [B, S, d]), shallow to deep."""
        model = self.model
        inner = Batch(ids=batch.ids, documents=batch.documents)
        context = self._context(batch)
        x = model.embed(batch.ids)
        if isinstance(model, Transformer):
            for name, block in model.layers.items():
                x = model.run_stored_block(block, int(name), x, inner, context)
            yield 1, model.final_norm(x)
            return
        for name, block in model.prelude.items():
            x = model.run_stored_block(block, int(name), x, inner, context)
        e = model.prelude_norm(x)
        h = self._start_state(batch).type_as(e)
        drive, rows = model.injection(e), model.core_value_rows(batch.ids)
        done = 0
        for loops in sorted(self.num_loops):
            plan = LoopPlan((), (len(x),) * (loops - done))
            h = model.core(h, *drive, inputs=LoopInputs(plan, context, rows), share=(0.0, 1.0))
            done = loops
            yield loops, self._after_loop(h, inner, context)

    def _after_loop(self, h: Tensor, batch: Batch, context: AttentionContext) -> Tensor:
        assert isinstance(self.model, LoopedLM)
        x = self.model.leave_loop(h)
        first = self.config.num_prelude_layers + self.config.num_core_layers
        for name, block in self.model.coda.items():
            x = self.model.run_stored_block(block, first + int(name), x, batch, context)
        return self.model.final_norm(x)

    def _start_state(self, batch: ScoredBatch) -> Tensor:
        """h_0 [B, S, d] fp32."""
        size = batch.ids.shape[1]
        if self.start == "zero":
            return torch.zeros(*batch.ids.shape, self.config.hidden_size, device=self.device)
        state = start_state(
            self.config,
            seed=self.seed,
            step=EVALUATION_STEP,
            sample_ids=batch.numbers,
            # always the same length, so that a row's draw does not depend on the padding
            sequence_length=max(size, self.config.sequence_length),
            device=self.device,
        )
        return state[:, :size]

    def _context(self, batch: ScoredBatch) -> AttentionContext:
        if batch.branches is None:
            return self.model.context(Batch(ids=batch.ids, documents=batch.documents))
        assert batch.positions is not None
        own = batch.branches[:, :, None] == batch.branches[:, None, :]  # [B, query, key]
        stem = (batch.branches == 0)[:, None, :]
        order = torch.arange(batch.ids.shape[1], device=self.device)
        mask = (own | stem) & (order[:, None] >= order[None, :])
        table = rope_table(batch.positions, self.config.head_dim, self.config.rope_theta)
        return AttentionContext(table, mask[:, None])

    def _scores(self, x: Tensor, targets: Targets) -> Scores:
        model = self.model
        weight = model.embedding.weight if self.config.tie_embeddings else model.head.weight
        losses, hits = [], []
        for begin in range(0, len(targets.ids), TOKENS_AT_ONCE):
            some = slice(begin, begin + TOKENS_AT_ONCE)
            picked = x[targets.rows[some], targets.positions[some]]  # [n, d]
            logits = model.logits(picked, weight)[:, : self.config.vocab_size]
            ids = targets.ids[some]
            losses.append(torch.nn.functional.cross_entropy(logits, ids, reduction="none").cpu())
            hits.append((logits.argmax(-1) == ids).cpu())
        return Scores(torch.cat(losses).double().numpy(), torch.cat(hits).numpy())


def check_depths(num_loops: Sequence[int], config: ModelConfig) -> tuple[int, ...]:
    """The numbers of loops, ascending and once each; UserError for what the model cannot run."""
    if not num_loops or min(num_loops) < 1:
        raise UserError(
            f"--num-loops={list(num_loops)}: give integers of at least 1, such as 1,4,8"
        )
    if config.architecture == "transformer" and set(num_loops) != {1}:
        raise UserError(
            f"--num-loops={list(num_loops)}: this model has no loop; leave the option out"
        )
    return tuple(sorted(set(num_loops)))
