"""The authors' checkpoints: config.json and pytorch_model.bin or model.pt, in three dialects.

`parcae` and `gpt` are Parcae's and its Transformer baseline's; `huginn` is Huginn's (RDM). What we
can't represent is refused by name, never dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from megaparcae.checkpoint.names import Dialect
from megaparcae.config.schema import ModelConfig, RecurrenceConfig
from megaparcae.errors import UserError

BUFFER = "freqs_cis"
"""Rotary table [1, block_size, 1, hd/2, 2] (cos, sin) in the authors' checkpoints; derived."""

SAMPLERS = {
    "poisson-truncated-full": "poisson",
    "poisson-full": "poisson_full",
    "poisson-fill": "poisson_fill",
    "fixed": "fixed",
    "poisson-lognormal-filling": "lognormal_poisson",
}
DRAWS = {"per-sequence": "sequence", "per-batch": "batch"}
INJECTIONS = {"diagonal": "diagonal", "linear": "linear", "add": "additive"}
INITS = {"scaled-zero": "scaled_zero", "scaled": "scaled", "takase": "scaled"}
BLOCKS = {"TransformerPreNormBlock": "pre_norm", "SandwichBlock": "sandwich"}
MLPS = {"BaseMLP": "relu2", "GatedMLP": "swiglu"}
STATES = {"like-init": "like_init"} | {s: s for s in ("zero", "normal", "embed", "unit")}

UNSUPPORTED = {
    "use_abacus": False,
    "bias": False,
    "debias_attention": False,
    "center_attention": False,
    "randomize_positions_from": None,
    "mup_model_scaling_factor": 1,
}
"""Options of the authors' configuration that must have these values."""


def dialect_of(names: Collection[str]) -> Dialect:
    """Which dialect a set of tensor names is in."""
    if any(name.endswith("attn.Wqkv.weight") for name in names):
        return "huginn"
    if any(name.startswith("transformer.h.") for name in names):
        return "gpt"
    if any(name.startswith("transformer.core_block.") for name in names):
        return "parcae"
    raise UserError(
        "the weights are in none of the authors' formats: transformer.core_block.* (Parcae and "
        "Huginn) or transformer.h.* (Transformer) are expected"
    )


def model_config_from_official(config: Mapping[str, Any]) -> ModelConfig:
    """Our configuration of the authors' config.json, whichever dialect it is in."""
    if "n_heads" in config:
        return _from_huginn(config)
    for name, value in UNSUPPORTED.items():
        if config.get(name, value) != value:
            raise UserError(
                f"config.json: {name}={config[name]!r} isn't supported; only {value!r} is"
            )
    rope = config.get("rope_settings") or {}
    if not rope.get("use_rope", True) or rope.get("rope_condense_ratio", 1) != 1:
        raise UserError(
            f"config.json: rope_settings={rope} isn't supported; use_rope must be true and "
            "rope_condense_ratio 1"
        )
    looped = "n_layer" not in config
    shared = {
        "vocab_size": config["vocab_size"],
        "vocab_multiple": _vocab_multiple(config),
        "sequence_length": config["block_size"],
        "hidden_size": config["n_embd"],
        "intermediate_size": config["intermediate_size"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "block": _pick(config, "block_class_name", BLOCKS),
        "mlp": _pick(config, "mlp_class_name", MLPS),
        "qk_norm": config["qk_norm"],
        "qk_bias": config["qk_bias"],
        "clip_qkv": config.get("clip_qkv"),
        "logit_softcap": config.get("logit_softcap"),
        "norm_eps": config["norm_eps"],
        "rope_theta": float(rope.get("rope_base", 50000)),
        "tie_embeddings": config["tie_embeddings"],
        "scale_embeddings": config["init_strategy"] == "takase",
        "init": _pick(config, "init_strategy", INITS),
        "init_orthogonal": config["init_orthogonal"],
    }
    if not looped:
        return ModelConfig(architecture="transformer", num_layers=config["n_layer"], **shared)
    return ModelConfig(**shared, **_loop_fields(config))


def _loop_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    width = config.get("recurrent_embedding_dimension") or config["n_embd"]
    if width != config["n_embd"]:
        raise UserError(
            f"config.json: recurrent_embedding_dimension={width} must equal n_embd="
            f"{config['n_embd']}; a state of another width isn't supported"
        )
    return {
        "num_prelude_layers": config["n_layers_in_prelude"],
        "num_core_layers": config["n_layers_in_recurrent_block"],
        "num_coda_layers": config["n_layers_in_coda"],
        "injection": _pick(config, "injection_type", INJECTIONS),
        "prelude_norm": config["prelude_norm"],
        "state_init": _pick(config, "state_init", STATES),
        "recurrence": RecurrenceConfig(
            mean_recurrence=config["mean_recurrence"],
            backprop_depth=config["mean_backprop_depth"],
            sampler=_pick(config, "sampling_scheme", SAMPLERS),
            draw_per=_pick(config, "recurrent_iteration_method", DRAWS),
        ),
    }


def _from_huginn(config: Mapping[str, Any]) -> ModelConfig:
    return ModelConfig(
        vocab_size=config["vocab_size"],
        vocab_multiple=_vocab_multiple(config),
        sequence_length=config["block_size"],
        hidden_size=config["n_embd"],
        intermediate_size=config["intermediate_size"],
        num_heads=config["n_heads"],
        num_prelude_layers=config["n_layers_in_prelude"],
        num_core_layers=config["n_layers_in_recurrent_block"],
        num_coda_layers=config["n_layers_in_coda"],
        block="sandwich",
        mlp="swiglu",
        qk_norm=False,
        qk_bias=config["qk_bias"],
        value_embeddings=False,
        norm_eps=config["norm_eps"],
        rope_theta=float(config["rope_base"]),
        tie_embeddings=config["tie_embeddings"],
        scale_embeddings=True,
        injection="linear",
        prelude_norm=False,
        readout=False,
        loop_norm=True,
        init="scaled",
        init_orthogonal=False,
        recurrence=RecurrenceConfig(
            mean_recurrence=config["mean_recurrence"],
            backprop_depth=config["mean_backprop_depth"],
            sampler="lognormal_poisson",
            draw_per="batch",
        ),
    )


def official_config(config: ModelConfig) -> tuple[Dialect, dict[str, Any]]:
    """The authors' config.json of our model, and the dialect of its weights."""
    if _is_huginn(config):
        return "huginn", _huginn_config(config)
    _check_official(config)
    shared = {
        "name": "megaparcae",
        "block_size": config.sequence_length,
        "n_embd": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "vocab_size": config.vocab_size,
        "padding_multiple": config.vocab_multiple,
        "padded_vocab_size": config.padded_vocab_size,
        "rope_settings": {
            "use_rope": True,
            "rope_condense_ratio": 1,
            "rope_base": _whole(config.rope_theta),
        },
        "block_class_name": _key(BLOCKS, config.block),
        "norm_class_name": "RMSNorm",
        "norm_eps": config.norm_eps,
        "mlp_class_name": _key(MLPS, config.mlp),
        "nonlin_name": "ReLU2" if config.mlp == "relu2" else "SiLU",
        "qk_bias": config.qk_bias,
        "init_strategy": "takase" if config.scale_embeddings else _key(INITS, config.init),
        "init_orthogonal": config.init_orthogonal,
        "clip_qkv": config.clip_qkv,
        "qk_norm": config.qk_norm,
        "logit_softcap": config.logit_softcap,
        "tie_embeddings": config.tie_embeddings,
        **UNSUPPORTED,
    }
    if config.architecture == "transformer":
        return "gpt", {"_class_name": "GPT", **shared, "n_layer": config.num_layers}
    return "parcae", {"_class_name": "Parcae", **shared, **_official_loop(config)}


def _official_loop(config: ModelConfig) -> dict[str, Any]:
    return {
        "injection_type": _key(INJECTIONS, config.injection),
        "n_layers_in_recurrent_block": config.num_core_layers,
        "n_layers_in_prelude": config.num_prelude_layers,
        "n_layers_in_coda": config.num_coda_layers,
        "state_init": _key(STATES, config.state_init),
        "recurrent_embedding_dimension": config.hidden_size,
        "recurrent_intermediation_embedding_dimension": config.intermediate_size,
        "recurrent_num_attention_heads": None,
        "prelude_norm": config.prelude_norm,
        "sampling_scheme": _key(SAMPLERS, config.recurrence.sampler),
        "mean_recurrence": config.recurrence.mean_recurrence,
        "mean_backprop_depth": config.recurrence.num_grad_loops,
        "recurrent_iteration_method": _key(DRAWS, config.recurrence.draw_per),
        "model_class_name": "Parcae",
    }


def _huginn_config(config: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "huginn_raven",
        "n_embd": config.hidden_size,
        "n_heads": config.num_heads,
        "n_layers": config.num_stored_layers,
        "block_size": config.sequence_length,
        "vocab_size": config.vocab_size,
        "padding_multiple": config.vocab_multiple,
        "padded_vocab_size": config.padded_vocab_size,
        "intermediate_size": config.intermediate_size,
        "n_layers_in_recurrent_block": config.num_core_layers,
        "mean_recurrence": config.recurrence.mean_recurrence,
        "mean_backprop_depth": config.recurrence.num_grad_loops,
        "n_layers_in_prelude": config.num_prelude_layers,
        "n_layers_in_coda": config.num_coda_layers,
        "norm_eps": config.norm_eps,
        "qk_bias": config.qk_bias,
        "tie_embeddings": config.tie_embeddings,
        "rope_base": _whole(config.rope_theta),
    }


def _is_huginn(config: ModelConfig) -> bool:
    return (
        config.architecture == "looped"
        and config.block == "sandwich"
        and config.mlp == "swiglu"
        and config.injection == "linear"
        and config.loop_norm
        and config.scale_embeddings
        and config.num_heads == config.kv_heads
        and not (config.readout or config.prelude_norm or config.value_embeddings or config.qk_norm)
        and config.clip_qkv is None
        and config.logit_softcap is None
    )


def _check_official(config: ModelConfig) -> None:
    """Refuse what the authors' Parcae and Transformer can't express."""
    looped = config.architecture == "looped"
    wanted: dict[str, object] = {
        "block": "pre_norm",
        "value_embeddings": True,
        "residual_scale": None,
    }
    if looped:
        wanted |= {"readout": True, "loop_norm": False, "num_kv_heads": config.num_heads}
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise UserError(
                f"model.{name}={getattr(config, name)!r} can't be written in the authors' format, "
                f"which has {value!r}; use --format hf"
            )


def rotary_buffer(config: ModelConfig) -> Tensor:
    """The authors' rotary table: [1, S, 1, hd/2, 2] fp32."""
    pair = torch.arange(0, config.head_dim, 2)[: config.head_dim // 2].float()
    frequency = 1.0 / (config.rope_theta ** (pair / config.head_dim))
    angle = torch.outer(torch.arange(config.sequence_length).float(), frequency)
    return torch.stack([angle.cos(), angle.sin()], dim=-1)[None, :, None]


def check_rotary_buffer(config: ModelConfig, buffer: Tensor) -> None:
    """Refuse weights whose stored rotary table isn't the one that the configuration describes."""
    ours = rotary_buffer(config)
    length = min(ours.shape[1], buffer.shape[1])
    same = buffer.shape[2:] == ours.shape[2:] and torch.allclose(
        buffer[:, :length].float(), ours[:, :length], atol=1e-3
    )
    if not same:
        raise UserError(
            f"{BUFFER} in the weights isn't the rotary table of rope_base={config.rope_theta} and "
            f"head size {config.head_dim}; correct rope_base in config.json"
        )


def _pick(config: Mapping[str, Any], name: str, table: Mapping[str, str]) -> Any:
    value = config[name]
    if value not in table:
        raise UserError(f"config.json: {name}={value!r} isn't supported; use {', '.join(table)}")
    return table[value]


def _key(table: Mapping[str, str], value: str) -> str:
    return next(key for key, known in table.items() if known == value)


def _whole(value: float) -> float | int:
    return int(value) if value == int(value) else value


def _vocab_multiple(config: Mapping[str, Any]) -> int:
    """A multiple that pads vocab_size to the rows that are stored."""
    vocab, multiple = config["vocab_size"], config.get("padding_multiple") or 1
    padded = config.get("padded_vocab_size") or -(-vocab // multiple) * multiple
    return multiple if -(-vocab // multiple) * multiple == padded else padded
