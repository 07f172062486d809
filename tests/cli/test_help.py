"""Every command explains itself at once."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

import pytest
from training_runs import ROOT, environment

TOOLS = sorted(path.name for path in (ROOT / "tools").glob("*.py"))


def seconds(*command: str) -> float:
    """Median of three runs."""
    times = []
    for _ in range(3):
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, env=environment())
        times.append(time.perf_counter() - started)
        assert done.returncode == 0, done.stderr
    return statistics.median(times)


@pytest.fixture(scope="module")
def machine() -> float:
    """How much slower than a free machine this one is now: an empty program takes 15 ms there."""
    return max(1.0, seconds(sys.executable, "-c", "pass") / 0.015)


@pytest.mark.parametrize("name", TOOLS)
def test_a_tools_help_takes_less_than_two_seconds(name, machine):
    assert seconds(sys.executable, str(ROOT / "tools" / name), "--help") < 2 * machine


def test_trainings_help_takes_less_than_two_seconds(machine):
    assert seconds(sys.executable, "-m", "megaparcae.train", "--help") < 2 * machine


@pytest.mark.parametrize("script", ["quickstart.sh", "pretrain_tiny.sh", "pretrain_1p3b.sh"])
def test_a_launch_scripts_help_takes_less_than_two_seconds(script, machine):
    assert seconds("bash", str(ROOT / "launch" / script), "--help") < 2 * machine


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_runs_from_a_checkout_that_is_not_installed(name):
    text = (ROOT / "tools" / name).read_text()
    path = text.find("sys.path.insert(0, str(Path(__file__).resolve().parents[1]))")
    assert 0 < path < text.index("from megaparcae")
