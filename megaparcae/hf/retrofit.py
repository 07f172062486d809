"""Start a looped model from a fixed-depth one: a Llama-style model, or our Transformer.

The first layers become the prelude, the next the core, the last the coda. The injection starts so
that the first loop passes e through unchanged (h_0 = 0: u = e), so the new model with T = 1
computes exactly what the old one did:

    diagonal  u = decay h + step (e B^T), B = diag(1/step)
    linear    u = W [h ; e], W = [decay I | I]
    additive  u = h + e
    readout   C = I; there is no prelude norm

Layers of the old model that are in none of the three parts are dropped (they must be asked for).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megaparcae.checkpoint.model_tensors import LazyTensors
from megaparcae.checkpoint.names import block_prefixes, canonical_shapes, check_names
from megaparcae.config.schema import ModelConfig, RecurrenceConfig
from megaparcae.errors import UserError
from megaparcae.hf.load import TABLES, Loaded, load_folder, pad_rows, read_config, read_tensors

LLAMA_TYPES = ("llama", "mistral")
LLAMA_BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.q_proj.weight": "self_attn.q_proj.weight",
    "attention.k_proj.weight": "self_attn.k_proj.weight",
    "attention.v_proj.weight": "self_attn.v_proj.weight",
    "attention.o_proj.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.gate_proj.weight": "mlp.gate_proj.weight",
    "mlp.up_proj.weight": "mlp.up_proj.weight",
    "mlp.down_proj.weight": "mlp.down_proj.weight",
}
LLAMA_REST = {
    "embedding.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}

Injection = Literal["diagonal", "linear", "additive"]


@dataclasses.dataclass(frozen=True)
class Split:
    """How the layers of the old model are shared out."""

    prelude: int
    core: int
    coda: int

    @classmethod
    def parse(cls, text: str) -> Split:
        """From "2/4/2"."""
        parts = text.split("/")
        if len(parts) != 3 or not all(part.isdigit() for part in parts):
            raise UserError(f"--retrofit {text}: give prelude/core/coda layers, for example 2/4/2")
        return cls(*map(int, parts))


def retrofit(
    folder: str | Path,
    split: Split,
    *,
    mean_recurrence: int,
    injection: Injection = "diagonal",
    drop_layers: bool = False,
) -> Loaded:
    """A looped model made of the layers of a Transformer in `folder`; T = 1 equals the original."""
    folder = Path(folder)
    old = _load_transformer(folder)
    layers = _chosen_layers(old.config.num_layers, split, drop_layers)
    config = dataclasses.replace(
        old.config,
        architecture="looped",
        num_prelude_layers=split.prelude,
        num_core_layers=split.core,
        num_coda_layers=split.coda,
        injection=injection,
        prelude_norm=False,
        readout=True,
        state_init="zero",
        recurrence=RecurrenceConfig(mean_recurrence=mean_recurrence),
    )
    if config.value_embeddings and layers != list(range(old.config.num_layers)):
        raise UserError(
            "--drop-layers can't be combined with value embeddings, whose tables belong to layer "
            "numbers; share out all layers"
        )
    sources = dict(zip(block_prefixes(config), layers, strict=True))
    shapes = canonical_shapes(config)

    def load(name: str) -> Tensor:
        made = _new_tensor(name, config)
        if made is not None:
            return made
        for prefix, layer in sources.items():
            if name.startswith(f"{prefix}."):
                return old.tensors[f"layers.{layer}.{name.removeprefix(f'{prefix}.')}"]
        return old.tensors[name]

    return Loaded("retrofit", config, LazyTensors(shapes, load), old.tokenizer)


def _chosen_layers(count: int, split: Split, drop_layers: bool) -> list[int]:
    """Old layer of every new block: prelude and core from the front, coda from the back."""
    used = split.prelude + split.core + split.coda
    if used > count or split.core < 1:
        raise UserError(
            f"--retrofit {split.prelude}/{split.core}/{split.coda} takes {used} layers, but there "
            f"are {count} and the core needs at least one; use at most {count}"
        )
    if used < count and not drop_layers:
        raise UserError(
            f"--retrofit {split.prelude}/{split.core}/{split.coda} leaves {count - used} of {count}"
            " layers unused, so T = 1 would not equal the original; use all, or give --drop-layers"
        )
    front = split.prelude + split.core
    return [*range(front), *range(count - split.coda, count)]


def _new_tensor(name: str, config: ModelConfig) -> Tensor | None:
    """Weights that the old model doesn't have; None for those that it has."""
    d = config.hidden_size
    step = 0.5 * math.log(5)  # decay = exp(-step) = sqrt(1/5), as at the start of training
    match name:
        case "injection.A_log":
            return torch.zeros(d)
        case "injection.dt_bias":
            return torch.full((d,), math.log(math.expm1(step)))
        case "injection.B":
            return torch.eye(d) / step
        case "injection.weight":
            return torch.cat([math.exp(-step) * torch.eye(d), torch.eye(d)], dim=1)
        case "readout.weight":
            return torch.eye(d)
        case _:
            return None


def _load_transformer(folder: Path) -> Loaded:
    content = read_config(folder)
    if content.get("model_type") in LLAMA_TYPES:
        return _from_llama(folder, content)
    loaded = load_folder(folder)
    if loaded.config.architecture != "transformer":
        raise UserError(f"{folder} is looped already; --retrofit takes a fixed-depth Transformer")
    return loaded


def _from_llama(folder: Path, content: Mapping[str, Any]) -> Loaded:
    config = _llama_config(content)
    found = read_tensors(folder)
    shapes = canonical_shapes(config)
    names: dict[str, str] = {}
    for name in shapes:
        prefix, _, rest = name.partition(".")
        if prefix == "layers":
            layer, _, rest = rest.partition(".")
            names[name] = f"model.layers.{layer}.{LLAMA_BLOCK[rest]}"
        else:
            names[name] = LLAMA_REST[name]
    extra = {n for n in found if n.endswith("rotary_emb.inv_freq")}
    if config.tie_embeddings:
        extra.add("lm_head.weight")
    check_names(set(found) - extra, names.values(), f"{folder}")
    turn = _pair_order(config)

    def load(name: str) -> Tensor:
        tensor = found[names[name]]
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            return turn(tensor)
        return pad_rows(tensor, shapes[name][0]) if name.startswith(TABLES) else tensor

    has_tokenizer = (folder / "tokenizer.json").is_file() or (folder / "tokenizer.model").is_file()
    return Loaded("llama", config, LazyTensors(shapes, load), folder if has_tokenizer else None)


def _pair_order(config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """Llama rotates halves (j, j + hd/2), we rotate neighbours (2j, 2j + 1): reorder the rows."""
    hd = config.head_dim
    order = torch.arange(hd).view(2, hd // 2).T.flatten()

    def turn(weight: Tensor) -> Tensor:
        return weight.unflatten(0, (-1, hd))[:, order].flatten(0, 1)

    return turn


def _llama_config(content: Mapping[str, Any]) -> ModelConfig:
    heads = content["num_attention_heads"]
    wanted = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "head_dim": content["hidden_size"] // heads,
        "sliding_window": None,
    }
    for name, value in wanted.items():
        found = content.get(name)
        if found is not None and found != value:
            raise UserError(f"config.json: {name}={found!r} isn't supported; only {value!r} is")
    rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise UserError(f"config.json: rope_type={kind!r} isn't supported; only 'default' is")
    return ModelConfig(
        architecture="transformer",
        vocab_size=content["vocab_size"],
        vocab_multiple=64,
        sequence_length=content["max_position_embeddings"],
        hidden_size=content["hidden_size"],
        intermediate_size=content["intermediate_size"],
        num_heads=heads,
        num_kv_heads=content.get("num_key_value_heads") or heads,
        num_layers=content["num_hidden_layers"],
        mlp="swiglu",
        qk_norm=False,
        value_embeddings=False,
        norm_eps=content["rms_norm_eps"],
        rope_theta=float(rope.get("rope_theta") or content.get("rope_theta") or 10000.0),
        tie_embeddings=content.get("tie_word_embeddings", False),
        init="scaled",
    )
