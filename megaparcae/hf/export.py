"""From our weights to a folder that others can load: transformers' format or the authors'.

Both stream tensor by tensor, compare logits with our own model before the folder gets its name,
and leave nothing behind when they fail.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from megaparcae.checkpoint.names import (
    canonical_shapes,
    check_names,
    join_parts,
    official_entries,
    to_hf,
)
from megaparcae.config.schema import ModelConfig
from megaparcae.errors import UserError
from megaparcae.hf.card import model_card
from megaparcae.hf.config import to_hf_config
from megaparcae.hf.official import BUFFER, official_config, rotary_buffer
from megaparcae.hf.stream import read_torch_file, write_safetensors, write_torch_file
from megaparcae.hf.tokenizer import TokenizerFacts, export_tokenizer
from megaparcae.hf.verify import verify_export
from megaparcae.log import logger

CODE = (
    "configuration_parcae.py",
    "cache_parcae.py",
    "decode_parcae.py",
    "blocks_parcae.py",
    "early_exit_parcae.py",
    "modeling_parcae.py",
)
"""Files that make an exported folder load anywhere."""

TABLES = ("embedding.", "value_embeddings.", "head.")
"""Tensors with one row per token, which are padded in training."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How to write."""

    dtype: torch.dtype = torch.bfloat16
    """Type of the stored weights."""
    shard_bytes: int = 5_000_000_000
    """Largest safetensors file."""
    force: bool = False
    """Replace an existing folder."""
    keep_padding: bool = False
    """Keep the padded vocabulary rows; the configuration then counts them."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """Training facts for the model card: step, tokens, losses."""


def export_hf(
    tensors: Mapping[str, Tensor],
    model: ModelConfig,
    tokenizer: str | Path | None,
    output: str | Path,
    options: ExportOptions | None = None,
) -> Path:
    """Write canonical `tensors` (read one at a time) as a transformers folder; returns its path.

    Raises UserError for tensors that aren't the configuration's, a tokenizer with more tokens than
    the model, an existing folder, or logits that differ from ours.
    """
    options = options or ExportOptions()
    check_names(tensors, canonical_shapes(model), "the checkpoint")
    rows = model.padded_vocab_size if options.keep_padding else model.vocab_size
    shapes = {
        to_hf(name): (rows, *shape[1:]) if name.startswith(TABLES) else shape
        for name, shape in canonical_shapes(model).items()
    }
    source = {to_hf(name): name for name in canonical_shapes(model)}

    def load(name: str) -> Tensor:
        tensor = tensors[source[name]]
        return tensor[:rows] if source[name].startswith(TABLES) else tensor

    with new_folder(Path(output), force=options.force) as folder:
        token_facts = _write_tokenizer(tokenizer, folder, model)
        _write_config(folder, model, rows, token_facts, options.dtype)
        logger.info("writing %d tensors as %s", len(shapes), options.dtype)
        write_safetensors(folder, shapes, load, options.dtype, options.shard_bytes)
        difference = verify_export(folder, tensors, model, options.dtype)
        (folder / "README.md").write_text(model_card(model, options.facts, difference))
    return Path(output)


def export_official(
    tensors: Mapping[str, Tensor],
    model: ModelConfig,
    output: str | Path,
    options: ExportOptions | None = None,
) -> Path:
    """Write canonical `tensors` in the authors' format: config.json and pytorch_model.bin."""
    options = options or ExportOptions(dtype=torch.float32)
    shapes = canonical_shapes(model)
    check_names(tensors, shapes, "the checkpoint")
    dialect, config = official_config(model)
    entries = {entry.official: entry for entry in official_entries(model, dialect)}
    buffer = rotary_buffer(model)

    def load(name: str) -> Tensor:
        if name == BUFFER:
            return buffer
        entry = entries[name]
        return join_parts(entry, [tensors[part] for part in entry.canonical])

    def joined_shape(name: str) -> tuple[int, ...]:
        parts = [shapes[part] for part in entries[name].canonical]
        match entries[name].join:
            case "rows":
                return (sum(part[0] for part in parts), *parts[0][1:])
            case "pair":
                return (2, 1, *parts[0])
            case _:
                return parts[0]

    all_shapes = {BUFFER: tuple(buffer.shape)} | {name: joined_shape(name) for name in entries}
    with new_folder(Path(output), force=options.force) as folder:
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        write_torch_file(
            folder / "pytorch_model.bin",
            all_shapes,
            load,
            lambda name: torch.float32 if name == BUFFER else options.dtype,
        )
        _check_bytes(folder, load, all_shapes, options.dtype)
    return Path(output)


def _check_bytes(
    folder: Path, load: Callable[[str], Tensor], shapes: Mapping[str, object], dtype: torch.dtype
) -> None:
    """What was written is what was read: a plain renaming needs no logits."""
    written = read_torch_file(folder / "pytorch_model.bin")
    check_names(written, shapes, "pytorch_model.bin")
    for name in shapes:
        wanted = load(name) if name == BUFFER else load(name).to(dtype)
        if not torch.equal(written[name], wanted):
            raise UserError(f"{name} was written with other values; check the disk and try again")


def _write_tokenizer(
    source: str | Path | None, folder: Path, model: ModelConfig
) -> TokenizerFacts | None:
    if source is None:
        logger.warning("no tokenizer is known, so the folder has none; name one with --tokenizer")
        return None
    facts = export_tokenizer(source, folder, model.sequence_length)
    if facts.vocab_size > model.vocab_size:
        raise UserError(
            f"tokenizer {source} has {facts.vocab_size} tokens, but model.vocab_size="
            f"{model.vocab_size}; export with the tokenizer that the model was trained with"
        )
    return facts


def _write_config(
    folder: Path, model: ModelConfig, rows: int, tokens: TokenizerFacts | None, dtype: torch.dtype
) -> None:
    ids = {}
    if tokens is not None:
        ids = {"bos_token_id": tokens.bos, "eos_token_id": tokens.eos, "pad_token_id": tokens.pad}
    config = to_hf_config(model, vocab_size=rows, **ids).to_dict()
    config |= {
        "architectures": ["ParcaeForCausalLM"],
        "dtype": str(dtype).removeprefix("torch."),
        "auto_map": {
            "AutoConfig": "configuration_parcae.ParcaeConfig",
            "AutoModel": "modeling_parcae.ParcaeModel",
            "AutoModelForCausalLM": "modeling_parcae.ParcaeForCausalLM",
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    generation: dict[str, object] = {"_from_model_config": False, "do_sample": False, **ids}
    if rows > model.vocab_size:
        generation["suppress_tokens"] = list(range(model.vocab_size, rows))
    generation = {name: value for name, value in generation.items() if value is not None}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    for name in CODE:
        shutil.copyfile(Path(__file__).parent / name, folder / name)


@contextlib.contextmanager
def new_folder(output: Path, *, force: bool) -> Iterator[Path]:
    """A folder that gets its name only when everything in it has been written."""
    if output.exists() and not force:
        raise UserError(f"{output} exists already; choose another --output or give --force")
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        yield partial
        old = output.with_name(f".{output.name}.old-{os.getpid()}")
        if output.exists():
            output.rename(old)
        partial.rename(output)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
