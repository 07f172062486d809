"""The golden optimizer run: settings and tensors by prefix."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

FOLDER = Path(__file__).resolve().parents[1] / "golden"


@cache
def meta() -> dict[str, Any]:
    """Settings and results in words."""
    return json.loads((FOLDER / "muon_adamw.json").read_text())["meta"]


@cache
def _all() -> dict[str, Tensor]:
    return load_file(FOLDER / "muon_adamw.safetensors")


def tensors(prefix: str) -> dict[str, Tensor]:
    """Copies of the tensors under `prefix`, by the rest of their names."""
    return {k.removeprefix(prefix): v.clone() for k, v in _all().items() if k.startswith(prefix)}


def names(kind: str) -> list[str]:
    """Parameters that the golden run updates by `kind`."""
    return [n for n, entry in meta()["parameters"].items() if entry["optimizer"] == kind]
