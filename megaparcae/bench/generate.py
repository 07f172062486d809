"""Decoding with an exported model: what the cache brings, batches, and how close to the floor."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megaparcae.bench.measure import Variant, synchronize, take_turns, timed
from megaparcae.bench.options import GenerateOptions
from megaparcae.bench.report import Report
from megaparcae.bench.shapes import run_config
from megaparcae.config.schema import ModelConfig
from megaparcae.engine.distributed import choose_device
from megaparcae.hf.blocks_parcae import DiagonalInjection, LinearInjection
from megaparcae.hf.cache_parcae import ParcaeCache
from megaparcae.hf.config import to_hf_config
from megaparcae.hf.modeling_parcae import ParcaeForCausalLM

SHAPE = (
    "model.hidden_size=256",
    "model.intermediate_size=1024",
    "model.num_heads=4",
    "model.vocab_size=8192",
    "model.sequence_length=2048",
)
"""2/2/2, T 8; the tiny preset is the other shape that is looked at."""
HEAD_WIDTH = 128
"""Of the wide model, as in the presets."""
STEPS = 16
"""Tokens of one measurement at a fixed context length."""


def run(options: GenerateOptions) -> Report:
    """Tables `cache`, `batch`, `floor` and `length`."""
    config = run_config(options, SHAPE)
    if options.threads:
        torch.set_num_threads(options.threads)
    device = choose_device(config.train.device)
    model = make_model(config.model, options.dtype, device)
    wide = make_model(widened(config.model, options.wide), options.dtype, device)
    tables = {
        "cache": cache(model, options),
        "batch": batch(model, options),
        f"floor, width {options.wide}": floor(wide, options),
        f"length, width {options.wide}": length(wide, options),
    }
    return Report("generate", options, tables)


def make_model(config: ModelConfig, dtype: str, device: str) -> ParcaeForCausalLM:
    """New weights: they make no difference to the time."""
    torch.manual_seed(0)
    model = ParcaeForCausalLM(to_hf_config(config)).to(getattr(torch, dtype)).eval()
    model.generation_config.pad_token_id = 0
    return model.to(device)


def widened(config: ModelConfig, width: int) -> ModelConfig:
    """The same layers at another width."""
    return dataclasses.replace(
        config,
        hidden_size=width,
        intermediate_size=width * config.intermediate_size // config.hidden_size,
        num_heads=max(1, width // HEAD_WIDTH),
        num_kv_heads=None,
    )


def cache(model: ParcaeForCausalLM, options: GenerateOptions) -> list[dict[str, Any]]:
    """Tokens/s of one row."""
    variants = {
        "recomputing": timed(lambda: generate(model, options, rows=1, use_cache=False)),
        "with cache": timed(lambda: generate(model, options, rows=1)),
    }
    timings = take_turns(variants, options.repeats)
    return timings.rows("recomputing", tokens=options.new_tokens)


def batch(model: ParcaeForCausalLM, options: GenerateOptions) -> list[dict[str, Any]]:
    """Tokens/s of one row and of several at once; `throughput` is the ratio of the two."""
    names = {1: "1 row", options.batch: f"{options.batch} rows"}
    variants = {
        name: timed(partial(generate, model, options, rows=rows)) for rows, name in names.items()
    }
    timings = take_turns(variants, options.repeats)
    table = []
    for rows, name in names.items():
        ratio = timings.speedup(name, names[1])
        row: dict[str, Any] = {"variant": name, "seconds": timings.median(name)}
        row["tokens_per_second"] = rows * options.new_tokens / timings.median(name)
        row |= {"spread": timings.spread(name), "throughput": rows * ratio.median}
        table.append(row | {"throughput_low": rows * ratio.low})
    return table


def floor(model: ParcaeForCausalLM, options: GenerateOptions) -> list[dict[str, Any]]:
    """Seconds of a new token against its matrix-vector products and attention alone, at the mean
    context length: no norms, no rotary embedding, no sampling, no loop in Python around a model."""
    middle = options.prompt + options.new_tokens // 2
    bare = BareToken(model, middle)
    per_token = {
        "generate": timed(lambda: generate(model, options, rows=1)),
        "bare products": timed(lambda: _repeat(bare.products, options.new_tokens)),
        "bare attention": timed(lambda: _repeat(bare.attention, options.new_tokens)),
    }
    variants = {name: _divided(run, options.new_tokens) for name, run in per_token.items()}
    timings = take_turns(variants, options.repeats)
    sums = zip(
        *(timings.seconds[f"bare {part}"] for part in ("products", "attention")), strict=True
    )
    timings.seconds["bare, both"] = [a + b for a, b in sums]
    table = timings.rows("bare, both", tokens=1)
    for row in table:
        row["times_bare"] = 1 / row.pop("speedup")
        del row["speedup_low"], row["speedup_high"]
    return table


def length(model: ParcaeForCausalLM, options: GenerateOptions) -> list[dict[str, Any]]:
    """Seconds of a token after contexts of several lengths; `rest` is what is not attention."""
    decoders = {str(n): _decoder(model, n) for n in options.lengths}
    bare = {n: BareToken(model, n) for n in options.lengths}
    attention = {
        f"attention {n}": _divided(timed(partial(_repeat, one.attention, STEPS)), STEPS)
        for n, one in bare.items()
    }
    timings = take_turns(decoders | attention, options.repeats)
    table = []
    for n in options.lengths:
        seconds, attending = timings.median(str(n)), timings.median(f"attention {n}")
        table.append(
            {"context": n, "seconds": seconds, "spread": timings.spread(str(n)),
             "attention_seconds": attending, "rest_seconds": seconds - attending}
        )  # fmt: skip
    return table


@torch.inference_mode()
def generate(
    model: ParcaeForCausalLM, options: GenerateOptions, *, rows: int, use_cache: bool = True
) -> Tensor:
    """Greedy ids [rows, prompt + new tokens], through transformers' generate."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(model.config.vocab_size, (rows, options.prompt), generator=random)
    return model.generate(
        ids.to(model.device),
        max_new_tokens=options.new_tokens,
        min_new_tokens=options.new_tokens,
        do_sample=False,
        use_cache=use_cache,
    )


def _decoder(model: ParcaeForCausalLM, context: int) -> Variant:
    """Seconds per token of STEPS forward passes after `context` tokens."""
    cache = ParcaeCache(max_length=context + STEPS)
    ids = torch.zeros(1, context, dtype=torch.long, device=model.device)
    with torch.inference_mode():
        model(ids, cache=cache, use_cache=True, logits_to_keep=1)

    @torch.inference_mode()
    def decode() -> float:
        synchronize()
        begin = time.perf_counter()
        for _ in range(STEPS):
            model(ids[:, :1], cache=cache, use_cache=True)
        synchronize()
        seconds = time.perf_counter() - begin
        cache.crop(-STEPS)
        return seconds / STEPS

    return decode


class BareToken:
    """The products of one new token of one row, each alone, in the order of the model."""

    def __init__(self, model: ParcaeForCausalLM, context: int) -> None:
        config, inner = model.config, model.model
        core = [*inner.core] * config.num_loops if config.is_looped else []
        blocks = [*inner.prelude, *core, *inner.coda] if config.is_looped else [*inner.layers]
        weights = [m.weight for block in blocks for m in block.modules() if _is_linear(m)]
        if config.is_looped:
            # A start state of zero needs no product.
            moved = config.num_loops - (config.initial_state == "zero")
            weights += _of_injection(inner.injection, moved)
            weights += [] if inner.readout is None else [inner.readout.weight]
        weights.append(model.lm_head.weight)
        self.weights = [weight.detach() for weight in weights]
        widths = {weight.shape[1] for weight in weights}
        self.inputs = {width: self.weights[0].new_ones(1, 1, width) for width in widths}
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.query = self.weights[0].new_ones(1, heads, 1, config.head_dim)
        shape = (len(blocks), 2, 1, kv_heads, context, config.head_dim)
        self.keys_and_values = self.weights[0].new_ones(shape)
        self.grouped = heads != kv_heads

    @torch.inference_mode()
    def products(self) -> None:
        """Every matrix times a vector, as often as the model does it."""
        for weight in self.weights:
            F.linear(self.inputs[weight.shape[1]], weight)

    @torch.inference_mode()
    def attention(self) -> None:
        """Every attention over `context` cached positions."""
        for keys, values in self.keys_and_values:
            F.scaled_dot_product_attention(self.query, keys, values, enable_gqa=self.grouped)


def _of_injection(injection: torch.nn.Module, times: int) -> list[Tensor]:
    match injection:
        case DiagonalInjection():
            return [injection.B]
        case LinearInjection():
            of_state, of_input = injection.weight.detach().chunk(2, dim=1)
            return [of_input.contiguous(), *[of_state.contiguous()] * times]
        case _:
            return []


def _is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear)


def _repeat(work: Callable[[], None], times: int) -> None:
    for _ in range(times):
        work()


def _divided(run: Variant, count: int) -> Variant:
    return lambda: run() / count
