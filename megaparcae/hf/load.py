"""From a folder of others to ours: an export of ours, or the authors' checkpoints.

The format is recognised by itself; tensors stay lazy, so that a large model is never held whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaparcae.checkpoint.model_tensors import LazyTensors
from megaparcae.checkpoint.names import (
    canonical_shapes,
    check_names,
    from_hf,
    official_entries,
    split_parts,
    to_hf,
)
from megaparcae.config.schema import ModelConfig
from megaparcae.errors import UserError
from megaparcae.hf.config import from_hf_config
from megaparcae.hf.configuration_parcae import ParcaeConfig
from megaparcae.hf.official import (
    BUFFER,
    check_rotary_buffer,
    dialect_of,
    model_config_from_official,
)
from megaparcae.hf.stream import read_safetensors, read_torch_file

TORCH_FILES = ("pytorch_model.bin", "model.pt", "model.pth")
WRAPPERS = ("_orig_mod.", "module.")
"""Prefixes that torch.compile and data parallelism leave in names."""

TABLES = ("embedding.", "value_embeddings.", "head.")


@dataclass(frozen=True)
class Loaded:
    """A model of others in our terms."""

    format: str
    """hf, parcae, gpt or huginn."""
    config: ModelConfig
    tensors: LazyTensors
    """By canonical name, with padded vocabulary rows."""
    tokenizer: Path | None
    """Its folder, when it has a tokenizer."""


def load_folder(folder: str | Path) -> Loaded:
    """Recognise the format of `folder` and map its tensors to canonical names, strictly."""
    folder = Path(folder)
    config, tensors = read_config(folder), read_tensors(folder)
    if config.get("model_type") == "parcae":
        return _from_export(folder, config, tensors)
    if "n_embd" in config and "block_size" in config:
        return _from_official(folder, config, tensors)
    raise UserError(
        f"{folder}/config.json describes neither an export of ours (model_type 'parcae') nor a "
        f"checkpoint of the authors, but model_type={config.get('model_type')!r}; a plain "
        "Llama-style model can be turned into a looped one with --retrofit"
    )


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{path} is missing; name the folder that holds config.json and weights")
    try:
        content = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"{path} isn't JSON (line {error.lineno}); copy it again") from error
    assert isinstance(content, dict)
    return content


def read_tensors(folder: Path) -> LazyTensors:
    """All tensors of a folder: safetensors, else a torch file."""
    if any(folder.glob("*.safetensors")):
        tensors = read_safetensors(folder)
    else:
        found = [folder / name for name in TORCH_FILES if (folder / name).is_file()]
        if not found:
            raise UserError(
                f"{folder} has no weights: *.safetensors or {', '.join(TORCH_FILES)} is expected"
            )
        tensors = read_torch_file(found[0])
    return _without_wrappers(tensors)


def _without_wrappers(tensors: LazyTensors) -> LazyTensors:
    names = {}
    for name in tensors:
        short = name
        for wrapper in WRAPPERS:
            short = short.removeprefix(wrapper)
        names[short] = name
    shapes = {short: tensors.shapes[name] for short, name in names.items()}
    return LazyTensors(shapes, lambda short: tensors[names[short]])


def _tokenizer_of(folder: Path) -> Path | None:
    there = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
    return folder if there else None


def _from_export(folder: Path, content: Mapping[str, Any], tensors: LazyTensors) -> Loaded:
    config = from_hf_config(ParcaeConfig.from_dict(dict(content)))
    shapes = canonical_shapes(config)
    check_names((from_hf(name) for name in tensors), shapes, f"{folder}")

    def load(name: str) -> Tensor:
        tensor = tensors[to_hf(name)]
        return pad_rows(tensor, shapes[name][0]) if name.startswith(TABLES) else tensor

    return Loaded("hf", config, LazyTensors(shapes, load), _tokenizer_of(folder))


def _from_official(folder: Path, content: Mapping[str, Any], tensors: LazyTensors) -> Loaded:
    config = model_config_from_official(content)
    dialect = dialect_of(tensors)
    shapes = canonical_shapes(config)
    entries = official_entries(config, dialect)
    names = {entry.official for entry in entries} | {BUFFER}
    optional = {BUFFER} | ({"lm_head.weight"} if config.tie_embeddings else set())
    check_names(tensors, names - (optional - set(tensors)), f"{folder}")
    if BUFFER in tensors:
        check_rotary_buffer(config, tensors[BUFFER])
    if config.tie_embeddings and "lm_head.weight" in tensors:
        _check_tie(folder, tensors)
    where = {
        name: (entry, i)
        for entry in entries
        if entry.official in tensors and entry.official != "lm_head.weight"
        for i, name in enumerate(entry.canonical)
    }
    if not config.tie_embeddings:
        where["head.weight"] = (entries[-1], 0)

    def load(name: str) -> Tensor:
        entry, i = where[name]
        return split_parts(entry, tensors[entry.official], shapes)[i]

    return Loaded(dialect, config, LazyTensors(shapes, load), _tokenizer_of(folder))


def _check_tie(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    if not torch.equal(tensors["lm_head.weight"], tensors["transformer.wte.weight"]):
        raise UserError(
            f"{folder}: tie_embeddings is true, but lm_head.weight and transformer.wte.weight "
            "differ; set tie_embeddings to false in config.json"
        )


def pad_rows(tensor: Tensor, rows: int) -> Tensor:
    """Zero rows for the padded part of the vocabulary."""
    if tensor.shape[0] == rows:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(rows - tensor.shape[0], *tensor.shape[1:])])
