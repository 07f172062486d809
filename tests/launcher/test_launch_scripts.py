"""launch/*.sh in the three documented ways, with DeepSpeed's own command line.

The interpreter that ranks start is a stand-in: it writes down its arguments and variables instead
of training. Machines are this one; `pdsh` and `ssh` are stand-ins that run commands locally, in a
bare environment, as a login on another machine would.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "launch/pretrain_tiny.sh"
HARD = 'name=it\'s "a" $HOME `b` 5%n'

PYTHON = """#!{python}
import json, os, sys
if sys.argv[1:4] == ["-u", "-m", "megaparcae.train"]:
    record = {{"argv": sys.argv[4:], "env": dict(os.environ)}}
    with open(os.path.join({folder!r}, "rank" + os.environ.get("RANK", "-")), "w") as file:
        json.dump(record, file)
else:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""

PDSH = """#!/usr/bin/env bash
# pdsh -S -f N -w host,host COMMAND...: every host is this machine
hosts=$5; shift 5
node=0
for host in ${hosts//,/ }; do
    command="${*//%%/$'\\x01'}"; command="${command//%n/$node}"; command="${command//$'\\x01'/%}"
    env -i PATH="$PATH" HOME="$HOME" DS_ACCELERATOR=cpu bash -c "$command" & node=$((node + 1))
done
wait
"""

SSH = """#!/usr/bin/env bash
echo 127.0.0.1
"""


@pytest.fixture
def world(tmp_path):
    """A folder with stand-ins, and a way to run a command among them."""
    for name, text in {
        "python": PYTHON.format(python=sys.executable, folder=str(tmp_path)),
        "pdsh": PDSH,
        "ssh": SSH,
    }.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    return World(tmp_path)


class World:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, *command: str, cwd: Path = ROOT, **variables: str) -> str:
        environ = {
            "PATH": f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(self.folder),
            "PYTHON": str(self.folder / "bin" / "python"),
            "DS_ACCELERATOR": "cpu",
            **variables,
        }
        done = subprocess.run(
            command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def ranks(self) -> list[dict]:
        paths = sorted(self.folder.glob("rank*"))
        return [json.loads(path.read_text()) for path in paths]


def test_a_process_that_a_launcher_started_becomes_its_rank(world):
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    extra = """--set 'name=a b'"""
    world.run("bash", SCRIPT, "--local_rank=1", "--set", "a.b=[1, 2]", EXTRA_ARGS=extra, **ranks)
    (rank,) = world.ranks()
    config = str(ROOT / "launch/configs/pretrain_tiny.yaml")
    assert rank["argv"] == ["--config", config, "--set", "a.b=[1, 2]", "--set", "name=a b"]


def test_a_task_of_an_srun_step_becomes_its_rank(world):
    world.run("bash", SCRIPT, SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="2")
    assert len(world.ranks()) == 1


def test_a_dry_run_prints_the_plan_and_starts_nothing(world):
    said = world.run("bash", SCRIPT, DRY_RUN="1", HOSTFILE=str(world.folder / "hosts"))
    assert "rank 1: 127.0.0.2 device 0 (pp 0 dp 1 tp 0)" in said and not world.ranks()


def test_a_mistake_is_one_sentence_and_exit_code_2(world):
    done = subprocess.run(
        ["bash", SCRIPT, "--set", "train.num_step=3"],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: --set train.num_step=3: unknown option")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", sorted(p.name for p in (ROOT / "launch").glob("pretrain_*.sh")))
def test_every_script_has_its_configuration_and_is_executable(name):
    script = ROOT / "launch" / name
    assert os.access(script, os.X_OK), "deepspeed --no_python runs it directly"
    assert (ROOT / "launch/configs" / f"{script.stem}.yaml").exists()
    assert f'run.sh" {script.stem} ' in script.read_text()


@pytest.mark.parametrize(("code", "queued"), [(0, False), (1, False), (2, False), (75, True)])
def test_a_slurm_job_that_was_stopped_is_queued_again(code, queued, tmp_path):
    for name, text in {"srun": f"exit {code}", "scontrol": f"echo $@ > {tmp_path}/said"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", "launch/pretrain.sbatch", SCRIPT], cwd=ROOT, env=environ)
    assert done.returncode == code
    assert (tmp_path / "said").exists() == queued
    if queued:
        assert (tmp_path / "said").read_text() == "requeue 7\n"


@pytest.mark.slow
def test_bash_starts_deepspeed_on_this_machine_also_below_a_path_with_a_space(world):
    checkout = world.folder / "my checkout"
    checkout.mkdir()
    for name in ("launch", "megaparcae"):
        (checkout / name).symlink_to(ROOT / name)
    world.run("bash", SCRIPT, "--set", HARD, NUM_GPUS="2", cwd=checkout)
    check_two_ranks(world)


@pytest.mark.slow
def test_bash_starts_all_machines_of_a_hostfile_and_arguments_arrive_whole(world):
    hostfile = str(world.folder / "hosts")
    extra = "--set 'data.tokenizer=a b'"
    said = world.run(
        "bash", SCRIPT, "--set", HARD, HOSTFILE=hostfile, EXTRA_ARGS=extra, NCCL_DEBUG="INFO"
    )
    assert "sent to every machine: DS_ACCELERATOR, NCCL_DEBUG, OMP_NUM_THREADS" in said
    first, second = check_two_ranks(world)
    assert first["argv"][-2:] == ["--set", "data.tokenizer=a b"]
    assert second["env"]["NCCL_DEBUG"] == "INFO"
    assert second["env"]["CROSS_RANK"] == "1"


@pytest.mark.slow
def test_deepspeed_can_be_called_with_hostfile_and_script(world):
    deepspeed = [sys.executable, "-m", "deepspeed.launcher.runner"]
    hostfile = str(world.folder / "hosts")
    world.run(*deepspeed, "--hostfile", hostfile, "--no_python", f"./{SCRIPT}", "--set", "name=a b")
    first, second = world.ranks()
    assert first["argv"][-2:] == second["argv"][-2:] == ["--set", "name=a b"]
    assert not [a for a in first["argv"] if "local_rank" in a]


def check_two_ranks(world) -> list[dict]:
    ranks = world.ranks()
    assert [r["env"]["RANK"] for r in ranks] == ["0", "1"]
    assert all(r["env"]["WORLD_SIZE"] == "2" for r in ranks)
    for rank in ranks:
        at = rank["argv"].index("--set")
        assert rank["argv"][at + 1] == HARD
    return ranks
