"""How many bytes of text each token stands for: what turns nats per token into bits per byte."""

from __future__ import annotations

import json

import numpy as np

from megaparcae.data.engines import byte_characters
from megaparcae.data.tokenizer import Tokenizer

SPACE = "▁"
"""Sentencepiece's visible space: one byte of text."""


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """int64 [vocab_size]: UTF-8 bytes of each token's text, 0 for special tokens."""
    sizes = np.zeros(tokenizer.vocab_size, np.int64)
    if tokenizer.kind == "sentencepiece":
        _sentencepiece(tokenizer, sizes)
    else:
        _bpe(tokenizer, sizes)
    return sizes


def _bpe(tokenizer: Tokenizer, sizes: np.ndarray) -> None:
    definition = json.loads(tokenizer.path.read_bytes())
    table = byte_characters()
    special = {t["id"] for t in definition.get("added_tokens") or [] if t["special"]}
    for text, index in definition["model"]["vocab"].items():
        if index not in special:
            plain = all(character in table for character in text)
            sizes[index] = len(text) if plain else len(text.encode())
    for token in definition.get("added_tokens") or []:
        if not token["special"]:
            sizes[token["id"]] = len(token["content"].encode())


def _sentencepiece(tokenizer: Tokenizer, sizes: np.ndarray) -> None:
    from sentencepiece import SentencePieceProcessor

    model = SentencePieceProcessor(model_file=str(tokenizer.path))
    for index in range(len(sizes)):
        if model.is_byte(index):
            sizes[index] = 1
        elif not (model.is_control(index) or model.is_unknown(index)):
            sizes[index] = len(model.id_to_piece(index).replace(SPACE, " ").encode())
