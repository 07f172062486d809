"""Writing and reading weights tensor by tensor: safetensors shards and torch files.

Nothing here holds more than one tensor, and its copy in the output's type, at a time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megaparcae.checkpoint.model_tensors import LazyTensors
from megaparcae.errors import UserError

Shape = tuple[int, ...]
Loader = Callable[[str], Tensor]

DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
CHUNK_BYTES = 64 << 20


def read_safetensors(folder: Path) -> LazyTensors:
    """The tensors of every .safetensors file in a folder."""
    shapes: dict[str, Shape] = {}
    files: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with _open_safetensors(path) as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                shapes[name] = tuple(file.get_slice(name).get_shape())
                files[name] = path

    def load(name: str) -> Tensor:
        with _open_safetensors(files[name]) as file:
            return file.get_tensor(name)

    return LazyTensors(shapes, load)


def read_torch_file(path: Path) -> LazyTensors:
    """The tensors of a torch file; those below `model` or `state_dict` when it has such a key."""
    data = _layout(path)
    for key in ("model", "state_dict"):
        if isinstance(data, dict) and isinstance(data.get(key), dict):
            data = data[key]
    tensors = {name: value for name, value in data.items() if isinstance(value, Tensor)}

    def load(name: str) -> Tensor:
        tensor = tensors[name]
        storage = tensor.untyped_storage()
        content = bytearray(storage.nbytes())
        with path.open("rb") as file:
            file.seek(storage._checkpoint_offset or 0)
            if file.readinto(content) != len(content):
                raise UserError(f"{path} ends inside {name}; copy it again")
        flat = torch.frombuffer(content, dtype=tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    return LazyTensors({name: tuple(t.shape) for name, t in tensors.items()}, load)


def _layout(path: Path) -> Any:
    """A torch file's content with fake tensors, which know where in the file their bytes are."""
    try:
        with FakeTensorMode():
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(f"{path} can't be read as a torch file ({error}); copy it again") from error


def write_safetensors(
    folder: Path, shapes: Mapping[str, Shape], load: Loader, dtype: torch.dtype, shard_bytes: int
) -> None:
    """Write `model*.safetensors` (and the index when there are several) from `load(name)`."""
    shards = plan_shards(shapes, dtype, shard_bytes)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        _write_shard(folder / name, {n: shapes[n] for n in shard}, load, dtype)
    if len(shards) > 1:
        where = {n: name for name, shard in zip(names, shards, strict=True) for n in shard}
        total = sum(_num_bytes(shape, dtype) for shape in shapes.values())
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def plan_shards(
    shapes: Mapping[str, Shape], dtype: torch.dtype, shard_bytes: int
) -> list[list[str]]:
    """Names in order, cut so that no shard of several tensors is above `shard_bytes`."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, shape in shapes.items():
        size = _num_bytes(shape, dtype)
        if shards[-1] and used + size > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def _write_shard(path: Path, shapes: Mapping[str, Shape], load: Loader, dtype: torch.dtype) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + _num_bytes(shape, dtype)
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            tensor = load(name)
            assert tuple(tensor.shape) == shape, (name, tuple(tensor.shape), shape)
            for piece in tensor_bytes(tensor, dtype):
                file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def write_torch_file(
    path: Path, shapes: Mapping[str, Shape], load: Loader, dtype: Callable[[str], torch.dtype]
) -> None:
    """Write a dict of tensors as torch.save would, one tensor after the other.

    The file is laid out first, from storages whose pages are never touched; then filled in.
    """
    empty = {name: torch.empty(shape, dtype=dtype(name)) for name, shape in shapes.items()}
    with torch.serialization.skip_data():
        torch.save(empty, path)
    del empty
    offsets = {n: t.untyped_storage()._checkpoint_offset for n, t in _layout(path).items()}
    with path.open("r+b") as file:
        for name in shapes:
            file.seek(offsets[name])
            for piece in tensor_bytes(load(name), dtype(name)):
                file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def tensor_bytes(tensor: Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    """The tensor's bytes in `dtype`, in pieces that are converted one by one."""
    flat = tensor.detach().contiguous().view(-1)
    step = CHUNK_BYTES // 4
    for begin in range(0, flat.numel(), step):
        piece = flat[begin : begin + step].to(dtype)
        yield memoryview(piece.view(torch.uint8).numpy().data)


def _num_bytes(shape: Shape, dtype: torch.dtype) -> int:
    size = torch.empty((), dtype=dtype).element_size()
    for extent in shape:
        size *= extent
    return size


def _open_safetensors(path: Path):  # type: ignore[no-untyped-def]
    try:
        return safe_open(path, framework="pt")
    except Exception as error:
        raise UserError(f"{path} can't be read as safetensors ({error}); copy it again") from error
