"""When checkpoints are written, kept and read: the run's folder over time.

{checkpoint.dir}/step_00000100/ ...  latest (name of the newest)  config.yaml (this run's)
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Protocol

import torch

import megaparcae
from megaparcae.checkpoint.compatibility import check_same_run
from megaparcae.checkpoint.history import (
    POINTER,
    in_order,
    pointed_at,
    step_folders,
    step_of,
    superfluous,
)
from megaparcae.checkpoint.ranks import broadcast, gather, rank, together, world_size
from megaparcae.checkpoint.storage import (
    META,
    find_damage,
    newest_folder,
    read_folder,
    read_meta,
    sync,
    write_folder,
    write_synced,
)
from megaparcae.config.load import dump_config
from megaparcae.config.schema import RunConfig
from megaparcae.errors import UserError
from megaparcae.log import logger
from megaparcae.parallel.shard import Fragment

SPARE = 1.02
"""A save needs this much of its tensors' bytes on the disk, and for each tensor"""
HEADER = 2048
"""bytes that say what it is."""


class Checkpointed(Protocol):
    """What a checkpoint needs of an engine."""

    def owned_fragments(self) -> list[Fragment]:
        """Weights and states that this rank writes."""
        ...

    def local_fragments(self) -> list[Fragment]:
        """Weights and states that this rank needs; their storage exists."""
        ...

    def step_count(self) -> int:
        """Updates made."""
        ...

    def finish_load(self, updates: int) -> None:
        """Everything was loaded in place."""
        ...


class CheckpointManager:
    """Saves and restores one run. All ranks call every method together."""

    def __init__(self, config: RunConfig, global_batch: int) -> None:
        self.config = config
        self.global_batch = global_batch
        self.dir = Path(config.checkpoint.dir)
        self.is_first = rank() == 0
        self.damaged: set[Path] = set()
        """Checkpoints found damaged in this process: they don't count among those to keep."""

    def resume(self, engine: Checkpointed) -> int:
        """Restore the newest complete checkpoint; the number of steps made, 0 for a new run.

        Raises UserError when checkpoint.resume forbids what is there, or the run does not fit it.
        """
        mode = self.config.checkpoint.resume
        self._remove_unfinished()
        folder = None if mode == "never" else self._newest_complete()
        if mode == "must" and folder is None:
            raise UserError(
                f"checkpoint.resume=must, but {self.dir} has no complete checkpoint; check "
                "checkpoint.dir, or use resume: auto to start a new run"
            )
        if folder is None:
            self._begin(engine)
            return 0
        meta = read_meta(folder)
        check_same_run(self.config, folder, self.global_batch, meta)
        read_folder(folder, engine.local_fragments())
        engine.finish_load(meta["updates"])
        logger.info("resumed %s: %d steps made", folder, meta["step"])
        self._write_config()
        return int(meta["step"])

    def restore(self, step: int, engine: Checkpointed) -> None:
        """Weights and states of the checkpoint that this run wrote at `step`."""
        folder = self.dir / f"step_{step:08d}"
        meta = read_meta(folder)
        read_folder(folder, engine.local_fragments())
        engine.finish_load(meta["updates"])
        logger.info("rolled back to %s", folder)

    def save(self, step: int, engine: Checkpointed) -> Path | None:
        """Write step_XXXXXXXX, move `latest`, delete what need not be kept.

        None when it could not be written and an older checkpoint stands: the run may go on. Raises
        OSError when there is none to fall back to.
        """
        folder = self.dir / f"step_{step:08d}"
        problem = self._write(folder, step, engine)
        if problem is None:
            return folder
        complete = [f for f in step_folders(self.dir) if (f / META).is_file()]
        if not broadcast(any(f not in self.damaged for f in complete)):
            raise OSError(problem)
        self._warn("%s; step %d is not saved, older checkpoints stand", problem, step)
        return None

    def _write(self, folder: Path, step: int, engine: Checkpointed) -> str | None:
        """All of a save; what went wrong, the same on all ranks, or None."""
        fragments = engine.owned_fragments()
        meta = {
            "step": step,
            "updates": engine.step_count(),
            "global_batch_size": self.global_batch,
            "world_size": world_size(),
            "versions": {"megaparcae": megaparcae.__version__, "torch": torch.__version__},
        }
        try:
            problem = self._too_little_space(fragments)
            if problem is not None:
                return problem
            write_folder(folder, fragments, config_text=dump_config(self.config), meta=meta)
            together(lambda: self._move_pointer(folder) if self.is_first else None)
        except OSError as error:
            return f"checkpoint.dir={self.dir} can't be written ({error}); check disk and quota"
        self.damaged.discard(folder)
        if self.is_first:
            self._delete_old(step)
        return None

    def _move_pointer(self, folder: Path) -> None:
        pointer = self.dir / f".tmp-{POINTER}"
        write_synced(pointer, folder.name + "\n")
        pointer.replace(self.dir / POINTER)
        sync(self.dir)

    def _begin(self, engine: Checkpointed) -> None:
        """A new run: a folder that can be written, and weights from elsewhere if asked."""
        problem = broadcast(self._why_unwritable() if self.is_first else None)
        if problem is not None:
            raise UserError(
                f"checkpoint.dir={self.dir} can't be written ({problem}); choose a folder that can"
            )
        self._write_config()
        source = self.config.checkpoint.init_from
        if source is not None:
            weights = [f for f in engine.local_fragments() if f.name.startswith("model.")]
            read_folder(newest_folder(source), weights)
            engine.finish_load(0)
            logger.info("weights taken from %s", source)

    def _why_unwritable(self) -> str | None:
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            (self.dir / ".tmp-latest").touch()
            (self.dir / ".tmp-latest").unlink()
        except OSError as error:
            return str(error.strerror)
        return None

    def _write_config(self) -> None:
        if self.is_first:
            write_synced(self.dir / "config.yaml", dump_config(self.config))

    def _newest_complete(self) -> Path | None:
        """The newest undamaged checkpoint; every rank looks into its share of the files."""
        names = broadcast([f.name for f in in_order(self.dir) if _is_of_a_run(f)])
        pointed = broadcast(pointed_at(self.dir))
        if names and pointed is None:
            self._warn("%s names no checkpoint; trying the newest", self.dir / POINTER)
        for folder in (self.dir / name for name in names):
            problems = gather(find_damage(folder, rank(), world_size()))
            damage = next((p for p in problems if p is not None), None)
            if damage is None:
                return folder
            self.damaged.add(folder)
            self._warn("%s is damaged (%s); trying another", folder, damage)
        return None

    def _remove_unfinished(self) -> None:
        """What a save that was killed has left."""
        if self.is_first:
            for left in self.dir.glob(".tmp-*step_*"):
                shutil.rmtree(left, ignore_errors=True)

    def _delete_old(self, step: int) -> None:
        options = self.config.checkpoint
        old = superfluous(
            self.dir,
            step,
            keep=options.keep,
            keep_every=options.keep_every,
            damaged=self.damaged,
        )
        for folder in old:
            shutil.rmtree(folder, ignore_errors=True)

    def _too_little_space(self, fragments: list[Fragment]) -> str | None:
        sizes = [SPARE * f.tensor.numel() * f.tensor.element_size() + HEADER for f in fragments]
        needed = sum(gather(sum(sizes)))
        together(lambda: self.dir.mkdir(parents=True, exist_ok=True))
        free = broadcast(shutil.disk_usage(self.dir).free)
        if free >= needed:
            return None
        return (
            f"checkpoint.dir={self.dir} has {free / 1e6:.1f} MB free, but a checkpoint takes "
            f"{needed / 1e6:.1f} MB; free some space or choose another folder"
        )

    def _warn(self, message: str, *values: object) -> None:
        """What all ranks know is said once."""
        if self.is_first:
            logger.warning(message, *values)


def _is_of_a_run(folder: Path) -> bool:
    """Imported weights lie in a folder without meta.json; a damaged one may have lost it."""
    return (folder / META).is_file() or step_of(folder) != 0
