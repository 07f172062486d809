"""Our ModelConfig and the exported ParcaeConfig: one table, both directions."""

from __future__ import annotations

import dataclasses
import math

from megaparcae.config.schema import ModelConfig, RecurrenceConfig
from megaparcae.errors import UserError
from megaparcae.hf.configuration_parcae import ParcaeConfig

RENAMED = {
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "sequence_length": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
"""Fields of ModelConfig that transformers calls otherwise."""

SAME = (
    "architecture",
    "hidden_size",
    "intermediate_size",
    "num_prelude_layers",
    "num_core_layers",
    "num_coda_layers",
    "num_layers",
    "block",
    "mlp",
    "qk_norm",
    "qk_bias",
    "value_embeddings",
    "clip_qkv",
    "logit_softcap",
    "rope_theta",
    "scale_embeddings",
    "injection",
    "prelude_norm",
    "readout",
    "loop_norm",
    "state_init",
)
"""Fields with the same name and meaning."""

TRAINING = ("vocab_multiple", "init", "init_orthogonal", "residual_scale")
"""Fields that only training needs; kept in `ParcaeConfig.training` with the recurrence."""


def to_hf_config(config: ModelConfig, **overrides: object) -> ParcaeConfig:
    """The exported configuration; `overrides` are fields of ParcaeConfig (vocab_size, ...)."""
    values: dict[str, object] = {name: getattr(config, name) for name in SAME}
    values |= {there: getattr(config, here) for here, there in RENAMED.items()}
    training: dict[str, object] = {name: getattr(config, name) for name in TRAINING}
    training["recurrence"] = dataclasses.asdict(config.recurrence)
    values |= {
        "vocab_size": config.vocab_size,
        "num_loops": config.recurrence.mean_recurrence,
        "num_grad_loops": config.recurrence.num_grad_loops,
        "residual_multiplier": residual_multiplier(config),
        "training": training,
    }
    return ParcaeConfig(**(values | overrides))


def from_hf_config(config: ParcaeConfig) -> ModelConfig:
    """The trainer's configuration of an exported model."""
    values = {name: getattr(config, name) for name in SAME}
    values |= {here: getattr(config, there) for here, there in RENAMED.items()}
    training = dict(config.training or {})
    recurrence = dict(training.pop("recurrence", None) or {})
    recurrence.setdefault("mean_recurrence", config.num_loops)
    recurrence.setdefault("backprop_depth", min(config.num_grad_loops, config.num_loops))
    unknown = set(training) - set(TRAINING)
    if unknown:
        raise UserError(
            f"config.json: training.{min(unknown)} is unknown; use one of {', '.join(TRAINING)}"
        )
    return ModelConfig(
        vocab_size=config.vocab_size,
        recurrence=RecurrenceConfig(**recurrence),
        **values,
        **training,
    )


def residual_multiplier(config: ModelConfig) -> float:
    """The factor on both branches of every block: lambda / (N sqrt(L)), or 1.

    L stored layers; N loops = unrolled layers at mean recurrence / L.
    """
    if config.residual_scale is None:
        return 1.0
    layers = unrolled = config.num_stored_layers
    if config.architecture == "looped":
        unrolled += (config.recurrence.mean_recurrence - 1) * config.num_core_layers
    return config.residual_scale / (unrolled / layers * math.sqrt(layers))
