"""One checkpoint folder: fragments of full tensors through torch DCP, written whole or not at all.

    step_00000100/   __R_N.distcp (data of rank R), .metadata (where each rectangle lies),
                     config.yaml, meta.json (step, versions, size and hash of every file)

Written under a temporary name, synced, then renamed. Any layout reads what any other wrote: tensors
are stored under their canonical names, as rectangles of the full tensor.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from megaparcae.errors import UserError
from megaparcae.parallel.shard import Fragment

META = "meta.json"
CONFIG = "config.yaml"


class _FragmentSaver(DefaultSavePlanner):
    """Writes this rank's fragments, and nothing else."""

    def __init__(self, fragments: Iterable[Fragment]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.fragments = {
            MetadataIndex(f.name, torch.Size(f.offset), i): f for i, f in enumerate(fragments)
        }

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(index, f) for index, f in self.fragments.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.fragments[index].tensor


def _write_item(index: MetadataIndex, fragment: Fragment) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(fragment.offset), fragment.tensor.shape)
    properties = TensorProperties(dtype=fragment.tensor.dtype)
    data = TensorWriteData(chunk, properties, torch.Size(fragment.full_shape))
    return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)


class _FragmentLoader(DefaultLoadPlanner):
    """Fills this rank's fragments from whatever rectangles were saved."""

    def __init__(self, fragments: Iterable[Fragment]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.fragments: dict[str, list[Fragment]] = {}
        for fragment in fragments:
            self.fragments.setdefault(fragment.name, []).append(fragment)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, fragments in self.fragments.items():
            stored = self.metadata.state_dict_metadata.get(name)
            stored = _checked(name, fragments[0], stored)
            chunks = [ChunkStorageMetadata(torch.Size(f.offset), f.tensor.shape) for f in fragments]
            items += create_read_items_for_chunk_list(name, stored, chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        offset = tuple(index.offset or ())
        return next(f.tensor for f in self.fragments[index.fqn] if f.offset == offset)


def _checked(name: str, fragment: Fragment, stored: object) -> TensorStorageMetadata:
    if not isinstance(stored, TensorStorageMetadata):
        raise UserError(
            f"the checkpoint has no {name}; resume with the optimizer that saved it, or start from "
            "its weights alone with checkpoint.init_from"
        )
    if tuple(stored.size) != fragment.full_shape:
        raise UserError(
            f"the checkpoint's {name} is {tuple(stored.size)}, but this model's is "
            f"{fragment.full_shape}; use the model options that the checkpoint was saved with"
        )
    return stored


PLAIN_TYPES = (
    ("torch.serialization", "_get_layout"),
    ("builtins", "set"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
)


class _Unpickler(pickle.Unpickler):
    """Admits what DCP's metadata consists of, and no other code."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        of_dcp = module.startswith("torch.distributed.checkpoint.") and isinstance(found, type)
        of_torch = module == "torch" and (found is torch.Size or isinstance(found, torch.dtype))
        if of_dcp or of_torch or (module, name) in PLAIN_TYPES:
            return found
        raise UserError(f".metadata refers to {module}.{name}, which is no part of a checkpoint")


class SafeReader(FileSystemReader):
    """DCP's reader, without trusting the pickle that its metadata is."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _Unpickler(file).load()
        assert isinstance(metadata, Metadata)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def write_folder(
    folder: Path, fragments: list[Fragment], *, config_text: str, meta: dict[str, Any]
) -> None:
    """Save as `folder`, all ranks together; the name appears when everything is on disk."""
    rank = _rank()
    temporary = folder.with_name(f".tmp-{folder.name}")
    if rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        (temporary / CONFIG).write_text(config_text, encoding="utf-8")
    _barrier()
    save(
        {},
        storage_writer=FileSystemWriter(temporary, thread_count=1, sync_files=True),
        planner=_FragmentSaver(fragments),
    )
    hashes = _gather(_hash_files(temporary.glob(f"__{rank}_*")))
    if rank == 0:
        for path in (temporary / ".metadata", temporary / CONFIG):
            hashes |= _hash_files([path])
        text = json.dumps({**meta, "files": dict(sorted(hashes.items()))}, indent=1)
        write_synced(temporary / META, text)
        sync(temporary / CONFIG)
        sync(temporary)
        if folder.exists():  # the same step, saved again after a resume
            shutil.rmtree(folder)
        temporary.rename(folder)
        sync(folder.parent)
    _barrier()


def read_folder(folder: Path, fragments: list[Fragment]) -> None:
    """Fill the fragments in place, all ranks together."""
    load({}, storage_reader=SafeReader(folder), planner=_FragmentLoader(fragments))


def read_meta(folder: Path) -> dict[str, Any]:
    """meta.json. Raises ValueError or OSError when it is missing or damaged."""
    meta = json.loads((folder / META).read_text(encoding="utf-8"))
    if not isinstance(meta, dict) or not {"step", "files"} <= meta.keys():
        raise ValueError(f"{folder / META} is not a checkpoint's")
    return meta


def find_damage(folder: Path, share: int = 0, shares: int = 1) -> str | None:
    """What is wrong with a checkpoint's files, or None; looks into every `shares`-th file only."""
    try:
        files = read_meta(folder)["files"]
    except (OSError, ValueError) as error:
        return f"{META}: {error}"
    for name, wanted in files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != wanted["bytes"]:
            there = "missing" if size is None else f"{size} bytes"
            return f"{name}: {there} instead of {wanted['bytes']} bytes"
    for name in sorted(files)[share::shares]:
        if _hash(folder / name) != files[name]["blake2b"]:
            return f"{name}: its content is not what was written"
    return None


def newest_folder(path: str | Path) -> Path:
    """A checkpoint folder from its own path or its run's.

    Raises UserError when there is none, or it is damaged.
    """
    path = Path(path)
    folder = path if (path / ".metadata").is_file() else None
    if folder is None:
        complete = sorted(path.glob("step_*/.metadata"))
        if not complete:
            raise UserError(
                f"{path} holds no checkpoint; name a run's folder or one of its step_* folders"
            )
        folder = complete[-1].parent
    if (folder / "meta.json").is_file() and (damage := find_damage(folder)) is not None:
        raise UserError(f"{folder} is damaged ({damage}); use another step")
    return folder


def write_synced(path: Path, text: str) -> None:
    """Write a small file and wait until it is on disk."""
    path.write_text(text, encoding="utf-8")
    sync(path)


def sync(path: Path) -> None:
    """fsync a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hash_files(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    return {p.name: {"bytes": p.stat().st_size, "blake2b": _hash(p)} for p in paths}


def _hash(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _gather(mine: dict[str, Any]) -> dict[str, Any]:
    """The union over all ranks."""
    if not dist.is_initialized():
        return mine
    everyone: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {name: value for some in everyone for name, value in some.items()}
