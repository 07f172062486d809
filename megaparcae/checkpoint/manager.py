"""When checkpoints are written, kept and read: the run's folder over time.

{checkpoint.dir}/step_00000100/ ...  latest (name of the newest)  config.yaml (this run's)
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

import megaparcae
from megaparcae.checkpoint.compatibility import check_same_run
from megaparcae.checkpoint.storage import (
    find_damage,
    newest_folder,
    read_folder,
    read_meta,
    write_folder,
    write_synced,
)
from megaparcae.config.load import dump_config
from megaparcae.config.schema import RunConfig
from megaparcae.errors import UserError
from megaparcae.log import logger
from megaparcae.parallel.shard import Fragment

FORMAT = 1
SPARE = 1.02
"""A save needs this much of its tensors' bytes on the disk."""


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
        self.is_first = not dist.is_initialized() or dist.get_rank() == 0

    def resume(self, engine: Checkpointed) -> int:
        """Restore the newest complete checkpoint; the number of steps made, 0 for a new run.

        Raises UserError when checkpoint.resume forbids what is there, or the run does not fit it.
        """
        mode = self.config.checkpoint.resume
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

        None when the disk is full and an older checkpoint stands: the run may go on. Raises
        OSError when there is none to fall back to.
        """
        folder = self.dir / f"step_{step:08d}"
        fragments = engine.owned_fragments()
        problem = self._too_little_space(fragments)
        if problem is not None:
            if not self._complete_folders():
                raise OSError(problem)
            logger.warning("%s; step %d is not saved, older checkpoints stand", problem, step)
            return None
        meta = {
            "format": FORMAT,
            "step": step,
            "updates": engine.step_count(),
            "global_batch_size": self.global_batch,
            "world_size": dist.get_world_size() if dist.is_initialized() else 1,
            "versions": {"megaparcae": megaparcae.__version__, "torch": torch.__version__},
        }
        write_folder(folder, fragments, config_text=dump_config(self.config), meta=meta)
        if self.is_first:
            pointer = self.dir / ".tmp-latest"
            write_synced(pointer, folder.name + "\n")
            pointer.replace(self.dir / "latest")
            self._delete_old()
        return folder

    def _begin(self, engine: Checkpointed) -> None:
        """A new run: a folder that can be written, and weights from elsewhere if asked."""
        problem = self._broadcast(self._why_unwritable() if self.is_first else None)
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
        names: list[str] = self._broadcast([f.name for f in self._folders() if _is_of_a_run(f)])
        for folder in (self.dir / name for name in names):
            rank = dist.get_rank() if dist.is_initialized() else 0
            world = dist.get_world_size() if dist.is_initialized() else 1
            mine = find_damage(folder, rank, world)
            problems: list[str | None] = [mine] * world
            if dist.is_initialized():
                dist.all_gather_object(problems, mine)
            damage = next((p for p in problems if p is not None), None)
            if damage is None:
                return folder
            logger.warning("%s is damaged (%s); trying the one before", folder, damage)
        return None

    def _folders(self) -> list[Path]:
        """Finished checkpoints, newest first."""
        return sorted(self.dir.glob("step_[0-9]*"), reverse=True)

    def _complete_folders(self) -> list[Path]:
        return [folder for folder in self._folders() if (folder / "meta.json").is_file()]

    def _delete_old(self) -> None:
        keep, every = self.config.checkpoint.keep, self.config.checkpoint.keep_every
        for old in self._complete_folders()[keep:] if keep else []:
            if every and int(old.name.removeprefix("step_")) % every == 0:
                continue
            shutil.rmtree(old, ignore_errors=True)

    def _too_little_space(self, fragments: list[Fragment]) -> str | None:
        mine = sum(f.tensor.numel() * f.tensor.element_size() for f in fragments)
        sizes = [mine]
        if dist.is_initialized():
            sizes = [0] * dist.get_world_size()
            dist.all_gather_object(sizes, mine)
        needed = SPARE * sum(sizes)
        self.dir.mkdir(parents=True, exist_ok=True)
        free = self._broadcast(shutil.disk_usage(self.dir).free)
        if free >= needed:
            return None
        return (
            f"checkpoint.dir={self.dir} has {free / 1e6:.1f} MB free, but a checkpoint takes "
            f"{needed / 1e6:.1f} MB; free some space or choose another folder"
        )

    def _broadcast(self, value: Any) -> Any:
        """Rank 0's value on all ranks."""
        if not dist.is_initialized():
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]


def _is_of_a_run(folder: Path) -> bool:
    """Imported weights lie in a folder without meta.json; a damaged one may have lost it."""
    return (folder / "meta.json").is_file() or folder.name != "step_00000000"
