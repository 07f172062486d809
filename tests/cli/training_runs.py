"""Real training processes on a small shard, started as a launcher would start them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "tests" / "data" / "sample.jsonl"

OPTIONS = {
    "model.vocab_size": 300,
    "model.sequence_length": 32,
    "model.hidden_size": 32,
    "model.intermediate_size": 64,
    "train.num_steps": 10,
    "train.global_batch_size": 8,
    "train.micro_batch_size": 2,
    "train.precision": "fp32",
    "train.device": "cpu",
    "validation.interval": 5,
    "validation.num_sequences": 4,
    "validation.num_loops": "[1,4]",
    "checkpoint.interval": 5,
    "log.health_interval": 0,
}


def make_shard(folder: Path) -> dict[str, object]:
    """Tokenizer and shard of the sample text, by the tools; the options that use them."""
    run_tool("train_tokenizer.py", "--input", SAMPLE, "--vocab-size", 300, "--output", folder / "t")
    run_tool(
        "preprocess_data.py",
        *("--input", SAMPLE, "--output-prefix", folder / "s"),
        *("--tokenizer-model", folder / "t", "--append-eod"),
    )
    return {**OPTIONS, "data.train": folder / "s_text_document", "data.tokenizer": folder / "t"}


def run_tool(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a tool to its end; the test fails with its messages when it does."""
    command = [sys.executable, str(ROOT / "tools" / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0, done.stderr
    return done


def environment(**extra: str) -> dict[str, str]:
    """One thread a process, and none of an outer launcher's variables."""
    outer = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "WANDB_API_KEY")
    kept = {key: value for key, value in os.environ.items() if key not in outer}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **extra}


def start(options: dict[str, object], world: int = 1, **extra: str) -> list[subprocess.Popen[str]]:
    """One training process per rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    config = ROOT / "launch" / "configs" / "pretrain_tiny.yaml"
    command = [sys.executable, "-m", "megaparcae.train", "--config", str(config), "--set"]
    command += [f"{key}={value}" for key, value in options.items()]
    processes = []
    for rank in range(world):
        ranks = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        env = environment(**(ranks if world > 1 else {}), **extra)
        processes.append(
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
            )
        )
    return processes


def finish(processes: list[subprocess.Popen[str]], timeout: float = 120) -> tuple[list[int], str]:
    """Exit codes by rank, and all that was said."""
    said = ""
    for process in processes:
        out, err = process.communicate(timeout=timeout)
        said += out + err
    return [process.returncode for process in processes], said


def train(options: dict[str, object], world: int = 1, **extra: str) -> str:
    """A run that ends well; what it said."""
    codes, said = finish(start(options, world, **extra))
    assert codes == [0] * world, said
    return said


def records(run_dir: Path, kind: str = "step") -> dict[int, dict[str, object]]:
    """Step -> the last record of that kind."""
    lines = (run_dir / "log.jsonl").read_text().splitlines()
    parsed = [json.loads(line) for line in lines]
    return {record["step"]: record for record in parsed if record["kind"] == kind}
