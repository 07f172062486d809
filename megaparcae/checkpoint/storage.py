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
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
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

from megaparcae.checkpoint.history import META, in_order, read_meta, wrong_size
from megaparcae.checkpoint.metadata import SafeReader
from megaparcae.checkpoint.ranks import from_dcp, rank, together
from megaparcae.errors import UserError
from megaparcae.parallel.shard import Fragment

FORMAT = 1
"""Version of the folder's layout."""
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


def write_folder(
    folder: Path,
    fragments: list[Fragment],
    *,
    config_text: str,
    meta: dict[str, Any],
    group: ProcessGroup | None = None,
) -> None:
    """Save as `folder`, all ranks together; the name appears when everything is on disk.

    Raises OSError on all ranks when any could not write its part; what was there before stands.
    """
    temporary = folder.with_name(f".tmp-{folder.name}")
    try:
        together(lambda: _prepare(temporary, config_text) if rank() == 0 else None, group)
        _write_fragments(temporary, fragments, group)
        hashes = together(lambda: _hash_files(temporary.glob(f"__{rank()}_*")), group)
        files = {name: entry for mine in hashes for name, entry in mine.items()}
        together(lambda: _finish(temporary, folder, meta, files) if rank() == 0 else None, group)
    except Exception:
        if rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _prepare(temporary: Path, config_text: str) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write_synced(temporary / CONFIG, config_text)


def _write_fragments(folder: Path, fragments: list[Fragment], group: ProcessGroup | None) -> None:
    try:
        save(
            {},
            process_group=group,
            storage_writer=FileSystemWriter(folder, thread_count=1, sync_files=True),
            planner=_FragmentSaver(fragments),
        )
    except CheckpointException as error:
        raise from_dcp(error) from error


def _finish(
    temporary: Path, folder: Path, meta: dict[str, Any], files: dict[str, dict[str, Any]]
) -> None:
    files |= _hash_files([temporary / ".metadata", temporary / CONFIG])
    text = json.dumps({"format": FORMAT, **meta, "files": dict(sorted(files.items()))}, indent=1)
    write_synced(temporary / META, text)
    sync(temporary)
    replaced = folder.with_name(f".tmp-old-{folder.name}")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():  # the same step, saved again after a resume
        folder.rename(replaced)
    temporary.rename(folder)
    sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def read_folder(folder: Path, fragments: list[Fragment]) -> None:
    """Fill the fragments in place, all ranks together.

    Raises UserError when the checkpoint lacks one or has it in another shape.
    """
    try:
        load({}, storage_reader=SafeReader(folder), planner=_FragmentLoader(fragments))
    except CheckpointException as error:
        raise from_dcp(error) from error


def find_damage(folder: Path, share: int = 0, shares: int = 1) -> str | None:
    """What is wrong with a checkpoint's files, or None; looks into every `shares`-th file only."""
    problem = wrong_size(folder)
    if problem is not None:
        return problem
    files = read_meta(folder)["files"]
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
        complete = [f for f in in_order(path) if (f / ".metadata").is_file()]
        if not complete:
            raise UserError(
                f"{path} holds no checkpoint; name a run's folder or one of its step_* folders"
            )
        folder = complete[0]
    if (folder / META).is_file() and (damage := find_damage(folder)) is not None:
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
