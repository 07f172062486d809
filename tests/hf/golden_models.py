"""Golden checkpoints as our configuration and canonical tensors, and as the exported model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from megaparcae.checkpoint.names import canonical_shapes, official_entries, split_parts, to_hf
from megaparcae.config.schema import ModelConfig
from megaparcae.hf.config import to_hf_config
from megaparcae.hf.modeling_parcae import ParcaeForCausalLM
from megaparcae.hf.official import dialect_of, model_config_from_official

GOLDEN = Path(__file__).parents[1] / "golden"


def meta(name: str) -> dict:
    return json.loads((GOLDEN / f"{name}.json").read_text())["meta"]


def tensors(name: str, prefix: str = "") -> dict[str, Tensor]:
    data = load_file(GOLDEN / f"{name}.safetensors")
    return {k.removeprefix(prefix): v for k, v in data.items() if k.startswith(prefix)}


def canonical(config: ModelConfig, official: dict[str, Tensor]) -> dict[str, Tensor]:
    shapes = canonical_shapes(config)
    found = {}
    for entry in official_entries(config, dialect_of(official)):
        if entry.official in official:
            parts = split_parts(entry, official[entry.official], shapes)
            found.update(zip(entry.canonical, parts, strict=True))
    return found


def hf_model(official_config: dict, official: dict[str, Tensor], **changes) -> ParcaeForCausalLM:
    config = model_config_from_official(official_config)
    hf_config = to_hf_config(config, vocab_size=config.padded_vocab_size)
    for name, value in changes.items():
        setattr(hf_config, name, value)
    model = ParcaeForCausalLM._from_config(hf_config, dtype=torch.float32)
    state = {to_hf(k): v for k, v in canonical(config, official).items()}
    missing = model.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()
