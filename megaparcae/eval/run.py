"""What tools/evaluate.py measures of a loaded model: the loss of text, and in-context tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megaparcae.config.schema import DataConfig, DatasetConfig, ModelConfig, RunConfig
from megaparcae.data.build import open_all_documents, open_datasets
from megaparcae.data.indexed import IndexedDataset
from megaparcae.data.tokenizer import Tokenizer, load_tokenizer
from megaparcae.errors import UserError
from megaparcae.eval.bundle import open_bundle
from megaparcae.eval.core import CoreOptions, evaluate_core
from megaparcae.eval.loss import DepthLoss, evaluate_loss
from megaparcae.eval.ranks import Ranks
from megaparcae.eval.results import ResultFile, TaskResult
from megaparcae.eval.rows import LossRows, dataset_rows, text_rows
from megaparcae.eval.scoring import Scorer
from megaparcae.eval.token_bytes import token_bytes

DOCUMENTS_COMPARED, TOKENS_COMPARED, TAIL = 8, 512, 16
"""Of each shard, to see whether a tokenizer is the one that wrote it."""


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """Which text the loss is measured on."""

    data: tuple[str, ...] = ()
    """Shard prefixes or text files; empty takes the run's own validation rows."""
    packing: str | None = None
    """best_fit or concatenate, for shards; null is the run's, else best_fit."""
    max_rows: int | None = None
    """Only the first rows; null takes all."""
    key: str = "text"
    """JSON key of the text."""
    batch_tokens: int = 16384


def measure_loss(
    scorer: Scorer,
    options: LossOptions,
    *,
    run: RunConfig | None,
    tokenizer: str | None,
    ranks: Ranks,
) -> list[DepthLoss]:
    """The loss at the scorer's depths."""
    rows = loss_rows(scorer.config, options, run=run, tokenizer=tokenizer)
    return evaluate_loss(scorer, rows, batch_tokens=options.batch_tokens, ranks=ranks)


def loss_rows(
    model: ModelConfig, options: LossOptions, *, run: RunConfig | None, tokenizer: str | None
) -> LossRows:
    """What `options` name, or the run's validation rows."""
    rows = _all_rows(model, options, run, tokenizer)
    return rows if options.max_rows is None else rows.first(options.max_rows)


def _all_rows(
    model: ModelConfig, options: LossOptions, run: RunConfig | None, tokenizer: str | None
) -> LossRows:
    known = load_tokenizer(tokenizer, fast=False) if tokenizer else None
    if not options.data:
        return _validation_rows(run, known)
    shards = [Path(f"{one}.idx").is_file() for one in options.data]
    length = model.sequence_length
    if not any(shards):
        return text_rows(options.data, need_tokenizer(tokenizer), length, options.key)
    if not all(shards):
        raise UserError(
            f"--data: {options.data[shards.index(False)]} is no shard (no .idx), but others are; "
            "give shards or text, not both"
        )
    packing = options.packing or (run.data.packing if run else "best_fit")
    data = DataConfig(
        train=tuple(DatasetConfig(prefix=prefix) for prefix in options.data),
        packing="best_fit" if packing == "best_fit" else "concatenate",
        document_mask=run.data.document_mask if run else False,
        # an export's tokenizer is another file than the one that wrote the shards
        tokenizer=None if known and _reads_shards(known, options.data) else tokenizer,
        cache_dir=run.data.cache_dir if run else None,
    )
    vocab_size = model.vocab_size
    dataset = open_all_documents(data, sequence_length=length, vocab_size=vocab_size)
    return dataset_rows(dataset, dataset.num_samples, known)


def _reads_shards(tokenizer: Tokenizer, prefixes: Sequence[str]) -> bool:
    """Whether it encodes the text of each shard's first documents as the shard has it."""
    special = token_bytes(tokenizer) == 0
    for shard in map(IndexedDataset, prefixes):
        for document in range(min(DOCUMENTS_COMPARED, shard.num_documents)):
            ids = shard.get(document)[:TOKENS_COMPARED].astype(np.int64)
            if len(ids) and ids.max() >= len(special):
                return False
            ids = ids[~special[ids]]
            again = tokenizer.encode(tokenizer.decode(ids))
            whole = max(0, len(ids) - TAIL)  # a word that is cut encodes otherwise
            if again[:whole] != ids[:whole].tolist():
                return False
    return True


def _validation_rows(run: RunConfig | None, tokenizer: Tokenizer | None) -> LossRows:
    """The rows that the run itself validates on."""
    if run is None:
        raise UserError("--data is missing: only a checkpoint of ours knows its validation text")
    _, data = open_datasets(run.data, run.model, run.validation, seed=run.train.seed)
    if data is None:
        raise UserError("--data is missing, and the run validates on nothing; give shards or text")
    return dataset_rows(data, run.validation.num_sequences, tokenizer)


def measure_core(
    scorer: Scorer,
    folder: str,
    options: CoreOptions,
    *,
    tokenizer: str | None,
    identity: str,
    results: Path | None,
    ranks: Ranks,
) -> list[TaskResult]:
    """The results of the in-context tasks in a bundle's folder; `identity` names the weights."""
    known = need_tokenizer(tokenizer)
    settings = {
        "model": identity,
        "tokenizer": known.identity,
        "bundle": str(Path(folder).resolve()),
        "max_items": options.max_items,
        "start": scorer.start,
        "dtype": str(scorer.dtype),
    }
    bundle = open_bundle(folder)
    return evaluate_core(
        scorer, known, bundle, options, ResultFile(results, settings, ranks), ranks
    )


def need_tokenizer(path: str | None) -> Tokenizer:
    """UserError when the model's folder has none and none was given."""
    if path is None:
        raise UserError("the model's folder names no tokenizer; give one with --tokenizer")
    return load_tokenizer(path, fast=False)


def depths(text: str | None, mean_recurrence: int, architecture: str) -> list[int]:
    """The numbers of --num-loops; the mean of training without it, 1 for a Transformer."""
    if text is None:
        return [mean_recurrence if architecture == "looped" else 1]
    return integers("--num-loops", text)


def integers(option: str, text: str) -> list[int]:
    """Integers with commas between them."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{option}={text}: give integers with commas, such as 1,4,8") from None
