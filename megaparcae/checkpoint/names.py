"""The one table of parameter names: canonical, exported (Hugging Face) and the authors'.

Canonical names are those of our model and checkpoints. Exported: `model.` + canonical, except
`head.weight`, which is `lm_head.weight`. The authors' names come in three dialects:

| canonical | parcae, gpt | huginn |
|---|---|---|
| embedding.weight | transformer.wte.weight | the same |
| value_embeddings.{i}.weight | value_embeds.{i}.weight | - |
| prelude.{i}. / core.{i}. / coda.{i}. | transformer.prelude / core_block / coda.{i}. | the same |
| layers.{i}. | transformer.h.{i}. | - |
| attention_norm, mlp_norm (pre_norm) | norm_1, norm_2 | the same |
| (sandwich) attention_norm, attention_post_norm, mlp_norm, mlp_post_norm | norm_1..4 | the same |
| attention.{q,k,v}_proj | attn.c_q, c_k, c_v | rows of attn.Wqkv |
| attention.o_proj | attn.c_proj | attn.proj |
| attention.value_gate | attn.ve_gate | - |
| attention.q_bias, k_bias | attn.qk_bias [2, 1, H, hd] | the same |
| mlp.up_proj, down_proj | mlp.fc, mlp.proj | the same |
| mlp.gate_proj, up_proj (swiglu) | rows of mlp.fc, the gate first | the same |
| prelude_norm, final_norm, readout | transformer.ln_prelude, ln_f, C | the same |
| injection.{A_log,dt_bias,B} | transformer.adapter.{A_log,dt_bias,B} | - |
| injection.weight | transformer.adapter.adapter.weight | transformer.adapter.weight |
| head.weight | lm_head.weight (equal to wte when tied) | the same |
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megaparcae.config.schema import VALUE_GATE_INPUTS, ModelConfig
from megaparcae.errors import UserError

Dialect = Literal["parcae", "gpt", "huginn"]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """One of the authors' tensors and the canonical tensors it is made of."""

    official: str
    canonical: tuple[str, ...]
    join: Literal["same", "rows", "pair"] = "same"
    """same: one tensor. rows: concatenated rows. pair: [2, 1, H, hd] from two [H, hd]."""


def canonical_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every parameter of the model and its full shape."""
    d, vocab = config.hidden_size, config.padded_vocab_size
    shapes: dict[str, Shape] = {"embedding.weight": (vocab, d)}
    for i in config.value_embedding_layers:
        shapes[f"value_embeddings.{i}.weight"] = (vocab, config.kv_heads * config.head_dim)
    for index, prefix in enumerate(block_prefixes(config)):
        gated = index in config.value_embedding_layers
        shapes.update({f"{prefix}.{n}": s for n, s in _block_shapes(config, gated).items()})
    if config.architecture == "looped":
        shapes.update(_loop_shapes(config))
    shapes["final_norm.weight"] = (d,)
    if not config.tie_embeddings:
        shapes["head.weight"] = (vocab, d)
    return shapes


def block_prefixes(config: ModelConfig) -> list[str]:
    """Canonical prefix of every stored block, in order."""
    if config.architecture == "transformer":
        return [f"layers.{i}" for i in range(config.num_layers)]
    counts = {
        "prelude": config.num_prelude_layers,
        "core": config.num_core_layers,
        "coda": config.num_coda_layers,
    }
    return [f"{part}.{i}" for part, count in counts.items() for i in range(count)]


def _block_shapes(config: ModelConfig, gated: bool) -> dict[str, Shape]:
    d, inner, hd = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_heads, config.kv_heads
    shapes: dict[str, Shape] = {
        "attention_norm.weight": (d,),
        "attention.q_proj.weight": (heads * hd, d),
        "attention.k_proj.weight": (kv_heads * hd, d),
        "attention.v_proj.weight": (kv_heads * hd, d),
        "attention.o_proj.weight": (d, heads * hd),
        "mlp_norm.weight": (d,),
        "mlp.up_proj.weight": (inner, d),
        "mlp.down_proj.weight": (d, inner),
    }
    if gated:
        shapes["attention.value_gate.weight"] = (kv_heads, VALUE_GATE_INPUTS)
    if config.qk_bias:
        shapes |= {"attention.q_bias": (heads, hd), "attention.k_bias": (kv_heads, hd)}
    if config.mlp == "swiglu":
        shapes["mlp.gate_proj.weight"] = (inner, d)
    if config.block == "sandwich":
        shapes |= {"attention_post_norm.weight": (d,), "mlp_post_norm.weight": (d,)}
    return shapes


def _loop_shapes(config: ModelConfig) -> dict[str, Shape]:
    d = config.hidden_size
    shapes: dict[str, Shape] = {}
    if config.prelude_norm:
        shapes["prelude_norm.weight"] = (d,)
    match config.injection:
        case "diagonal":
            shapes |= {"injection.A_log": (d,), "injection.dt_bias": (d,), "injection.B": (d, d)}
        case "linear":
            shapes["injection.weight"] = (d, 2 * d)
        case _:
            pass
    if config.readout:
        shapes["readout.weight"] = (d, d)
    return shapes


def to_hf(canonical: str) -> str:
    """Name in an exported folder."""
    return "lm_head.weight" if canonical == "head.weight" else f"model.{canonical}"


def from_hf(name: str) -> str:
    """Canonical name of an exported tensor."""
    return "head.weight" if name == "lm_head.weight" else name.removeprefix("model.")


def official_entries(config: ModelConfig, dialect: Dialect) -> list[Entry]:
    """The authors' tensors of this model, each with its canonical parts; buffers aren't listed."""
    shapes = canonical_shapes(config)
    entries = [Entry("transformer.wte.weight", ("embedding.weight",))]
    entries += [
        Entry(f"value_embeds.{i}.weight", (f"value_embeddings.{i}.weight",))
        for i in config.value_embedding_layers
    ]
    for prefix in block_prefixes(config):
        entries += _official_block(config, prefix, shapes, dialect)
    for canonical, official in _official_singles(dialect).items():
        if canonical in shapes:
            entries.append(Entry(official, (canonical,)))
    head = "embedding.weight" if config.tie_embeddings else "head.weight"
    entries.append(Entry("lm_head.weight", (head,)))
    return entries


def _official_singles(dialect: Dialect) -> dict[str, str]:
    adapter = "transformer.adapter"
    return {
        "prelude_norm.weight": "transformer.ln_prelude.weight",
        "injection.A_log": f"{adapter}.A_log",
        "injection.dt_bias": f"{adapter}.dt_bias",
        "injection.B": f"{adapter}.B",
        "injection.weight": f"{adapter}.weight"
        if dialect == "huginn"
        else f"{adapter}.adapter.weight",
        "readout.weight": "transformer.C.weight",
        "final_norm.weight": "transformer.ln_f.weight",
    }


def _official_block(
    config: ModelConfig, prefix: str, shapes: Mapping[str, Shape], dialect: Dialect
) -> Iterator[Entry]:
    part, index = prefix.split(".")
    there = {"core": "core_block", "layers": "h"}.get(part, part)

    def entry(
        official: str, *canonical: str, join: Literal["same", "rows", "pair"] = "same"
    ) -> Entry:
        names = tuple(f"{prefix}.{name}" for name in canonical)
        return Entry(f"transformer.{there}.{index}.{official}", names, join)

    norms = ["attention_norm", "mlp_norm"]
    if config.block == "sandwich":
        norms = ["attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"]
    for number, norm in enumerate(norms, start=1):
        yield entry(f"norm_{number}.weight", f"{norm}.weight")
    if config.qk_bias:
        yield entry("attn.qk_bias", "attention.q_bias", "attention.k_bias", join="pair")
    projections = [f"attention.{x}_proj.weight" for x in "qkv"]
    if dialect == "huginn":
        yield entry("attn.Wqkv.weight", *projections, join="rows")
        yield entry("attn.proj.weight", "attention.o_proj.weight")
    else:
        for x, projection in zip("qkv", projections, strict=True):
            yield entry(f"attn.c_{x}.weight", projection)
        yield entry("attn.c_proj.weight", "attention.o_proj.weight")
    if f"{prefix}.attention.value_gate.weight" in shapes:
        yield entry("attn.ve_gate.weight", "attention.value_gate.weight")
    if config.mlp == "swiglu":
        yield entry("mlp.fc.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", join="rows")
    else:
        yield entry("mlp.fc.weight", "mlp.up_proj.weight")
    yield entry("mlp.proj.weight", "mlp.down_proj.weight")


def join_parts(entry: Entry, parts: list[Tensor]) -> Tensor:
    """The authors' tensor from its canonical parts."""
    match entry.join:
        case "same":
            return parts[0]
        case "rows":
            return torch.cat(parts)
        case "pair":
            if parts[0].shape != parts[1].shape:
                raise UserError(
                    f"{entry.official} holds q_bias and k_bias in one tensor, which needs as many "
                    "key/value heads as heads; model.num_kv_heads differs, so this model can't be "
                    "written in the authors' format"
                )
            return torch.stack(parts).unsqueeze(1)


def split_parts(entry: Entry, tensor: Tensor, shapes: Mapping[str, Shape]) -> list[Tensor]:
    """The canonical parts of the authors' tensor; views of it."""
    wanted = [shapes[name] for name in entry.canonical]
    match entry.join:
        case "same":
            parts = [tensor]
        case "rows":
            rows = [shape[0] for shape in wanted]
            parts = list(tensor.split(rows)) if sum(rows) == tensor.shape[0] else []
        case "pair":
            parts = list(tensor.squeeze(1))
    if [tuple(part.shape) for part in parts] != wanted:
        raise UserError(
            f"{entry.official} has shape {list(tensor.shape)}, but the configuration makes it of "
            f"{dict(zip(entry.canonical, wanted, strict=True))}; the weights and config.json don't "
            "belong together"
        )
    return parts


def check_names(found: Iterable[str], expected: Iterable[str], where: str) -> None:
    """Refuse missing and unexpected tensors, naming the first of each and its nearest relative."""
    found, expected = set(found), set(expected)
    missing, unknown = sorted(expected - found), sorted(found - expected)
    if not missing and not unknown:
        return
    parts = []
    if missing:
        near = difflib.get_close_matches(missing[0], unknown, n=1)
        hint = f" (is it {near[0]!r}?)" if near else ""
        parts.append(f"{len(missing)} missing, the first {missing[0]!r}{hint}")
    if unknown:
        parts.append(f"{len(unknown)} unexpected, the first {unknown[0]!r}")
    raise UserError(
        f"{where} doesn't hold the tensors of its configuration: {'; '.join(parts)}; "
        "check the configuration"
    )
