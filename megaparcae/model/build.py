"""From a config to a model."""

from __future__ import annotations

from megaparcae.config.schema import ModelConfig
from megaparcae.model.looped_lm import LoopedLM
from megaparcae.model.transformer import Transformer


def build_model(config: ModelConfig) -> LoopedLM | Transformer:
    """The model `model.architecture` names, with unset weights on the default device."""
    match config.architecture:
        case "looped":
            return LoopedLM(config)
        case "transformer":
            return Transformer(config)
        case other:
            raise ValueError(f"model.architecture={other!r}: choose looped or transformer")
