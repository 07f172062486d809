"""Start a launch script on all machines: python -m megaparcae.launcher.command SCRIPT ARGUMENTS.

The scripts launch/*.sh end here when no ranks exist yet. DRY_RUN=1 prints and starts nothing.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping

from megaparcae.errors import UserError, run_command
from megaparcae.launcher.exports import env_file_text, env_files, read_env_file, variables_to_send
from megaparcae.launcher.plan import LaunchPlan, plan_launch
from megaparcae.launcher.supervise import supervise
from megaparcae.log import logger, setup_logging

THREADS_AT_MOST = 8
SSH_PROBES = "-o ServerAliveInterval=30 -o ServerAliveCountMax=4"
"""A machine that is silent for two minutes is given up; ssh by itself may wait for ever."""


def main() -> int:
    """Print the plan, then run the `deepspeed` launcher."""
    setup_logging()
    if len(sys.argv) < 2:
        raise UserError("usage: python -m megaparcae.launcher.command SCRIPT ARGUMENTS")
    script, *arguments = sys.argv[1:]
    plan = plan_launch(script, arguments, os.environ, cwd=os.getcwd())
    logger.info(plan.describe())
    environ = child_environment(plan, os.environ)
    if os.environ.get("DRY_RUN", "0") not in ("", "0"):
        return 0
    if plan.over_ssh:  # DeepSpeed takes signals to the other machines itself
        os.execve(plan.command[0], plan.command, environ)
    return supervise(plan.command, environ)


def child_environment(plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """The launcher's environment; over ssh also a file of what the other machines are given."""
    child = dict(environ)
    child.pop("EXTRA_ARGS", None)  # part of the command now
    if child.get("CUDA_VISIBLE_DEVICES"):  # so is this; an empty one hides all GPUs and stays
        del child["CUDA_VISIBLE_DEVICES"]
    child.setdefault("PYTHON", sys.executable)  # sent along: its name begins with PYTHON
    ranks_per_host = max(len(p.devices) for p in plan.placements)
    threads = max(1, min(THREADS_AT_MOST, (os.cpu_count() or 1) // ranks_per_host))
    child.setdefault("OMP_NUM_THREADS", str(threads))
    if plan.over_ssh:
        _check_pdsh(environ)
        child.setdefault("PDSH_SSH_ARGS_APPEND", SSH_PROBES)
        child["DS_ENV_FILE"] = _write_env_file(child)
    return child


def _check_pdsh(environ: Mapping[str, str]) -> None:
    if environ.get("DRY_RUN", "0") in ("", "0") and shutil.which("pdsh") is None:
        raise UserError(
            "pdsh is not installed here; install it (Debian: apt-get install pdsh), or start the "
            "script on every machine with NODE_RANK=0, 1, ..., or use srun"
        )


def _write_env_file(environ: Mapping[str, str]) -> str:
    """Path of a file in memory, open in this process and in the launcher that replaces it."""
    variables, secrets = variables_to_send(environ)
    if secrets:
        logger.info(
            f"not sent, as command lines are public: {', '.join(secrets)}; put them into "
            "~/.deepspeed_env if that is acceptable, or log in on every machine"
        )
    text = env_file_text(variables)
    for path in env_files(environ):
        text += "".join(f"{name}={value}\n" for name, value in read_env_file(path).items())
    names = [line.split("=")[0] for line in text.splitlines()]
    logger.info(f"sent to every machine: {', '.join(dict.fromkeys(names))}")
    handle = os.memfd_create("deepspeed_env", 0)
    os.set_inheritable(handle, True)
    os.write(handle, text.encode())
    return f"/proc/self/fd/{handle}"


if __name__ == "__main__":
    run_command(main)
