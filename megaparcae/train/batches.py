"""A rank's micro-batches as a pure function of the step: ids, depths, deal, tokens, h_0."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megaparcae.config.batch import BatchPlan
from megaparcae.config.schema import RunConfig
from megaparcae.data.dataset import Rows
from megaparcae.data.sampler import deal, step_sample_ids
from megaparcae.model.batch import Batch
from megaparcae.model.depth import start_state
from megaparcae.model.draws import sample_depths
from megaparcae.model.loop_plan import GRAD_COST, LoopPlan, depth_order

Ints = NDArray[np.int64]
VALIDATION_STEP = -1
"""Stands for the step in the random draws of validation, so that it is always the same."""
IGNORED = -100


class RowSource(Protocol):
    """Random access to packed rows; sample ids are unbounded."""

    def rows(self, sample_ids: Ints) -> Rows: ...


@dataclass(frozen=True)
class HostBatch:
    """One micro-batch in host memory (pinned where a GPU will take it), rows deepest first."""

    sample_ids: Ints
    tokens: Tensor
    """[B, S + 1] int64."""
    documents: Tensor | None
    """[B, S] int32."""
    num_no_grad: list[int]
    num_grad: list[int]


class BatchMaker:
    """Reads this rank's rows on the host, and turns them into what the model takes."""

    def __init__(
        self,
        config: RunConfig,
        plan: BatchPlan,
        *,
        dp_index: int,
        train: RowSource,
        validation: RowSource | None,
        device: torch.device,
    ) -> None:
        self.config = config
        self.plan = plan
        self.dp_index = dp_index
        self.train = train
        self.validation = validation
        self.device = device
        self.grad_cost = GRAD_COST + config.parallel.repeats_core

    def read(self, step: int) -> list[HostBatch]:
        """This rank's micro-batches of an optimizer step; safe to call from a reader thread."""
        ids = step_sample_ids(step, self.plan.global_batch)
        n, k = self.depths(step, ids)
        positions = deal(
            n + self.grad_cost * k,
            dp=self.plan.dp,
            micro_batches=self.plan.accumulation,
            rows=self.plan.micro_batch,
            mode=self.config.parallel.deal,
        )
        return [self._read_rows(ids, n, k, micro) for micro in positions[self.dp_index]]

    def depths(self, step: int, ids: Ints) -> tuple[Ints, Ints]:
        """Loops without and with gradient of these samples; none for a Transformer."""
        if self.config.model.architecture == "transformer":
            return np.zeros_like(ids), np.zeros_like(ids)
        recurrence = self.config.model.recurrence
        return sample_depths(recurrence, seed=self.config.train.seed, step=step, sample_ids=ids)

    def _read_rows(self, ids: Ints, n: Ints, k: Ints, rows: Ints) -> HostBatch:
        rows = rows[depth_order(n[rows].tolist(), k[rows].tolist())]
        read = self.train.rows(ids[rows])
        return HostBatch(
            ids[rows],
            *self._on_host(read),
            n[rows].tolist(),
            k[rows].tolist(),
        )

    def to_device(self, batches: list[HostBatch], step: int) -> list[Batch]:
        """The model's inputs; start states are drawn when the stage that needs them runs."""
        return [self._to_device(batch, step) for batch in batches]

    def _to_device(self, batch: HostBatch, step: int) -> Batch:
        tokens = self._send(batch.tokens)
        looped = self.config.model.architecture == "looped"
        depths = batch.num_no_grad, batch.num_grad
        return Batch(
            ids=tokens[:, :-1],
            labels=tokens[:, 1:],
            documents=None if batch.documents is None else self._send(batch.documents),
            plan=LoopPlan.from_depths(*depths, self.grad_cost) if looped else None,
            start_state=partial(
                start_state,
                self.config.model,
                seed=self.config.train.seed,
                step=step,
                sample_ids=batch.sample_ids,
                sequence_length=self.config.model.sequence_length,
                device=self.device,
            ),
        )

    def _on_host(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Tokens and document ids; pinned by the reader's thread, so that a step starts at once."""
        tokens = torch.from_numpy(rows.tokens.astype(np.int64))
        documents = None if rows.document_ids is None else torch.from_numpy(rows.document_ids)
        if self.device.type != "cuda":
            return tokens, documents
        return tokens.pin_memory(), None if documents is None else documents.pin_memory()

    def _send(self, host: Tensor) -> Tensor:
        return host.to(self.device, non_blocking=True)

    def validation_batches(self, num_loops: int) -> list[Batch]:
        """This rank's share of the validation rows, all `num_loops` deep.

        The rows are the same for every layout and batch size; ranks whose share is smaller get
        rows whose labels are ignored.
        """
        assert self.validation is not None
        total, rows = self.config.validation.num_sequences, self.plan.micro_batch
        per_rank = -(-total // (self.plan.dp * rows)) * rows
        ids = self.dp_index * per_rank + np.arange(per_rank)
        batches = []
        for some in ids.reshape(-1, rows):
            read = self.validation.rows(some % total)
            depths = [num_loops - 1] * rows, [1] * rows  # evaluation runs without gradient anyway
            host = HostBatch(some, *self._on_host(read), *depths)
            batch = self._to_device(host, VALIDATION_STEP)
            assert batch.labels is not None
            surplus = torch.from_numpy(some >= total).to(self.device)
            # not in place: labels and ids are views of the same tokens
            labels = batch.labels.masked_fill(surplus[:, None], IGNORED)
            batches.append(replace(batch, labels=labels))
        return batches
