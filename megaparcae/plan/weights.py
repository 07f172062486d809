"""Every weight of a model by canonical name, and which pipeline stage holds it. No torch.

The same names, shapes and splits as the built model's (a test compares them).
"""

# d width, V padded vocabulary, H query heads, G key/value heads, hd head width, d_ff inner width
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megaparcae.config.layout import Part
from megaparcae.config.schema import VALUE_GATE_INPUTS, ModelConfig, RunConfig
from megaparcae.optim.param_groups import parameter_rule
from megaparcae.parallel.ownership import Item
from megaparcae.parallel.shard import ShardSpec
from megaparcae.parallel.stages import Stage


@dataclass(frozen=True)
class Weight:
    """A parameter: its whole shape, and the dimension that tensor parallelism splits."""

    name: str
    shape: tuple[int, ...]
    dim: int | None = None


def stage_weights(model: ModelConfig, part: Part) -> list[Weight]:
    """What a stage that runs `part` holds."""
    d, V = model.hidden_size, model.padded_vocab_size
    first = model.num_prelude_layers if model.architecture == "looped" else 0
    core = range(first, first + model.num_core_layers) if part.loop else range(0)
    coda = [first + model.num_core_layers + i for i in part.coda]
    held = []
    if part.embedding or (part.head and model.tie_embeddings):
        held.append(Weight("embedding.weight", (V, d), 0))
    for layer in (*part.prelude, *core, *coda):
        if layer in model.value_embedding_layers:
            width = model.kv_heads * model.head_dim
            held.append(Weight(f"value_embeddings.{layer}.weight", (V, width), 1))
    name = "prelude" if model.architecture == "looped" else "layers"
    for i in part.prelude:
        held += _block(model, f"{name}.{i}", i)
    for i, layer in enumerate(core):
        held += _block(model, f"core.{i}", layer)
    for i, layer in zip(part.coda, coda, strict=True):
        held += _block(model, f"coda.{i}", layer)
    held += _around_the_loop(model, part)
    if part.head or (model.loop_norm and part.ends_loop):
        held.append(Weight("final_norm.weight", (d,)))
    if part.head and not model.tie_embeddings:
        held.append(Weight("head.weight", (V, d), 0))
    return held


def _around_the_loop(model: ModelConfig, part: Part) -> Iterator[Weight]:
    d = model.hidden_size
    if part.begins_loop and model.prelude_norm:
        yield Weight("prelude_norm.weight", (d,))
    if part.loop and model.injection == "diagonal":
        yield Weight("injection.A_log", (d,))
        yield Weight("injection.dt_bias", (d,))
        yield Weight("injection.B", (d, d))
    if part.loop and model.injection == "linear":
        yield Weight("injection.weight", (d, 2 * d))
    if part.ends_loop and model.readout:
        yield Weight("readout.weight", (d, d))


def _block(model: ModelConfig, block: str, layer: int) -> Iterator[Weight]:
    d, hd, d_ff = model.hidden_size, model.head_dim, model.intermediate_size
    q_width, kv_width = model.num_heads * hd, model.kv_heads * hd
    for branch in ("attention", "mlp"):
        yield Weight(f"{block}.{branch}_norm.weight", (d,))
        if model.block == "sandwich":
            yield Weight(f"{block}.{branch}_post_norm.weight", (d,))
    for letter, width in (("q", q_width), ("k", kv_width), ("v", kv_width)):
        yield Weight(f"{block}.attention.{letter}_proj.weight", (width, d), 0)
    yield Weight(f"{block}.attention.o_proj.weight", (d, q_width), 1)
    if layer in model.value_embedding_layers:
        gate = (model.kv_heads, VALUE_GATE_INPUTS)
        yield Weight(f"{block}.attention.value_gate.weight", gate, 0)
    if model.qk_bias:
        yield Weight(f"{block}.attention.q_bias", (model.num_heads, hd), 0)
        yield Weight(f"{block}.attention.k_bias", (model.kv_heads, hd), 0)
    for name in ("gate", "up") if model.mlp == "swiglu" else ("up",):
        yield Weight(f"{block}.mlp.{name}_proj.weight", (d_ff, d), 0)
    yield Weight(f"{block}.mlp.down_proj.weight", (d, d_ff), 1)


def stage_items(config: RunConfig, stages: Sequence[Stage]) -> list[list[Item]]:
    """Every stage's parameters as the sharded optimizer of tensor-parallel rank 0 sees them."""
    held = [stage_weights(config.model, stage.part) for stage in stages]
    holders: dict[str, tuple[int, ...]] = {}
    for index, weights in enumerate(held):
        for weight in weights:
            holders[weight.name] = (*holders.get(weight.name, ()), index)
    return [[_item(config, w, holders[w.name]) for w in weights] for weights in held]


def _item(config: RunConfig, weight: Weight, stages: tuple[int, ...]) -> Item:
    rule = parameter_rule(weight.name, weight.shape, config.optimizer.name)
    spec = ShardSpec(
        name=weight.name,
        full_shape=weight.shape,
        dim=weight.dim,
        num_slices=1 if weight.dim is None else config.parallel.tp,
        stages=stages,
        tp_partial=config.parallel.sequence_parallel and weight.dim is None,
    )
    return Item(spec, rule.kind, rule.decayed)
