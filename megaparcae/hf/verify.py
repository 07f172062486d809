"""Before an export gets its name: its logits are those of our model, at several depths.

Our model takes its weights from the checkpoint, the exported one takes them from the files just
written. Blocks are loaded when they run, and tables are cut to the tokens of the probe, so that
models much larger than memory can be checked. Arithmetic is fp32 on both sides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from megaparcae.checkpoint.names import block_prefixes, canonical_shapes, to_hf
from megaparcae.config.schema import ModelConfig
from megaparcae.errors import UserError
from megaparcae.hf.config import to_hf_config
from megaparcae.hf.modeling_parcae import ParcaeForCausalLM
from megaparcae.hf.stream import read_safetensors
from megaparcae.log import logger
from megaparcae.model.batch import Batch, fixed_depth
from megaparcae.model.build import build_model
from megaparcae.model.looped_lm import LoopedLM

# B rows, S positions, V vocabulary, U tokens of the probe

TOLERANCE = 2e-5
"""Largest difference of a logit, relative to the largest logit (at least 1)."""
RESIDENT_BYTES = 1 << 30
"""Models below this size keep their blocks in memory during the check."""


def verify_export(
    folder: Path, source: Mapping[str, Tensor], config: ModelConfig, dtype: torch.dtype
) -> float:
    """Largest relative difference of the logits; raises UserError above the tolerance.

    `source` holds canonical tensors; both sides use them rounded to `dtype`.
    """
    ids = probe_tokens(config)
    tokens, ids = ids.unique(return_inverse=True)
    small = dataclasses.replace(config, vocab_size=len(tokens), vocab_multiple=1)
    exported = read_safetensors(folder)
    ours, theirs = _ours(small, source, tokens, dtype), _theirs(small, exported, tokens)
    worst = 0.0
    for num_loops in _depths(config):
        with torch.no_grad():
            expected, found = ours(ids, num_loops), theirs(ids, num_loops)
        scale = max(1.0, expected.abs().max().item())
        difference = (expected - found).abs().max().item() / scale
        logger.info("T=%d: largest difference of a logit %.1e (relative)", num_loops, difference)
        if not difference <= TOLERANCE:
            raise UserError(
                f"the exported model's logits differ from ours by {difference:.1e} at num_loops="
                f"{num_loops} (allowed: {TOLERANCE:.0e}); the folder was not written"
            )
        worst = max(worst, difference)
    return worst


def probe_tokens(config: ModelConfig) -> Tensor:
    """Two rows of reproducible tokens [2, S], the first and last id among them."""
    generator = torch.Generator().manual_seed(0)
    length = min(24, config.sequence_length)
    ids = torch.randint(0, config.vocab_size, (2, length), generator=generator)
    ids[0, 0], ids[0, -1] = 0, config.vocab_size - 1
    return ids


def _depths(config: ModelConfig) -> list[int]:
    if config.architecture == "transformer":
        return [1]
    return sorted({1, 2, 4, config.recurrence.mean_recurrence})


Run = Callable[[Tensor, int], Tensor]


def _ours(
    config: ModelConfig, source: Mapping[str, Tensor], tokens: Tensor, dtype: torch.dtype
) -> Run:
    with torch.device("meta"):
        model = build_model(config).eval()
    if isinstance(model, LoopedLM):
        model.core.streamed = not _is_resident(config)

    def load(name: str) -> Tensor:
        return _rows(name, source[name], tokens).to(dtype).float()

    _fill(model, config, load, lambda name: name)

    def run(ids: Tensor, num_loops: int) -> Tensor:
        if config.architecture == "transformer":
            return model(Batch(ids=ids))
        return model(fixed_depth(ids, num_loops, torch.zeros(*ids.shape, config.hidden_size)))

    return run


def _theirs(config: ModelConfig, exported: Mapping[str, Tensor], tokens: Tensor) -> Run:
    with torch.device("meta"):
        model = ParcaeForCausalLM(to_hf_config(config, use_cache=False)).eval()

    def load(name: str) -> Tensor:
        return _rows(name, exported[to_hf(name)], tokens).float()

    _fill(model, config, load, to_hf)
    model.tie_weights()
    loops: dict[str, int] = {}

    def run(ids: Tensor, num_loops: int) -> Tensor:
        loops["num_loops"] = num_loops
        return model(ids, **loops).logits

    return run


def _rows(name: str, tensor: Tensor, tokens: Tensor) -> Tensor:
    """Tables have a row per token: keep those of the probe."""
    table = name.startswith(("embedding.", "value_embeddings.", "head."))
    return tensor[tokens] if table else tensor


def _fill(
    model: nn.Module,
    config: ModelConfig,
    load: Callable[[str], Tensor],
    rename: Callable[[str], str],
) -> None:
    """Give a model on the meta device its weights: blocks when they run, the rest now."""
    shapes, resident = canonical_shapes(config), _is_resident(config)
    for prefix in block_prefixes(config):
        names = {n.removeprefix(f"{prefix}."): n for n in shapes if n.startswith(f"{prefix}.")}
        block = model.get_submodule(rename(prefix))
        if resident:
            _put(block, {short: load(name) for short, name in names.items()})
        else:
            block.register_forward_pre_hook(_loader(names, load))
            block.register_forward_hook(_unloader(names))
    inside = tuple(f"{prefix}." for prefix in block_prefixes(config))
    rest = [name for name in shapes if not name.startswith(inside)]
    _put(model, {rename(name): load(name) for name in rest})


def _is_resident(config: ModelConfig) -> bool:
    """Whether all blocks stay in memory."""
    sizes = (torch.Size(shape).numel() for shape in canonical_shapes(config).values())
    return 4 * sum(sizes) <= RESIDENT_BYTES


def _loader(names: Mapping[str, str], load: Callable[[str], Tensor]):  # type: ignore[no-untyped-def]
    def hook(block: nn.Module, args: object) -> None:
        _put(block, {short: load(name) for short, name in names.items()})

    return hook


def _unloader(names: Mapping[str, str]):  # type: ignore[no-untyped-def]
    def hook(block: nn.Module, args: object, output: object) -> None:
        _put(block, {short: torch.empty(0, device="meta") for short in names})

    return hook


def _put(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Replace parameters by name."""
    for name, value in values.items():
        owner, _, leaf = name.rpartition(".")
        parameters = module.get_submodule(owner)._parameters
        assert leaf in parameters, name
        parameters[leaf] = nn.Parameter(value, requires_grad=False)
