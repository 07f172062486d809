"""Run a function on several ranks in 0.2 s: processes forked from one that has torch preloaded.

    def losses(steps):                       # a module-level function; runs on every rank
        rank = torch.distributed.get_rank()
        ...
        return [...]

    def test_two_ranks_agree():
        first, second = run_ranks(losses, 2, 10)
        assert first == second

What the function returns comes back pickled, tensors by value. The first rank that raises ends
the others, and its traceback is in the RankError. At the timeout every rank's stack is shown.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import shutil
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent


class RankError(AssertionError):
    """A rank failed, died or hung; the message holds its traceback."""


def run_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 60,
    init: bool = True,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Call fn(*args) on `world` ranks and return their results, by rank.

    Each rank sees the variables a launcher sets (RANK, LOCAL_RANK, WORLD_SIZE, ...), plus `env`,
    and one thread. With `init` (the default) the gloo process group exists before fn runs.
    Raises RankError when a rank raises, dies, or is not done after `timeout` seconds.
    """
    scratch = tempfile.mkdtemp(prefix="ranks-")
    processes: list[ForkServerProcess] = []
    try:
        processes, pipes = start_ranks(fn, world, *args, scratch=scratch, init=init, env=env)
        return _collect(processes, pipes, timeout, scratch)
    finally:
        for process in processes:
            process.kill()
            process.join()
        shutil.rmtree(scratch, ignore_errors=True)


def start_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    scratch: str,
    init: bool = True,
    env: dict[str, str] | None = None,
) -> tuple[list[ForkServerProcess], list[Connection]]:
    """The processes of `run_ranks`, to do as one likes with, and the pipes of their results."""
    context = multiprocessing.get_context("forkserver")
    start_forkserver()
    settings = {"world": world, "port": _free_port(), "init": init, "scratch": scratch, "env": env}
    processes, pipes = [], []
    for rank in range(world):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank_main, args=(rank, settings, theirs, fn, args))
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(mine)
    return processes, pipes


def _collect(
    processes: list[ForkServerProcess], pipes: list[Connection], timeout: float, scratch: str
) -> list[Any]:
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            hung = sorted(waiting.values())
            stacks = _stacks(hung, processes, scratch)
            raise RankError(f"ranks {hung} are not done after {timeout} s\n{stacks}")
        failures = []
        for pipe in ready:
            rank = waiting[pipe]
            try:
                when, ok, payload = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join()
                code = processes[rank].exitcode
                failures.append((0.0, rank, f"died with exit code {code}"))  # it came first
                continue
            if ok:
                results[rank] = payload
            else:
                failures.append((when, rank, f"raised\n{payload}"))
        if failures:  # the earliest is the cause; the others lost their peer
            _, rank, what = min(failures)
            raise RankError(f"rank {rank} of {len(pipes)} {what}")
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    rank: int, settings: dict[str, Any], pipe: Connection, fn: Callable[..., Any], args: Any
) -> None:
    stacks = (Path(settings["scratch"]) / f"stack{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    try:
        _enter_world(rank, settings)
        message = (time.time(), True, fn(*args))
        _leave_world()
        payload = pickle.dumps(message)
    except BaseException:
        payload = pickle.dumps((time.time(), False, traceback.format_exc()))
    pipe.send_bytes(payload)
    pipe.close()
    os._exit(0)  # without the slow and noisy end of torch.distributed


def _enter_world(rank: int, settings: dict[str, Any]) -> None:
    world = settings["world"]
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(settings["port"]),
        **(settings["env"] or {}),
    )
    import torch

    import fs_preload  # noqa: F401  (already imported by the fork server)

    torch.set_num_threads(1)
    if settings["init"]:
        import deepspeed

        store = f"file://{settings['scratch']}/store"  # unlike a port, nobody can take it first
        deepspeed.init_distributed("gloo", init_method=store, rank=rank, world_size=world)


def _leave_world() -> None:
    """Wait for the others: a rank that exits early would break their last collective."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()


def _stacks(ranks: list[int], processes: list[ForkServerProcess], scratch: str) -> str:
    for rank in ranks:
        os.kill(processes[rank].pid or 0, signal.SIGUSR1)
    time.sleep(0.3)
    texts = [(Path(scratch) / f"stack{rank}") for rank in ranks]
    return "\n".join(
        f"--- rank {rank}\n{path.read_text() if path.exists() else '(not started)'}"
        for rank, path in zip(ranks, texts, strict=True)
    )


def start_forkserver() -> None:
    """The process that ranks are forked from; the first one to be started serves all tests."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["fs_preload"])
    with _python_path():  # the server takes sys.path from the environment only
        multiprocessing.forkserver.ensure_running()


@contextmanager
def _python_path() -> Iterator[None]:
    before = os.environ.get("PYTHONPATH")
    entries = [str(TESTS), str(TESTS.parent), *([before] if before else [])]
    os.environ["PYTHONPATH"] = os.pathsep.join(entries)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
