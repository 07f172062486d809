"""The samples of a run, or of some shards, listed with document borders and text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megaparcae.config.load import load_config
from megaparcae.config.schema import DataConfig, DatasetConfig
from megaparcae.data.build import open_all_documents, open_datasets
from megaparcae.data.dataset import TokenDataset
from megaparcae.data.describe import describe_sample, draw_table
from megaparcae.data.tokenizer import load_tokenizer
from megaparcae.errors import UserError

ANY_VOCABULARY = 2**31


def show_run(path: str, overrides: Sequence[str], first: int, count: int) -> Iterator[str]:
    """What a run of this config draws in all, then its samples first .. first + count - 1."""
    config = load_config(path, overrides)
    off = replace(config.validation, interval=0)
    data, _ = open_datasets(config.data, config.model, off, seed=config.train.seed)
    yield draw_table(data, first + count)
    yield from _samples(data, config.data.tokenizer, first, count)


def show_shards(
    prefixes: Sequence[str],
    *,
    sequence_length: int,
    packing: str,
    tokenizer: str | None,
    first: int,
    count: int,
) -> Iterator[str]:
    """One epoch over all documents of the shards, then samples first .. first + count - 1."""
    if packing not in ("best_fit", "concatenate"):
        raise UserError(f"--packing={packing}: choose best_fit or concatenate")
    config = DataConfig(
        train=tuple(DatasetConfig(prefix=prefix) for prefix in prefixes),
        packing="best_fit" if packing == "best_fit" else "concatenate",
        tokenizer=tokenizer,
    )
    data = open_all_documents(config, sequence_length=sequence_length, vocab_size=ANY_VOCABULARY)
    yield draw_table(data, data.num_samples)
    yield from _samples(data, tokenizer, first, count)


def _samples(data: TokenDataset, tokenizer: str | None, first: int, count: int) -> Iterator[str]:
    if first < 0:
        raise UserError(f"--sample={first} must be 0 or more")
    decode = load_tokenizer(tokenizer, fast=False).decode if tokenizer else None
    for sample in range(first, first + count):
        yield describe_sample(data, sample, decode)
