"""Signals to a launch reach its ranks, whose exit code comes back."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

RANK = """
import signal, sys, time
def stop(number, frame):
    print("rank received", signal.Signals(number).name, flush=True)
    sys.exit(75)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, stop)
print("rank runs", flush=True)
time.sleep(60)
"""
LAUNCHER = """
import subprocess, sys
sys.exit(subprocess.call([sys.executable, "-c", {rank!r}, "-m", "megaparcae.train"]))
"""
COMMAND = """
import os, sys
from megaparcae.launcher.supervise import supervise
sys.exit(supervise([sys.executable, "-c", {launcher!r}], os.environ))
"""


def start(launcher: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", COMMAND.format(launcher=launcher)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_reaches_the_ranks_and_their_exit_code_comes_back(name):
    process = start(LAUNCHER.format(rank=RANK))
    assert process.stdout is not None
    assert process.stdout.readline() == "rank runs\n"
    process.send_signal(signal.Signals[name])
    assert process.stdout.readline() == f"rank received {name}\n"
    assert process.wait(timeout=20) == 75


def test_a_signal_before_there_are_ranks_ends_the_launcher():
    process = start("import time; print('starts', flush=True); time.sleep(60)")
    assert process.stdout is not None
    process.stdout.readline()
    process.terminate()
    assert process.wait(timeout=20) == 128 + signal.SIGTERM


def test_an_exit_code_comes_back_as_it_is():
    assert start("raise SystemExit(2)").wait(timeout=20) == 2


def test_a_launcher_killed_by_a_signal_is_reported_as_a_shell_would():
    assert start("import os; os.kill(os.getpid(), 9)").wait(timeout=20) == 137
