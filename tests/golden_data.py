"""Golden numbers (tests/golden) as our configurations, canonical tensors and models."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from megaparcae.checkpoint.names import (
    Dialect,
    canonical_shapes,
    join_parts,
    official_entries,
    split_parts,
)
from megaparcae.config.schema import ModelConfig
from megaparcae.model.build import build_model

GOLDEN = Path(__file__).parent / "golden"

_TINY = {
    "vocab_size": 256,
    "sequence_length": 64,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_heads": 4,
}
_SMALL = {
    "vocab_size": 64,
    "sequence_length": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "num_prelude_layers": 1,
    "num_coda_layers": 1,
    "init": "scaled",
}
CONFIGS = {
    "parcae": ModelConfig(**_TINY),
    "gpt": ModelConfig(**_TINY, architecture="transformer", num_layers=3),
    "gqa": ModelConfig(
        architecture="transformer",
        num_layers=2,
        vocab_size=64,
        sequence_length=32,
        hidden_size=32,
        intermediate_size=64,
        num_heads=4,
        num_kv_heads=2,
    ),
    "swiglu_linear": ModelConfig(
        **_SMALL,
        mlp="swiglu",
        qk_bias=True,
        qk_norm=False,
        injection="linear",
        prelude_norm=False,
        tie_embeddings=False,
        logit_softcap=15.0,
    ),
    "add_takase": ModelConfig(**_SMALL, injection="additive", scale_embeddings=True),
    "huginn": ModelConfig(
        **_TINY | {"intermediate_size": 176},
        num_prelude_layers=1,
        num_coda_layers=1,
        block="sandwich",
        mlp="swiglu",
        qk_norm=False,
        qk_bias=True,
        value_embeddings=False,
        norm_eps=1e-6,
        scale_embeddings=True,
        injection="linear",
        prelude_norm=False,
        readout=False,
        loop_norm=True,
        init="scaled",
    ),
}
"""The models of the golden files."""


def read_json(name: str) -> dict:
    """All of a golden json file."""
    return json.loads((GOLDEN / f"{name}.json").read_text())


def meta(name: str) -> dict:
    """Settings and scalar results of a tensor file."""
    return read_json(name)["meta"]


def tensors(name: str, prefix: str = "") -> dict[str, Tensor]:
    """Tensors of a file whose names begin with `prefix`, without it."""
    data = load_file(GOLDEN / f"{name}.safetensors")
    return {k.removeprefix(prefix): v for k, v in data.items() if k.startswith(prefix)}


def dialect(model: str) -> Dialect:
    """How the authors name the tensors of the golden model."""
    return {"huginn": "huginn", "gpt": "gpt", "gqa": "gpt"}.get(model, "parcae")


def canonical(model: str, official: dict[str, Tensor]) -> dict[str, Tensor]:
    """The authors' tensors (weights or gradients) under our names."""
    config = CONFIGS[model]
    shapes = canonical_shapes(config)
    found = {}
    for entry in official_entries(config, dialect(model)):
        if entry.official in official:
            parts = split_parts(entry, official[entry.official], shapes)
            found.update(zip(entry.canonical, parts, strict=True))
    return found


def official_gradients(model: str, module: nn.Module) -> dict[str, Tensor]:
    """Our gradients under the authors' names; a tied head has none of its own."""
    gradients = {name: p.grad for name, p in module.named_parameters()}
    entries = official_entries(CONFIGS[model], dialect(model))
    if CONFIGS[model].tie_embeddings:
        entries = [entry for entry in entries if entry.official != "lm_head.weight"]
    return {e.official: join_parts(e, [gradients[name] for name in e.canonical]) for e in entries}


def load_model(model: str, weights: dict[str, Tensor]) -> nn.Module:
    """The golden model with the authors' weights."""
    module = build_model(CONFIGS[model])
    module.load_state_dict(canonical(model, weights), strict=True)
    return module


def golden_model(model: str) -> nn.Module:
    """The golden model with its own weights."""
    match model:
        case "parcae" | "gpt" | "huginn":
            return load_model(model, tensors(f"{model}_tiny"))
        case "gqa":
            return load_model(model, tensors("gpt_tiny_forward", "gqa.weights/"))
        case _:
            return load_model(model, tensors("parcae_variants", f"{model}.weights/"))


def relative(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|"""
    return (torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b)).item()


def largest(a: Tensor, b: Tensor) -> float:
    """Largest absolute difference."""
    return (a - b).abs().max().item()
