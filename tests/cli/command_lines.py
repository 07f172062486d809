"""Tools and launch scripts as a user starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from training_runs import ROOT, environment


def tool(name: str, *arguments: object, **options) -> subprocess.CompletedProcess[str]:
    """Run tools/{name} to its end."""
    command = [sys.executable, str(ROOT / "tools" / name), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment(), timeout=120, **options
    )


def launch(options: dict[str, object], **variables: str) -> subprocess.Popen[str]:
    """bash launch/pretrain_tiny.sh with two processes under DeepSpeed's launcher."""
    command = ["bash", str(ROOT / "launch" / "pretrain_tiny.sh"), "--set"]
    command += [f"{key}={value}" for key, value in options.items()]
    env = {**environment(), "PYTHON": sys.executable, "NUM_GPUS": "2", **variables}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    )


def write_lines(path: Path, records: Sequence[object]) -> Path:
    """A JSON lines file; strings are lines as they are."""
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def files_below(folder: Path) -> set[str]:
    """Every file, except what a tool keeps to go on from (*.parts)."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return {name for name in found if ".parts" + os.sep not in name}


def only_error(said: str) -> str:
    """The one error of a command that says nothing else of it."""
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, said
    assert "Traceback" not in said
    return errors[0]
