"""When checkpoints are written, kept and read: the run's folder over time.

{checkpoint.dir}/step_00000100/ ...  latest (name of the newest)  config.yaml (this run's)
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

import megaparcae
from megaparcae.checkpoint.background import HostCopies, Task
from megaparcae.checkpoint.compatibility import check_same_run
from megaparcae.checkpoint.history import (
    DAMAGED,
    META,
    POINTER,
    in_order,
    looks_sound,
    pointed_at,
    read_meta,
    step_folders,
    step_of,
    superfluous,
)
from megaparcae.checkpoint.ranks import (
    broadcast,
    file_group,
    gather,
    rank,
    together,
    world_size,
)
from megaparcae.checkpoint.storage import (
    find_damage,
    newest_folder,
    read_folder,
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


@dataclass(frozen=True, kw_only=True)
class SaveResult:
    """How a save ended; the same on all ranks, but for the times."""

    step: int
    folder: Path | None
    """None when it could not be written and an older checkpoint stands."""
    problem: str | None
    seconds: float
    """From its begin until it was on disk."""
    stall_seconds: float
    """Of these, what the caller waited."""


class CheckpointManager:
    """Saves and restores one run. All ranks call every method together, `over` excepted."""

    def __init__(self, config: RunConfig, global_batch: int) -> None:
        self.config = config
        self.global_batch = global_batch
        self.dir = Path(config.checkpoint.dir)
        self.is_first = rank() == 0
        self.group = file_group()
        self.copies = HostCopies()
        self.pending: tuple[int, Task] | None = None
        """Step and thread of the save that is being written."""
        self.stall = 0.0
        self.room: Task | None = None

    def resume(self, engine: Checkpointed) -> int:
        """Restore the newest complete checkpoint; the number of steps made, 0 for a new run.

        Raises UserError when checkpoint.resume forbids what is there, when all of it is damaged,
        or when the run does not fit it.
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
        folder = self._folder(step)
        meta = read_meta(folder)
        read_folder(folder, engine.local_fragments())
        engine.finish_load(meta["updates"])
        logger.info("rolled back to %s", folder)

    def prepare(self, engine: Checkpointed) -> None:
        """Make room for the copies of a save while training goes on: the first one is then as
        short as the others. States exist by now."""
        if self.config.checkpoint.asynchronous:
            fragments = engine.owned_fragments()
            self.room = Task(lambda: self.copies.reserve(fragments))

    def begin(
        self, step: int, engine: Checkpointed, *, validation_loss: float | None = None
    ) -> None:
        """Start to write step_XXXXXXXX in the background, move `latest`, delete what need not be
        kept. Training may go on when it returns; `wait` must be called before the next."""
        assert self.pending is None, "the save before has not been waited for"
        started = time.perf_counter()
        if self.room is not None:
            self.room.wait()
            self.room = None
        copies = self.copies.take(engine.owned_fragments())
        write = partial(self._write, step, copies, self._meta(step, engine, validation_loss))
        self.pending = step, Task(write)
        self.stall = time.perf_counter() - started

    def over(self) -> bool:
        """Whether a save that was begun has ended on this rank, so that `wait` is short."""
        return self.pending is not None and self.pending[1].over()

    def wait(self) -> SaveResult | None:
        """The end of the save that was begun; None when there is none.

        Raises OSError when it could not be written and there is no older one.
        """
        if self.pending is None:
            return None
        (step, task), self.pending = self.pending, None
        started = time.perf_counter()
        problem = task.wait()
        stall = self.stall + time.perf_counter() - started
        return self._result(step, problem, self.stall + task.seconds, stall)

    def save(
        self, step: int, engine: Checkpointed, *, validation_loss: float | None = None
    ) -> SaveResult:
        """Write step_XXXXXXXX and wait until it is on disk, without a copy of what is saved.

        Raises OSError when that fails and there is no older one to fall back to.
        """
        started = time.perf_counter()
        meta = self._meta(step, engine, validation_loss)
        problem = self._write(step, engine.owned_fragments(), meta)
        seconds = time.perf_counter() - started
        return self._result(step, problem, seconds, seconds)

    def close(self, timeout: float) -> None:
        """Give a save that is being written some seconds to its end; the run has failed."""
        if self.pending is not None:
            self.pending[1].thread.join(timeout)

    def _result(self, step: int, problem: str | None, seconds: float, stall: float) -> SaveResult:
        if problem is not None:
            if not broadcast(any(map(looks_sound, step_folders(self.dir))), self.group):
                raise OSError(problem)
            self._warn("%s; step %d is not saved, older checkpoints stand", problem, step)
        return SaveResult(
            step=step,
            folder=None if problem else self._folder(step),
            problem=problem,
            seconds=seconds,
            stall_seconds=stall,
        )

    def _folder(self, step: int) -> Path:
        return self.dir / f"step_{step:08d}"

    def _meta(
        self, step: int, engine: Checkpointed, validation_loss: float | None
    ) -> dict[str, Any]:
        return {
            "step": step,
            "updates": engine.step_count(),
            "global_batch_size": self.global_batch,
            "world_size": world_size(),
            "validation_loss": validation_loss,
            "versions": {"megaparcae": megaparcae.__version__, "torch": torch.__version__},
        }

    def _write(self, step: int, fragments: list[Fragment], meta: Mapping[str, Any]) -> str | None:
        """All of a save; what went wrong, the same on all ranks, or None."""
        folder = self._folder(step)
        try:
            problem = self._too_little_space(fragments)
            if problem is not None:
                return problem
            write_folder(
                folder,
                fragments,
                config_text=dump_config(self.config),
                meta=dict(meta),
                group=self.group,
            )
            together(lambda: self._move_pointer(folder) if self.is_first else None, self.group)
        except OSError as error:
            return f"checkpoint.dir={self.dir} can't be written ({error}); check disk and quota"
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
        """The newest undamaged checkpoint; every rank looks into its share of the files.

        Raises UserError when there are some, but all are damaged: nobody wants to begin again
        without a word.
        """
        names = broadcast([f.name for f in in_order(self.dir) if _is_of_a_run(f)])
        pointed = broadcast(pointed_at(self.dir))
        if names and pointed is None:
            self._warn("%s names no checkpoint; trying the newest", self.dir / POINTER)
        for folder in (self.dir / name for name in names):
            problems = gather(find_damage(folder, rank(), world_size()))
            damage = next((p for p in problems if p is not None), None)
            self._mark(folder, damage)
            if damage is None:
                return folder
            self._warn("%s is damaged (%s); trying another", folder, damage)
        if names:
            raise UserError(
                f"all checkpoints in {self.dir} are damaged ({', '.join(names)}); restore one, or "
                "begin again from step 0 with checkpoint.resume=never"
            )
        return None

    def _mark(self, folder: Path, damage: str | None) -> None:
        """Leave word for other processes: a damaged one does not count among those to keep."""
        if not self.is_first:
            return
        try:
            if damage is None:
                (folder / DAMAGED).unlink(missing_ok=True)
            else:
                (folder / DAMAGED).write_text(damage + "\n", encoding="utf-8")
        except OSError as error:
            logger.warning("%s can't be written (%s)", folder / DAMAGED, error)

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
            keep_best=options.keep_best,
        )
        for folder in old:
            shutil.rmtree(folder, ignore_errors=True)

    def _too_little_space(self, fragments: list[Fragment]) -> str | None:
        sizes = [SPARE * f.tensor.numel() * f.tensor.element_size() + HEADER for f in fragments]
        needed = sum(gather(sum(sizes), self.group))
        together(lambda: self.dir.mkdir(parents=True, exist_ok=True), self.group)
        free = broadcast(shutil.disk_usage(self.dir).free, self.group)
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
