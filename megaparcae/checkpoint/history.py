"""Which checkpoint of a run is its newest, and which are no longer needed.

A run may go back: the newest one is damaged, `latest` was set to an earlier step by hand, or a new
run began in an old folder. Folders of later steps then lie there that it has yet to write again;
they are neither its newest, nor a reason to delete what it has.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

POINTER = "latest"
"""File in the run's folder with the name of its newest checkpoint."""


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
    run_dir: Path, step: int, *, keep: int, keep_every: int, damaged: Collection[Path]
) -> list[Path]:
    """What may go once `step` is in place: all up to it but the newest `keep` sound ones.

    `keep` 0 keeps everything; every `keep_every`-th step stays.
    """
    sound = [
        folder
        for folder in step_folders(run_dir)
        if step_of(folder) <= step and (folder / "meta.json").is_file() and folder not in damaged
    ]
    old = sound[keep:] if keep else []
    return [folder for folder in old if not keep_every or step_of(folder) % keep_every]
