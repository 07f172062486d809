"""Run DeepSpeed's launcher on this machine so that signals reach the ranks.

DeepSpeed's front process dies of SIGTERM and leaves the ranks running; of Ctrl-C it dies with a
traceback while they save. Here it gets a session of its own, a signal goes to the ranks, they save
and stop, and their exit code (75) comes back.
"""

from __future__ import annotations

import os
import signal
import subprocess
import types
from collections.abc import Mapping, Sequence

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def supervise(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run `command` to its end; its exit code, 128 + the signal's number if one killed it."""
    launcher = subprocess.Popen(list(command), env=dict(environ), start_new_session=True)

    def forward(number: int, _frame: types.FrameType | None) -> None:
        ranks = rank_processes(launcher.pid)
        if not ranks:  # too early: nothing to save
            os.killpg(launcher.pid, signal.SIGTERM)
        for pid in ranks:
            os.kill(pid, signal.SIGTERM if number == signal.SIGHUP else number)

    for number in FORWARDED:
        signal.signal(number, forward)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup asks to ignore it
        signal.signal(signal.SIGHUP, forward)
    code = launcher.wait()
    return code if code >= 0 else 128 - code


def rank_processes(launcher: int) -> list[int]:
    """Ids of the running ranks among the launcher's descendants."""
    import psutil  # comes with deepspeed

    ranks = []
    for process in psutil.Process(launcher).children(recursive=True):
        try:
            if "megaparcae.train" in process.cmdline():
                ranks.append(process.pid)
        except psutil.Error:
            continue
    return ranks
