"""Which checkpoint of a run is its newest, and which are no longer needed.

A run may go back: the newest one is damaged, `latest` was set to an earlier step by hand, or a new
run began in an old folder. Folders of later steps then lie there that it has yet to write again;
they are neither its newest, nor a reason to delete what it has.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

POINTER = "latest"
"""File in the run's folder with the name of its newest checkpoint."""
META = "meta.json"
"""File in a checkpoint with its step, and size and hash of its files."""
DAMAGED = "damaged.txt"
"""File in a checkpoint that a process found damaged: what is wrong with it."""


def step_of(folder: Path) -> int:
    """The step at which a checkpoint was saved."""
    return int(folder.name.removeprefix("step_"))


def step_folders(run_dir: Path) -> list[Path]:
    """All checkpoints that got their name, newest step first."""
    found = [f for f in run_dir.glob("step_*") if re.fullmatch(r"step_\d+", f.name)]
    return sorted(found, key=step_of, reverse=True)


def pointed_at(run_dir: Path) -> Path | None:
    """The checkpoint that `latest` names; None when it names none that exists."""
    try:
        name = (run_dir / POINTER).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return next((f for f in step_folders(run_dir) if f.name == name), None)


def in_order(run_dir: Path) -> list[Path]:
    """Checkpoints in the order in which to try them: the one of `latest`, those before it, newest
    first, and those after it last. Without a pointer the newest first."""
    found = step_folders(run_dir)
    newest = pointed_at(run_dir)
    if newest is None:
        return found
    return sorted(found, key=lambda folder: step_of(folder) > step_of(newest))


def superfluous(
    run_dir: Path, step: int, *, keep: int, keep_every: int, keep_best: int
) -> list[Path]:
    """What may go once `step` is in place: all up to it but the newest `keep` sound ones.

    `keep` 0 keeps everything. Every `keep_every`-th step stays, and the `keep_best` of the lowest
    validation loss. A damaged one counts for nothing.
    """
    if not keep:
        return []
    old = [folder for folder in step_folders(run_dir) if step_of(folder) <= step]
    newest: list[Path] = []
    while old and len(newest) < keep:
        folder = old.pop(0)
        if looks_sound(folder):
            newest.append(folder)
    old = [f for f in old if (f / META).is_file() and not (f / DAMAGED).exists()]
    losses = {folder: loss for folder in [*newest, *old] if (loss := _loss(folder)) is not None}
    best = sorted(losses, key=lambda folder: losses[folder])[:keep_best]
    return [
        folder
        for folder in old
        if folder not in best and (not keep_every or step_of(folder) % keep_every)
    ]


def looks_sound(folder: Path) -> bool:
    """Whether no process found it damaged, and all files are there in their size."""
    return not (folder / DAMAGED).exists() and wrong_size(folder) is None


def wrong_size(folder: Path) -> str | None:
    """The first file that is missing or has another size than meta.json says, or None."""
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
    return None


def read_meta(folder: Path) -> dict[str, Any]:
    """meta.json. Raises ValueError or OSError when it is missing or damaged."""
    meta = json.loads((folder / META).read_text(encoding="utf-8"))
    if not isinstance(meta, dict) or not {"step", "files"} <= meta.keys():
        raise ValueError(f"{folder / META} is not a checkpoint's")
    return meta


def _loss(folder: Path) -> float | None:
    """Validation loss at the step of a checkpoint, if it was taken there."""
    try:
        loss = read_meta(folder).get("validation_loss")
    except (OSError, ValueError):
        return None
    return float(loss) if loss is not None and math.isfinite(loss) else None
