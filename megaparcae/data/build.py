"""From the data section of a config to the training and validation datasets."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megaparcae.config.schema import DataConfig, DatasetConfig, ModelConfig, ValidationConfig
from megaparcae.data.blend import check_weights, make_blend
from megaparcae.data.dataset import TokenDataset, TokenSet
from megaparcae.data.index_cache import IndexSpec, cached_index
from megaparcae.data.indexed import IndexedDataset
from megaparcae.data.shard_checks import bos_of, check_shard
from megaparcae.data.split import DocumentSplit
from megaparcae.data.tokenizer import Tokenizer, load_tokenizer
from megaparcae.errors import UserError
from megaparcae.log import logger

OPEN_FILES_PER_SET = 10
"""Memory maps of one set (the shard's files, the indices of two parts), with a margin."""


@dataclass(frozen=True)
class _Common:
    """What all sets of a run share."""

    data: DataConfig
    sequence_length: int
    vocab_size: int
    seed: int
    tokenizer: Tokenizer | None


@dataclass(frozen=True)
class _Source:
    """An opened shard and what the config says of it."""

    option: str
    shard: IndexedDataset
    weight: float | None
    check_ids: bool


def open_datasets(
    data: DataConfig, model: ModelConfig, validation: ValidationConfig, *, seed: int
) -> tuple[TokenDataset, TokenDataset | None]:
    """(training, validation) data; None when validation is off or nothing is held out.

    Opens, checks and indexes every shard. All ranks may call it at once: one of them builds.
    Documents that are held out stay out of training also when validation is off.
    Raises UserError for shards that do not fit the run and for parts too small for one row.
    """
    if not data.train:
        raise UserError(
            "data.train is empty; list at least one shard: data.train: [{prefix: PATH}]"
        )
    common = _Common(data, model.sequence_length, model.vocab_size, seed, _tokenizer(data))
    fraction = 0.0 if data.validation else data.validation_fraction
    sources = _open_shards("data.train", data.train, common)
    train_data = _dataset(sources, DocumentSplit("train", fraction, seed), common)
    if not validation.interval or not (data.validation or fraction):
        return train_data, None
    if data.validation:
        own = _open_shards("data.validation", data.validation, common)
        validation_data = _dataset(own, DocumentSplit(), common)
    else:
        drawn = [replace(one, weight=None) for one in sources if one.weight != 0]
        validation_data = _dataset(drawn, DocumentSplit("validation", fraction, seed), common)
    _check_validation_size(validation_data, validation.num_sequences, data)
    return train_data, validation_data


def open_all_documents(
    data: DataConfig, *, sequence_length: int, vocab_size: int, seed: int = 0
) -> TokenDataset:
    """Every document of data.train, whatever the split: for evaluation and inspection."""
    common = _Common(data, sequence_length, vocab_size, seed, _tokenizer(data))
    return _dataset(_open_shards("data.train", data.train, common), DocumentSplit(), common)


def _tokenizer(data: DataConfig) -> Tokenizer | None:
    return load_tokenizer(data.tokenizer, fast=False) if data.tokenizer else None


def _open_shards(option: str, entries: Sequence[DatasetConfig], common: _Common) -> list[_Source]:
    check_weights(option, [entry.weight for entry in entries])
    _allow_open_files(OPEN_FILES_PER_SET * len(entries))
    sources = []
    for number, entry in enumerate(entries):
        name = f"{option}[{number}]"
        try:
            shard = IndexedDataset(entry.prefix)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            raise UserError(
                f"{option} lists {len(entries)} shards, more than this process may open at once; "
                "merge them with tools/inspect_data.py merge, or raise the limit with ulimit -n"
            ) from None
        check_ids = check_shard(name, shard, common.tokenizer, common.vocab_size)
        sources.append(_Source(name, shard, entry.weight, check_ids))
    return sources


def _dataset(sources: Iterable[_Source], split: DocumentSplit, common: _Common) -> TokenDataset:
    sets = [_token_set(source, split, common) for source in sources]
    if split.part != "validation":  # of small sets there may be nothing held out
        for one in sets:
            _check_set_size(one, split, common)
    sizes = [one.index.num_rows for one in sets]
    needs_bos = any(one.index.adds_bos for one in sets)
    return TokenDataset(
        sets,
        make_blend(sizes, [one.weight for one in sets], common.seed),
        sequence_length=common.sequence_length,
        vocab_size=common.vocab_size,
        bos_id=bos_of(common.tokenizer, [one.shard for one in sets]) if needs_bos else None,
        document_mask=common.data.document_mask,
    )


def _token_set(source: _Source, split: DocumentSplit, common: _Common) -> TokenSet:
    spec = IndexSpec(
        packing=common.data.packing,
        sequence_length=common.sequence_length,
        reuse=common.data.cropped_tail == "reuse",
        split=split,
        tokenizer=common.tokenizer.identity if common.tokenizer else None,
    )
    index, counts = cached_index(source.shard, spec, common.data.cache_dir)
    return TokenSet(source.option, source.shard, index, counts, source.weight, source.check_ids)


def _check_set_size(one: TokenSet, split: DocumentSplit, common: _Common) -> None:
    if one.index.num_rows or one.weight == 0:
        return
    part = "" if split.part == "all" else f" {split.part} part"
    raise UserError(
        f"{one.option} ({one.name}):{part} has {one.counts.num_tokens} tokens, too few for one row "
        f"of model.sequence_length={common.sequence_length} and its label; use a shorter sequence, "
        "more text" + (" or a smaller data.validation_fraction" if part else "")
    )


def _check_validation_size(dataset: TokenDataset, num_sequences: int, data: DataConfig) -> None:
    if dataset.num_samples >= num_sequences:
        return
    where = "data.validation"
    remedy = "give more validation text"
    if not data.validation:
        where = f"the part held out by data.validation_fraction={data.validation_fraction}"
        remedy = "raise data.validation_fraction"
    lower = (
        f"set validation.num_sequences to at most {dataset.num_samples}"
        if dataset.num_samples
        else "switch validation off with validation.interval 0"
    )
    raise UserError(
        f"validation.num_sequences={num_sequences}, but {where} gives {dataset.num_samples} rows "
        f"of model.sequence_length={dataset.sequence_length}; {remedy}, use shorter sequences, or "
        f"{lower}"
    )


def _allow_open_files(needed: int) -> None:
    """Raise this process's own limit of open files, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed + 256
    if soft in (-1, resource.RLIM_INFINITY) or soft >= wanted:
        return
    limit = wanted if hard in (-1, resource.RLIM_INFINITY) else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    logger.debug("limit of open files raised from %d to %d", soft, limit)
