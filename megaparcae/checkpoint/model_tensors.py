"""Weights in and out of a checkpoint folder, one tensor at a time.

A checkpoint is a torch distributed checkpoint whose weights are stored whole, in fp32, under
`model.<canonical name>`. Nothing here needs a process group.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from megaparcae.checkpoint.metadata import SafeReader
from megaparcae.checkpoint.storage import CONFIG
from megaparcae.config.load import load_config
from megaparcae.config.schema import RunConfig
from megaparcae.errors import UserError

PREFIX = "model."

Shape = tuple[int, ...]


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name, read when they are asked for; `shapes` are known without reading."""

    def __init__(self, shapes: Mapping[str, Shape], load: Callable[[str], Tensor]) -> None:
        self.shapes = dict(shapes)
        self.load = load

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.shapes:
            raise KeyError(name)
        return self.load(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def read_run_config(folder: Path) -> RunConfig:
    """The configuration saved in a checkpoint folder, or beside it."""
    for path in (folder / CONFIG, folder.parent / CONFIG):
        if path.is_file():
            return load_config(path)
    raise UserError(f"{folder} has no {CONFIG} in it or beside it; copy it from the run's folder")


def read_model_tensors(folder: str | Path) -> LazyTensors:
    """The weights of a checkpoint folder by canonical name.

    Raises UserError when the folder isn't a checkpoint, holds no weights, or a file is damaged.
    """
    folder = Path(folder)
    if not (folder / ".metadata").is_file():
        raise UserError(
            f"{folder} isn't a checkpoint: it has no .metadata file; name a step_XXXXXXXX folder"
        )
    reader = SafeReader(folder)
    entries = reader.read_metadata().state_dict_metadata
    stored = {
        name.removeprefix(PREFIX): entry
        for name, entry in entries.items()
        if name.startswith(PREFIX) and isinstance(entry, TensorStorageMetadata)
    }
    if not stored:
        raise UserError(f"{folder} holds no weights (no tensor named {PREFIX}*)")

    def load(name: str) -> Tensor:
        entry = stored[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        try:
            _quietly(dcp_load, {PREFIX + name: tensor}, storage_reader=reader, no_dist=True)
        except Exception as error:
            raise UserError(
                f"{folder}: {name} can't be read, the checkpoint is damaged ({error})"
            ) from error
        return tensor

    return LazyTensors({name: tuple(entry.size) for name, entry in stored.items()}, load)


def write_model_tensors(folder: str | Path, tensors: LazyTensors) -> None:
    """Write weights as a checkpoint folder: whole, in fp32, one after the other."""
    empty = {
        PREFIX + name: torch.empty(shape, dtype=torch.float32, device="meta")
        for name, shape in tensors.shapes.items()
    }
    _quietly(
        dcp_save,
        empty,
        # A file per tensor: within a file torch keeps all its tensors until it is complete.
        storage_writer=FileSystemWriter(folder, single_file_per_rank=False, thread_count=1),
        planner=_StreamingPlanner(tensors),
        no_dist=True,
    )
    for path in Path(folder).iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


class _StreamingPlanner(DefaultSavePlanner):
    """Asks for a tensor when it is written, and not before."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(enable_plan_caching=False)
        self.tensors = tensors

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        name = write_item.index.fqn.removeprefix(PREFIX)
        return self.tensors[name].float().contiguous()


def _quietly(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Without torch's warning that there is no process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*args, **options)
