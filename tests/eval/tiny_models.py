"""Small models and a byte tokenizer for the tests of evaluation."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch

from megaparcae.config.schema import ModelConfig
from megaparcae.data.engines import byte_characters
from megaparcae.data.tokenizer import Tokenizer, load_tokenizer
from megaparcae.model.build import build_model

BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": False,
    "use_regex": True,
}

LOOPED = ModelConfig(
    vocab_size=259,
    vocab_multiple=64,
    sequence_length=64,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    num_prelude_layers=1,
    num_core_layers=2,
    num_coda_layers=1,
    logit_softcap=20.0,
)
RDM = dataclasses.replace(
    LOOPED,
    block="sandwich",
    mlp="swiglu",
    value_embeddings=False,
    injection="linear",
    prelude_norm=False,
    readout=False,
    loop_norm=True,
    tie_embeddings=False,
    logit_softcap=None,
)
TRANSFORMER = dataclasses.replace(LOOPED, architecture="transformer", num_layers=3)


def random_model(config: ModelConfig, seed: int = 0) -> torch.nn.Module:
    """Weights large enough for probabilities that differ."""
    model = build_model(config).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def write_byte_tokenizer(folder: Path) -> Path:
    """A tokenizer.json of the 256 bytes behind BOS, EOS and padding; no merges."""
    specials = ["<|bos|>", "<|eos|>", "<|pad|>"]
    vocabulary = {name: i for i, name in enumerate(specials)}
    vocabulary |= {character: byte + 3 for character, byte in byte_characters().items()}
    added = [
        {
            "id": i,
            "content": name,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for i, name in enumerate(specials)
    ]
    definition = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": BYTE_LEVEL,
        "post_processor": None,
        "decoder": BYTE_LEVEL,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    return folder


def byte_tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(write_byte_tokenizer(folder), fast=False)
