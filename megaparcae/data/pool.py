"""Worker processes that turn blocks into parts; a death ends the run, with cause and record."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Iterator, MutableSequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from megaparcae.data.blocks import Block
from megaparcae.data.parts import BadRecord, Part, PartSettings, make_part
from megaparcae.data.tokenizer import Tokenizer
from megaparcae.errors import UserError

POLL_SECONDS = 0.05


@dataclass
class Done:
    """A finished block."""

    index: int
    block: Block
    part: Part
    path: Path


@dataclass
class Bad:
    """A block that stops the run: a bad record, or an input that cannot be read."""

    index: int
    block: Block
    number: int
    reason: str


class WorkerError(RuntimeError):
    """A worker died or failed."""

    def __init__(self, block: Block, number: int, cause: str) -> None:
        super().__init__(cause)
        self.block, self.number = block, number


class _Worker:
    """One process, its pipe and the block it has."""

    def __init__(self, number: int, tokenizer: Tokenizer, settings: PartSettings, folder: Path):
        context = multiprocessing.get_context("fork")  # shares the loaded tokenizer's memory
        self.number = number
        self.position = context.RawArray("q", 1)
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, self.pipe, tokenizer, settings, folder, self.position)
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.index = -1
        self.block: Block | None = None

    def give(self, index: int, block: Block) -> None:
        self.index, self.block = index, block
        self.position[0] = 0
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # found dead by `take`
            self.pipe.send(block)

    def take(self) -> Done | Bad:
        """The result; WorkerError when there is none."""
        assert self.block is not None
        block, self.block = self.block, None
        try:
            kind, *rest = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            raise WorkerError(block, self.position[0], self._cause()) from None
        if kind == "done":
            return Done(self.index, block, *rest)
        if kind == "bad":
            return Bad(self.index, block, *rest)
        if kind == "user":
            return Bad(self.index, block, -1, *rest)
        if kind == "os":
            raise OSError(*rest)
        raise WorkerError(block, self.position[0], f"worker {self.number} failed: {rest[0]}")

    def _cause(self) -> str:
        code = self.process.exitcode or 0
        if code >= 0:
            return f"worker {self.number} ended with exit code {code}"
        name = signal.Signals(-code).name
        memory = ", perhaps for lack of memory" if -code == signal.SIGKILL else ""
        return f"worker {self.number} was killed by {name}{memory}"


def run_blocks(
    blocks: Iterator[Block],
    num_workers: int,
    tokenizer: Tokenizer,
    settings: PartSettings,
    folder: Path,
) -> Iterator[Done]:
    """Give blocks to workers and yield them done, in any order.

    Raises UserError for bad input (the earliest of several), WorkerError for a death.
    """
    workers = [_Worker(i, tokenizer, settings, folder) for i in range(num_workers)]
    try:
        yield from _run(_Feeder(blocks, num_workers), workers)
    finally:
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.join()
            worker.pipe.close()


def _run(feeder: _Feeder, workers: list[_Worker]) -> Iterator[Done]:
    bad: Bad | None = None
    while True:
        for worker in workers:
            if worker.block is None and bad is None and (item := feeder.next()) is not None:
                worker.give(*item)
        busy = [w for w in workers if w.block is not None and (bad is None or w.index < bad.index)]
        if not busy and (bad is not None or feeder.ended):
            break
        idle = bad is None and len(busy) < len(workers) and not feeder.ended
        ready = wait([w.pipe for w in busy], POLL_SECONDS if idle else None) if busy else []
        if not busy:
            feeder.wait()
        for worker in [w for w in busy if w.pipe in ready]:
            result = worker.take()
            if isinstance(result, Done):
                yield result
            elif bad is None or result.index < bad.index:
                bad = result
    if bad is not None:
        raise BadInput(bad)
    feeder.raise_error()


class BadInput(UserError):
    """Carries the block and number of a bad record until its place is known."""

    def __init__(self, bad: Bad) -> None:
        super().__init__(bad.reason)
        self.bad = bad


class _Feeder:
    """Reads blocks ahead in a thread: decompression and slow pipes do not hold up the workers."""

    def __init__(self, blocks: Iterator[Block], ahead: int) -> None:
        self._blocks = blocks
        self._queue: queue.Queue[Block | None] = queue.Queue(ahead)
        self._waiting: Block | None = None
        self._error: BaseException | None = None
        self._count = 0
        self.ended = False
        threading.Thread(target=self._read, daemon=True).start()

    def next(self) -> tuple[int, Block] | None:
        """The next block and its index, or None when none is ready."""
        if self.ended:
            return None
        try:
            block = self._queue.get_nowait()
        except queue.Empty:
            return None
        return self._number(block)

    def wait(self) -> None:
        """Until something can be had."""
        while not self.ended and self._queue.empty():
            threading.Event().wait(POLL_SECONDS / 10)

    def raise_error(self) -> None:
        """Raise what stopped the reading, if anything."""
        if self._error is not None:
            raise self._error

    def _number(self, block: Block | None) -> tuple[int, Block] | None:
        if block is None:
            self.ended = True
            return None
        self._count += 1
        return self._count - 1, block

    def _read(self) -> None:
        try:
            for block in self._blocks:
                self._queue.put(block)
        except BaseException as error:
            self._error = error
        self._queue.put(None)


def _serve(
    pipe: Connection,
    parent_end: Connection,
    tokenizer: Tokenizer,
    settings: PartSettings,
    folder: Path,
    position: MutableSequence[int],
) -> None:
    """A worker's life: blocks in, results out, until the pipe closes or the parent is gone."""
    parent_end.close()
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the run
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            # Siblings hold copies of the parent's end, so its death is no end of file here.
            while not pipe.poll(1.0):
                if os.getppid() != parent:
                    return
            block = pipe.recv()
            pipe.send(_answer(block, tokenizer, settings, folder, position))


def _answer(
    block: Block,
    tokenizer: Tokenizer,
    settings: PartSettings,
    folder: Path,
    position: MutableSequence[int],
) -> tuple[object, ...]:
    """What a worker says of a block: ("done", part, path) or the kind of failure and its facts."""
    try:
        return ("done", *make_part(block, tokenizer, settings, folder, position))
    except BadRecord as error:
        return ("bad", *error.args)
    except UserError as error:
        return ("user", str(error))
    except OSError as error:
        return ("os", error.errno, error.strerror, error.filename)
    except Exception as error:
        return ("failed", f"{type(error).__name__}: {error}")
