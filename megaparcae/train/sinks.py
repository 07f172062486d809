"""Where the records of a run go: log.jsonl always; wandb and TensorBoard when asked.

log.jsonl must be complete whatever happens, and no place that records go to may end a run: what
the disk has no room for is written when there is room again, and wandb and TensorBoard live in
threads of their own, where they can fail, block or never start.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any, Protocol

from megaparcae.config.load import config_tree
from megaparcae.config.schema import RunConfig
from megaparcae.log import logger

Record = dict[str, Any]
"""`kind`, `step` and the figures; README.md describes every kind."""

MOST_WAITING = 100_000
"""Records that a sink which does not answer may leave behind."""
LAST_SECONDS = 60.0
"""How long the end of a run waits for a sink to finish."""


class Sink(Protocol):
    """One place that records go to."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """log.jsonl: one JSON object a line, written at once, with the time in Unix seconds.

    NaN and infinity become null. A line that was cut short by a crash is ended first, so that it
    does not spoil the next.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.file = path.open("ab", buffering=0)
        self.waiting = b"" if _ends_with_newline(path) else b"\n"
        self.is_blocked = False

    def write(self, record: Record) -> None:
        line = json.dumps({**_finite(record), "time": round(time.time(), 3)})
        self.waiting += line.encode() + b"\n"
        self._flush()

    def close(self) -> None:
        self._flush()
        if self.waiting:
            logger.warning("%s misses its last %d bytes", self.path, len(self.waiting))
        self.file.close()

    def _flush(self) -> None:
        try:
            while self.waiting:
                self.waiting = self.waiting[self.file.write(self.waiting) :]
            self.is_blocked = False
        except OSError as error:
            if not self.is_blocked:
                logger.warning(
                    "%s can't be written (%s): its lines wait in memory until it can",
                    self.path,
                    error.strerror,
                )
            self.is_blocked = True


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return value


class Forgiving:
    """Another sink in a thread of its own: it never ends, and never holds up, the run.

    It is made there too. The first failure is reported, then it is silent; so is a sink that does
    not answer.
    """

    def __init__(self, name: str, make: Callable[[], Sink]) -> None:
        self.name = name
        self.make = make
        self.is_off = False
        self.waiting: Queue[Record | None] = Queue(MOST_WAITING)
        """Records still to be written; None ends the sink."""
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.thread.start()

    def write(self, record: Record) -> None:
        if self.is_off:
            return
        try:
            self.waiting.put_nowait(record)
        except Full:
            self._give_up("does not answer")

    def close(self) -> None:
        with contextlib.suppress(Full):
            self.waiting.put_nowait(None)
        self.thread.join(LAST_SECONDS)
        if self.thread.is_alive() and not self.is_off:
            self._give_up(f"is not done after {LAST_SECONDS:.0f} s")

    def _work(self) -> None:
        try:
            sink = self.make()
        except BaseException as error:
            return self._give_up(f"could not start ({error})")
        try:
            while (record := self._next()) is not None:
                sink.write(record)
            sink.close()
        except BaseException as error:
            self._give_up(f"failed ({error})")

    def _next(self) -> Record | None:
        return None if self.is_off else self.waiting.get()

    def _give_up(self, why: str) -> None:
        self.is_off = True
        logger.warning("%s %s and is off from here; log.jsonl is complete", self.name, why)
        try:
            while True:
                self.waiting.get_nowait()
        except Empty:
            return


class WandbSink:
    """Weights & Biases; without a key it runs offline.

    A run that is resumed goes on as another wandb run of the same group. Records have the step as a
    value, not as wandb's own counter, which drops what it has seen before: a checkpoint may be
    older than the last record.
    """

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        import wandb

        has_key = bool(os.environ.get("WANDB_API_KEY")) or (Path.home() / ".netrc").exists()
        mode = os.environ.get("WANDB_MODE") or ("online" if has_key else "offline")
        if mode == "offline":
            logger.warning("wandb records offline: wandb sync %s/wandb/offline-run-*", run_dir)
        self.run = wandb.init(
            project=config.log.wandb_project,
            name=config.name,
            group=config.name,
            dir=str(run_dir),
            mode=mode,  # type: ignore[arg-type]  # wandb itself checks WANDB_MODE
            config=config_tree(config),
        )
        self.run.define_metric("*", step_metric="step")

    def write(self, record: Record) -> None:
        self.run.log(_flat(record))

    def close(self) -> None:
        self.run.finish()


class TensorBoardSink:
    """TensorBoard scalars. What was logged after `step` is hidden: those steps are made again."""

    def __init__(self, folder: str, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(folder, purge_step=step + 1)

    def write(self, record: Record) -> None:
        for name, value in _flat(record).items():
            if isinstance(value, int | float) and name != "step":
                self.writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self.writer.close()


def _flat(record: Record) -> Record:
    """Figures as `kind/name` and `kind/name/inner`, and `step`."""
    flat: Record = {"step": record["step"]}
    for name, value in record.items():
        if isinstance(value, dict):
            flat |= {f"{record['kind']}/{name}/{inner}": item for inner, item in value.items()}
        elif name not in ("kind", "step"):
            flat[f"{record['kind']}/{name}"] = value
    return flat


def make_sinks(config: RunConfig, run_dir: Path, is_writer: bool, step: int = 0) -> list[Sink]:
    """Where the records after `step` go; nowhere on ranks other than the first."""
    if not is_writer:
        return []
    sinks: list[Sink] = [JsonLines(run_dir / "log.jsonl")]
    if config.log.wandb_project is not None:
        sinks += _optional("wandb", lambda: WandbSink(config, run_dir))
    if config.log.tensorboard_dir is not None:
        folder = config.log.tensorboard_dir
        sinks += _optional("tensorboard", lambda: TensorBoardSink(folder, step))
    return sinks


def _optional(package: str, make: Callable[[], Sink]) -> list[Sink]:
    if importlib.util.find_spec(package) is None:
        logger.warning("%s is not installed: pip install %s; going on without it", package, package)
        return []
    return [Forgiving(package, make)]
