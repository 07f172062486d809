"""One job on two machines through DeepSpeed's command line, a hostfile, pdsh and ssh.

The machines are network namespaces of this one. Needs root, iproute2, openssh-server and pdsh.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
from training_runs import ROOT, make_shard, records
from two_nodes import INTERFACE, TwoNodes, missing_tools

pytestmark = pytest.mark.slow

SCRIPT = "launch/pretrain_tiny.sh"
RANKS = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE, "DS_ACCELERATOR": "cpu"}


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> dict[str, object]:
    shard = make_shard(tmp_path_factory.mktemp("shard"))
    return {**shard, "checkpoint.interval": 5, "validation.interval": 0}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    missing = missing_tools()
    if missing or os.geteuid() != 0:
        why = f"{', '.join(missing)} not installed" if missing else "only root makes namespaces"
        pytest.skip(f"two machines can't be made here: {why}")
    machines = TwoNodes(tmp_path_factory.mktemp("nodes"))
    try:
        try:
            machines.up()
        except OSError as error:
            pytest.skip(f"two machines can't be made here: {error}")
        yield machines
    finally:
        machines.down()


def settings(options: dict[str, object]) -> list[str]:
    return ["--set", *(f"{name}={value}" for name, value in options.items())]


def wait_for(path: Path, process, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"no {path.name}: {process.communicate()[0]}")
        time.sleep(0.05)


def test_a_job_loses_a_machine_says_so_and_goes_on_from_its_checkpoint(nodes, options, tmp_path):
    run_dir = tmp_path / "run"
    options = {**options, "checkpoint.dir": run_dir}
    endless = settings({**options, "train.num_steps": 1_000_000})

    hostfile = {"HOSTFILE": str(nodes.hostfile)}
    job = nodes.start("bash", SCRIPT, *endless, cwd=ROOT, **RANKS, **hostfile)
    wait_for(run_dir / "latest", job)
    nodes.kill_ranks(1)
    killed_at = time.monotonic()
    said, _ = job.communicate(timeout=60)
    assert time.monotonic() - killed_at < 60
    assert job.returncode != 0, said
    assert "ranks: 2, hosts: 2" in said
    assert_says_what_happened(said, max(records(run_dir)))

    saved = int((run_dir / "latest").read_text().removeprefix("step_"))
    shorter = {"train.num_steps": saved + 5, "checkpoint.override_schedule": "true"}
    (nodes.folder / ".deepspeed_env").write_text("OMP_NUM_THREADS=1\nDS_ACCELERATOR=cpu\n")
    deepspeed = ("deepspeed", "--hostfile", str(nodes.hostfile), "--no_python", f"./{SCRIPT}")
    job = nodes.start(*deepspeed, *settings({**options, **shorter}), cwd=ROOT)
    said, _ = job.communicate(timeout=120)
    assert job.returncode == 0, said
    assert f"resumed {run_dir}/step_{saved:08d}" in said
    assert (run_dir / "latest").read_text() == f"step_{saved + 5:08d}\n"
    assert set(records(run_dir)) >= set(range(1, saved + 6))


def test_a_machine_that_falls_silent_is_noticed_within_a_minute(nodes, options, tmp_path):
    run_dir = tmp_path / "run"
    endless = settings({**options, "checkpoint.dir": run_dir, "train.num_steps": 1_000_000})
    job = nodes.start("bash", SCRIPT, *endless, cwd=ROOT, **RANKS, HOSTFILE=str(nodes.hostfile))
    wait_for(run_dir / "latest", job)
    nodes.cut_cable()
    try:
        deadline = time.monotonic() + 60
        while nodes.ranks(0) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert not nodes.ranks(0), "the surviving rank still waits"
    finally:
        nodes.kill_jobs()
        nodes.mend_cable()
    assert_says_what_happened(job.communicate(timeout=20)[0], max(records(run_dir)))


def assert_says_what_happened(said: str, last_step: int) -> None:
    """One sentence of the surviving rank: its host, the last step, what to do; no traceback."""
    (line,) = [line for line in said.splitlines() if "another rank was lost" in line]
    step = re.search(r"node-0: another rank was lost after step (\d+)", line)
    assert step and int(step[1]) == last_step, line
    assert "start the same command again to resume" in line
    assert "Traceback" not in said, said
