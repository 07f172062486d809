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


def samples(
    prefix: Sequence[str],
    *,
    config: str | None = None,
    overrides: Sequence[str] = (),
    sequence_length: int,
    packing: str,
    tokenizer: str | None = None,
    sample: int = 0,
    count: int = 1,
) -> Iterator[str]:
    """The draw table, then `count` samples from `sample` on: of a run's config, or of one epoch
    over all documents of some shards. Arguments are the options of the command line."""
    if bool(prefix) == bool(config):
        raise UserError("show takes either shards or --config; give one of them")
    if sample < 0:
        raise UserError(f"--sample={sample} must be 0 or more")
    if config:
        run = load_config(config, overrides)
        no_validation = replace(run.validation, interval=0)
        data, _ = open_datasets(run.data, run.model, no_validation, seed=run.train.seed)
        tokenizer, drawn = run.data.tokenizer, sample + count
    else:
        data = _all_documents(prefix, sequence_length, packing, tokenizer)
        drawn = data.num_samples
    yield draw_table(data, drawn)
    decode = load_tokenizer(tokenizer, fast=False).decode if tokenizer else None
    for number in range(sample, sample + count):
        yield describe_sample(data, number, decode)


def _all_documents(
    prefixes: Sequence[str], sequence_length: int, packing: str, tokenizer: str | None
) -> TokenDataset:
    if packing not in ("best_fit", "concatenate"):
        raise UserError(f"--packing={packing}: choose best_fit or concatenate")
    config = DataConfig(
        train=tuple(DatasetConfig(prefix=prefix) for prefix in prefixes),
        packing="best_fit" if packing == "best_fit" else "concatenate",
        tokenizer=tokenizer,
    )
    return open_all_documents(config, sequence_length=sequence_length, vocab_size=ANY_VOCABULARY)
