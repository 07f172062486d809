"""DCP's `.metadata` without trusting the pickle that it is."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from megaparcae.errors import UserError

OF_METADATA = (
    "Metadata",
    "MetadataIndex",
    "TensorStorageMetadata",
    "ChunkStorageMetadata",
    "BytesStorageMetadata",
    "TensorProperties",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
ADMITTED = {
    *(("torch.distributed.checkpoint.metadata", name) for name in OF_METADATA),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("builtins", "set"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}
"""Everything that a checkpoint's metadata consists of, besides torch's dtypes."""


class _Unpickler(pickle.Unpickler):
    """Compares names before anything is imported or looked up: a dotted name leads anywhere."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in ADMITTED:
            return super().find_class(module, name)
        raise UserError(f".metadata refers to {module}.{name}, which is no part of a checkpoint")


class SafeReader(FileSystemReader):
    """DCP's reader of a checkpoint folder that may come from anywhere."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises UserError when the file is damaged or holds anything but metadata."""
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                metadata = _Unpickler(file).load()
        except (UserError, OSError):
            raise
        except Exception as error:  # a damaged pickle fails in many ways
            raise UserError(f"{path} is damaged ({error}); use another step") from error
        if not isinstance(metadata, Metadata):
            raise UserError(f"{path} is not a checkpoint's; use another step")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
