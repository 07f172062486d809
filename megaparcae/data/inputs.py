"""Where text comes from: files, folders, globs, stdin, Hugging Face datasets."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megaparcae.errors import UserError

Format = Literal["jsonl", "txt", "parquet", "arrow", "hub"]
FORMATS = ("auto", "jsonl", "txt", "parquet", "arrow")
SUFFIXES: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".txt": "txt",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
COMPRESSIONS = (".gz", ".zst")
STDIN = "-"
HUB = "hf:"


@dataclass(frozen=True)
class Source:
    """One input file (or stdin, or a dataset of a hub)."""

    path: str
    format: Format
    size: int
    """Bytes as stored; 0 when unknown."""


def find_sources(inputs: Sequence[str], format: str = "auto", split: str = "train") -> list[Source]:
    """The files behind `--input` values, folders and globs in sorted order.

    Raises UserError for what does not exist, holds nothing readable or is of no known kind.
    """
    sources: list[Source] = []
    for value in inputs:
        found = _expand(value, format, split)
        if not found:
            raise UserError(
                f"--input {value}: no readable file found; known are {', '.join(SUFFIXES)} "
                "(text also as .gz or .zst)"
            )
        sources += found
    return sources


def parse_separator(text: str | None) -> bytes | None:
    """Bytes of --separator, in which the backslash sequences of Python may stand for characters."""
    if not text:
        return None
    return text.encode("latin-1", "backslashreplace").decode("unicode_escape").encode()


def _expand(value: str, format: str, split: str) -> list[Source]:
    if value == STDIN:
        return [Source(STDIN, "jsonl" if format == "auto" else format, 0)]  # type: ignore[arg-type]
    if value.startswith(HUB):
        return [Source(value, "hub", 0)]
    if os.path.isdir(value):
        return _folder(Path(value), format, split)
    paths = sorted(glob.glob(value, recursive=True)) if glob.has_magic(value) else [value]
    sources: list[Source] = []
    for path in paths:
        if os.path.isdir(path):
            sources += _folder(Path(path), format, split)
        elif not os.path.exists(path):
            raise UserError(f"--input {path} does not exist; check the path")
        else:
            sources.append(_file(path, format))
    return sources


def _folder(folder: Path, format: str, split: str) -> list[Source]:
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_bytes()).get("splits", [])
        if split not in splits:
            raise UserError(
                f"--split {split}: dataset {folder} has the splits {', '.join(splits)}; name one"
            )
        folder = folder / split
    if (folder / "state.json").is_file():
        return _saved_dataset(folder)
    paths = sorted(str(path) for path in folder.rglob("*") if path.is_file())
    return [_file(path, format) for path in paths if _known_format(path)]


def _saved_dataset(folder: Path) -> list[Source]:
    """Arrow files that Hugging Face `save_to_disk` wrote."""
    state = json.loads((folder / "state.json").read_bytes())
    if state.get("_indices_data_files"):
        raise UserError(
            f"--input {folder}: the dataset has an index of selected rows; call flatten_indices() "
            "before save_to_disk()"
        )
    return [_file(str(folder / file["filename"]), "arrow") for file in state["_data_files"]]


def _file(path: str, format: str) -> Source:
    kind = _known_format(path) if format == "auto" else format
    if kind is None:
        raise UserError(
            f"--input {path}: unknown kind of file; known are {', '.join(SUFFIXES)} (text also as "
            ".gz or .zst), or say --input-format"
        )
    return Source(path, kind, os.path.getsize(path))  # type: ignore[arg-type]


def _known_format(path: str) -> Format | None:
    name = path
    for compression in COMPRESSIONS:
        name = name.removesuffix(compression)
    format = SUFFIXES.get(os.path.splitext(name)[1].lower())
    return None if name != path and format in ("parquet", "arrow") else format
