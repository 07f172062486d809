"""Training that is struck again and again, and ends as if nothing had happened.

    python tests/train/chaos.py --rounds 30

Each round starts two ranks as a user would, lets them make some steps, strikes, and leaves what is
left to the next round. At the end the run is completed, and every step's figures, the validations
and the last weights are compared bit for bit with those of a run that nobody touched.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import start_ranks
from megaparcae.config.load import build_config, dump_config
from megaparcae.data.indexed import IndexedDataset
from megaparcae.data.writer import IndexedWriter
from megaparcae.log import read_records

WORLD = 2
INTERVAL = 5
"""Steps between saves."""
PATIENCE = 600
"""Seconds that anything may take; a busy machine is no hang."""
VOCAB = 120
EXACT = ("loss", "grad_norm", "lr_factor", "mean_loops", "loop_work", "tokens", "skipped_steps")

OPTIONS: dict[str, Any] = {
    "name": "chaos",
    "model": {
        "vocab_size": VOCAB,
        "vocab_multiple": 16,
        "sequence_length": 16,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "num_prelude_layers": 1,
        "num_core_layers": 1,
        "num_coda_layers": 1,
        "recurrence": {"mean_recurrence": 4, "backprop_depth": 2},
    },
    "data": {"validation_fraction": 0.05, "packing": "concatenate"},
    "optimizer": {"name": "muon_adamw"},
    "train": {
        "global_batch_size": 8,
        "micro_batch_size": 4,
        "precision": "fp32",
        "device": "cpu",
        "seed": 11,
    },
    "validation": {"interval": 7, "num_sequences": 4, "num_loops": [1, 4]},
    "checkpoint": {"interval": INTERVAL, "keep": 2},
    "log": {"health_interval": 6},
}


@dataclass
class Chaos:
    """A run's folder, and what has been done to it."""

    folder: Path
    num_steps: int
    generator: random.Random
    said: list[str] = field(default_factory=list)
    """What happened in each round."""
    num_cut_saves: int = 0
    """Saves that a kill really interrupted."""

    @property
    def run(self) -> Path:
        """checkpoint.dir"""
        return self.folder / "run"

    def write_config(self, *, asynchronous: bool) -> Path:
        """The YAML of the run."""
        tree = copy.deepcopy(OPTIONS)
        tree["train"]["num_steps"] = self.num_steps
        tree["data"]["train"] = str(self.folder / "shard")
        tree["checkpoint"] |= {"dir": str(self.run), "asynchronous": asynchronous}
        path = self.folder / "config.yaml"
        path.write_text(dump_config(build_config(tree, where="chaos")))
        return path

    @contextmanager
    def ranks(self) -> Iterator[Ranks]:
        """Two ranks at work; killed at the latest on leaving."""
        config = self.write_config(asynchronous=self.generator.random() < 0.7)
        console = self.folder / f"console{len(self.said)}.txt"
        processes, _ = start_ranks(
            train_rank, WORLD, str(config), str(console), scratch=str(self.folder), init=False
        )
        ranks = Ranks(processes, console)
        try:
            yield ranks
        finally:
            ranks.kill()

    def saves(self) -> list[Path]:
        """Complete checkpoints, the oldest first."""
        return sorted(self.run.glob("step_*"))


@dataclass
class Ranks:
    """Running processes, and where they write to for people."""

    processes: list[ForkServerProcess]
    console: Path

    def steps_here(self) -> int:
        """Steps that this start has made."""
        return self.text().count("\nstep ")

    def text(self) -> str:
        """What rank 0 and 1 have said."""
        return "\n" + self.console.read_text() if self.console.exists() else ""

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """False when a rank ended first. Raises TimeoutError."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if any(not process.is_alive() for process in self.processes):
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing happened; the ranks said:\n{self.text()}")
            time.sleep(0.001)
        return True

    def make_steps(self, count: int) -> None:
        """Wait for so many steps."""
        assert self.wait_until(lambda: self.steps_here() >= count), self.text()

    def kill(self) -> None:
        """-9 to all."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def end(self, seconds: float = PATIENCE) -> list[int | None]:
        """Exit codes of ranks that end by themselves."""
        for process in self.processes:
            process.join(seconds)
        return [process.exitcode for process in self.processes]


def train_rank(config: str, console: str) -> None:
    """`python -m megaparcae.train` in a process that has everything imported."""
    out = os.open(console, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.argv = ["train", "--config", config]
    code: object = 0
    try:
        runpy.run_module("megaparcae.train", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def kill_one(chaos: Chaos) -> str:
    """The other one notices, says so and ends with 1."""
    with chaos.ranks() as ranks:
        ranks.make_steps(chaos.generator.randint(2, 12))
        victim = chaos.generator.randrange(WORLD)
        ranks.processes[victim].kill()
        codes = ranks.end()
        assert codes[1 - victim] == 1, (codes, ranks.text())
        assert "another rank was lost" in ranks.text() or "start the same command" in ranks.text()
        assert "Traceback" not in ranks.text(), ranks.text()
    return f"kill -9 of rank {victim}"


def kill_all(chaos: Chaos) -> str:
    """Power failure."""
    with chaos.ranks() as ranks:
        ranks.make_steps(chaos.generator.randint(1, 12))
    return "kill -9 of all ranks"


def terminate_one(chaos: Chaos) -> str:
    """All ranks save together and end with 75."""
    with chaos.ranks() as ranks:
        ranks.make_steps(chaos.generator.randint(1, 9))
        rank = chaos.generator.randrange(WORLD)
        os.kill(ranks.processes[rank].pid or 0, signal.SIGTERM)
        codes = ranks.end()
        assert codes == [75, 75], (codes, ranks.text())
    newest = (chaos.run / "latest").read_text().strip()
    assert f"stopping after step {int(newest[5:])}:" in ranks.text()
    return f"SIGTERM to rank {rank}"


def kill_in_a_save(chaos: Chaos) -> str:
    """As soon as the temporary folder of a checkpoint is there."""
    with chaos.ranks() as ranks:
        ranks.make_steps(1)
        began = ranks.wait_until(lambda: any(chaos.run.glob(".tmp-step_*")))
        assert began, ranks.text()
        time.sleep(chaos.generator.random() * 0.02)
        one = chaos.generator.random() < 0.3
        if one:
            ranks.processes[1].kill()
        else:
            ranks.kill()
    cut = any(chaos.run.glob(".tmp-step_*"))
    chaos.num_cut_saves += cut
    return f"kill -9 of {'rank 1' if one else 'all ranks'} during a save" + " (cut)" * cut


def truncate_a_shard(chaos: Chaos) -> str:
    """The newest checkpoint is found damaged, the one before is used."""
    with chaos.ranks() as ranks:
        ranks.make_steps(chaos.generator.randint(1, 12))
        assert ranks.wait_until(lambda: len(chaos.saves()) > 1), ranks.text()
    newest = chaos.saves()[-1]
    shards = sorted(newest.glob("*.distcp"))
    shard = shards[chaos.generator.randrange(len(shards))]
    os.truncate(shard, chaos.generator.randrange(shard.stat().st_size))
    return f"{newest.name}/{shard.name} cut short"


def fill_the_disk(chaos: Chaos) -> str:
    """Saves fail and log lines wait; the run goes on, and is whole again when there is room."""
    with chaos.ranks() as ranks:
        if not chaos.saves():
            ranks.wait_until(lambda: bool(chaos.saves()))
        ranks.make_steps(1)
        with full_disk(chaos.run, ranks.processes) as how:
            assert ranks.wait_until(lambda: "is not saved, older" in ranks.text()), ranks.text()
            made = ranks.steps_here()
            ranks.make_steps(made + chaos.generator.randint(1, 3))
        made = ranks.steps_here()
        ranks.make_steps(made + chaos.generator.randint(2, 7))
    return f"disk full for a while ({how})"


def empty_latest(chaos: Chaos) -> str:
    """The newest complete checkpoint is found without it."""
    with chaos.ranks() as ranks:
        ranks.make_steps(INTERVAL + chaos.generator.randint(1, 6))
    (chaos.run / "latest").write_text("")
    return "`latest` emptied"


FAULTS = (
    kill_one,
    kill_all,
    terminate_one,
    kill_in_a_save,
    truncate_a_shard,
    fill_the_disk,
    empty_latest,
)


@contextmanager
def full_disk(folder: Path, processes: list[ForkServerProcess]) -> Iterator[str]:
    """No room in `folder`: really, where it is a file system of its own; else by a limit on the
    size of the files that the processes write."""
    if os.path.ismount(folder):
        ballast = folder / "ballast"
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            while True:  # what does not fit is cut off, then refused
                file.write(bytes(1 << 16))
        yield "tmpfs"
        ballast.unlink()
        return
    limits = [resource.prlimit(p.pid or 0, resource.RLIMIT_FSIZE) for p in processes]
    for process, (_, hard) in zip(processes, limits, strict=True):
        resource.prlimit(process.pid or 0, resource.RLIMIT_FSIZE, (1 << 14, hard))
    yield "limit"
    for process, limit in zip(processes, limits, strict=True):
        resource.prlimit(process.pid or 0, resource.RLIMIT_FSIZE, limit)


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A tmpfs at `folder` where that is allowed."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


def write_shard(prefix: Path) -> None:
    """Documents in which a token follows from the one before."""
    generator = np.random.default_rng(5)
    with IndexedWriter(prefix, np.dtype("uint16")) as writer:
        for _ in range(600):
            start, step = generator.integers(2, VOCAB, 2)
            tokens = 2 + (start + step * np.arange(generator.integers(8, 60))) % (VOCAB - 2)
            writer.add(np.concatenate([tokens, [1]]).astype(np.uint16))
        writer.close()
    assert IndexedDataset(prefix).num_documents == 600


def complete(chaos: Chaos) -> None:
    """Run to the last step."""
    with chaos.ranks() as ranks:
        codes = ranks.end(3 * PATIENCE)
        assert codes == [0] * WORLD, (codes, ranks.text())


def figures(run: Path) -> tuple[dict[int, Any], dict[int, Any]]:
    """Step -> the last record of the step and of the validation."""
    records = read_records(run / "log.jsonl")
    steps = {r["step"]: tuple(r[name] for name in EXACT) for r in records if r["kind"] == "step"}
    losses = {r["step"]: r["loss"] for r in records if r["kind"] == "validation"}
    return steps, losses


def weights(run: Path) -> dict[str, bytes]:
    """The last checkpoint's parameters, bit for bit."""
    from megaparcae.checkpoint.model_tensors import read_model_tensors

    found = read_model_tensors(sorted(run.glob("step_*"))[-1])
    return {name: tensor.numpy().tobytes() for name, tensor in found.items()}


def compare(struck: Path, straight: Path) -> None:
    """Raises AssertionError with the first step that differs."""
    for got, want in zip(figures(struck), figures(straight), strict=True):
        assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())
        for step in sorted(want):
            assert got[step] == want[step], (step, got[step], want[step])
    ours, theirs = weights(struck), weights(straight)
    assert ours == theirs, sorted(name for name in theirs if ours[name] != theirs[name])


def play(folder: Path, rounds: int, seed: int) -> Chaos:
    """`rounds` strikes, all kinds in turn, in an order that the seed decides; then compare."""
    generator = random.Random(seed)
    faults: list[Callable[[Chaos], str]] = []
    while len(faults) < rounds:
        faults += generator.sample(FAULTS, len(FAULTS))
    num_steps = 11 * rounds + 10
    straight = Chaos(folder / "straight", num_steps, random.Random(seed))
    struck = Chaos(folder / "struck", num_steps, generator)
    struck.folder.mkdir(parents=True)
    with small_disk(struck.run):
        for chaos in (straight, struck):
            chaos.folder.mkdir(parents=True, exist_ok=True)
            write_shard(chaos.folder / "shard")
        complete(straight)
        for fault in faults[:rounds]:
            began = time.monotonic()
            said = fault(struck)
            seconds = time.monotonic() - began
            struck.said.append(f"round {len(struck.said) + 1:>2}: {said}, {seconds:.1f} s")
            print(struck.said[-1], flush=True)
        complete(struck)
        compare(struck.run, straight.run)
    return struck


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    started = time.monotonic()
    chaos = play(folder, args.rounds, args.seed)
    shutil.rmtree(folder)
    print(
        f"{args.rounds} rounds, {chaos.num_steps} steps: every loss, gradient norm, validation and "
        f"weight is that of the untouched run, bit for bit; {chaos.num_cut_saves} saves were cut "
        f"short; {time.monotonic() - started:.0f} s"
    )


if __name__ == "__main__":
    main()
