"""Does a shard belong to this run? Asked at start, from its sidecar, before a token is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megaparcae.data.indexed import IndexedDataset
from megaparcae.data.tokenizer import Tokenizer
from megaparcae.errors import UserError
from megaparcae.log import logger


def check_shard(
    option: str, shard: IndexedDataset, tokenizer: Tokenizer | None, vocab_size: int
) -> bool:
    """Refuse a shard of another tokenizer or a larger vocabulary (UserError).

    Returns whether its ids must be checked as they are read: nothing is known of them.
    """
    if shard.dtype.kind not in "iu":
        raise UserError(
            f"{option} ({shard.prefix}) holds {shard.dtype} numbers, not token ids; preprocess the "
            "text again"
        )
    record = tokenizer_record(shard)
    identity, shard_vocabulary = record.get("identity"), record.get("vocab_size")
    if identity is None:
        logger.info(  # every rank would say it; only rank 0's information is shown
            "warning: %s (%s) has no record of its tokenizer: whether it is the run's cannot be "
            "checked, only that its ids stay below model.vocab_size",
            option,
            shard.prefix,
        )
    elif tokenizer is not None and identity != tokenizer.identity:
        raise UserError(
            f"{option} ({shard.prefix}) was made with tokenizer {record.get('path', '')} "
            f"({identity[:12]}), the run's data.tokenizer={tokenizer.path} is another one "
            f"({tokenizer.identity[:12]}); give the shard's tokenizer or preprocess the text again"
        )
    if shard_vocabulary is None:
        return True
    if shard_vocabulary > vocab_size:
        raise UserError(
            f"{option} ({shard.prefix}) has a vocabulary of {shard_vocabulary} ids, more than "
            f"model.vocab_size={vocab_size}; set model.vocab_size to {shard_vocabulary}"
        )
    return False


def bos_of(tokenizer: Tokenizer | None, shards: Sequence[IndexedDataset]) -> int:
    """The id that opens a packed row: BOS, or the end-of-text token of a tokenizer without one.

    Taken from the run's tokenizer, else from the shards' sidecars. UserError when there is none.
    """
    if tokenizer is not None:
        found = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
        if found is None:
            raise UserError(
                "data.packing='best_fit' puts BOS in front of documents, but data.tokenizer="
                f"{tokenizer.path} has neither BOS nor EOS; use data.packing=concatenate or "
                "another tokenizer"
            )
        return found
    found_in = {_bos_or_eos(tokenizer_record(shard)) for shard in shards}
    bos_id = found_in.pop()
    if found_in or bos_id is None:
        raise UserError(
            "data.packing='best_fit' puts BOS in front of documents, and the shards do not say "
            "which id that is; set data.tokenizer, or use data.packing=concatenate"
        )
    return bos_id


def _bos_or_eos(record: dict[str, Any]) -> int | None:
    bos_id: int | None = record.get("bos_id")
    eos_id: int | None = record.get("eos_id")
    return bos_id if bos_id is not None else eos_id


def tokenizer_record(shard: IndexedDataset) -> dict[str, Any]:
    """What the sidecar says of the tokenizer: identity, vocab_size, bos_id, eos_id, path."""
    record = (shard.sidecar or {}).get("tokenizer")
    return record if isinstance(record, dict) else {}
