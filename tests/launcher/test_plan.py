"""The plan of a launch: ranks, hosts, devices and the command, before anything starts."""

from __future__ import annotations

import subprocess

import pytest

from megaparcae.errors import UserError
from megaparcae.launcher.command import child_environment
from megaparcae.launcher.exports import (
    env_file_text,
    quote_argument,
    read_env_file,
    variables_to_send,
)
from megaparcae.launcher.plan import local_devices, plan_launch


@pytest.fixture
def plan(tmp_path):
    """Plan a launch with a hostfile of two machines with four devices."""
    (tmp_path / "hosts").write_text("worker-1 slots=4\nworker-2 slots=4\n")
    (tmp_path / "run.yaml").write_text("preset: tiny\ntrain: {global_batch_size: 120}\n")

    def plan(*arguments: str, multi: bool = True, **environ: str):
        if multi:
            environ["HOSTFILE"] = str(tmp_path / "hosts")
        config = ["--config", str(tmp_path / "run.yaml"), "--set", "train.micro_batch_size=1"]
        return plan_launch("/x/pretrain.sh", [*config, *arguments], environ, cwd="/x")

    return plan


def option(command, name: str) -> str:
    return command[command.index(name) + 1]


def test_every_rank_is_listed_with_host_device_and_place(plan):
    text = plan("--set", "parallel.tp=2", INCLUDE="worker-1:2,3@worker-2").describe()
    assert text.splitlines()[:-1] == [
        "ranks: 6, hosts: 2; dp 3 = world 6 / (tp 2 x pp 1); global batch 120 = micro 1 x "
        "accumulation 40 x dp 3",
        "  rank 0: worker-1 device 2 (pp 0 dp 0 tp 0)",
        "  rank 1: worker-1 device 3 (pp 0 dp 0 tp 1)",
        "  rank 2: worker-2 device 0 (pp 0 dp 1 tp 0)",
        "  rank 3: worker-2 device 1 (pp 0 dp 1 tp 1)",
        "  rank 4: worker-2 device 2 (pp 0 dp 2 tp 0)",
        "  rank 5: worker-2 device 3 (pp 0 dp 2 tp 1)",
    ]


def test_a_host_included_without_devices_is_named_with_all_of_them(plan):
    command = plan(INCLUDE="worker-2@worker-1:0").command
    assert option(command, "--include") == "worker-1:0@worker-2:0,1,2,3"


def test_pipeline_stages_are_the_outermost_direction(plan):
    lines = plan("--set", "parallel.pp=2", "--set", "parallel.tp=2").describe().splitlines()
    assert lines[4].endswith("device 3 (pp 0 dp 1 tp 1)")
    assert lines[5].endswith("worker-2 device 0 (pp 1 dp 0 tp 0)")


@pytest.mark.parametrize(
    "arguments, environ, said",
    [
        (["--set", "parallel.tp=2"], {"INCLUDE": "worker-1:0@worker-2:0,1,2"},
         "parallel.tp=2 must divide the 1 devices used on worker-1, so that tensor-parallel ranks"),
        (["--set", "parallel.pp=3"], {}, "parallel.pp=3 must divide the number of processes"),
        (["--set", "train.micro_batch_size=9"], {}, "a multiple of micro_batch_size=9 x dp=8"),
        ([], {"NUM_NODES": "two"}, "NUM_NODES='two' must be a whole number"),
        ([], {"EXTRA_ARGS": "--x 'a"}, "close the quotes"),
        ([], {"NODE_RANK": "2"}, "NODE_RANK=2 needs HOSTFILE and lies in 0 to 1"),
        (["--set", "trian.seed=1"], {}, "did you mean train"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_machines_is_refused_before_anything_starts(
    plan, arguments, environ, said
):
    with pytest.raises(UserError) as caught:
        plan(*arguments, **environ)
    assert said in str(caught.value)


def test_one_machine_needs_no_hostfile(plan):
    command = plan(multi=False, NUM_GPUS="2", CUDA_VISIBLE_DEVICES="").command
    assert "--hostfile" not in command and "--include" not in command
    assert command[command.index("--num_gpus") + 1] == "2"
    assert not plan(multi=False, NUM_GPUS="2").over_ssh


def test_visible_devices_are_used_by_number(plan):
    command = plan(multi=False, CUDA_VISIBLE_DEVICES="2,3").command
    assert option(command, "--include") == "localhost:2,3"
    command = plan(multi=False, CUDA_VISIBLE_DEVICES="2,3", NUM_GPUS="1").command
    assert option(command, "--include") == "localhost:2"
    with pytest.raises(UserError, match="NUM_GPUS=3: this machine has 2; use 1 to 2"):
        plan(multi=False, CUDA_VISIBLE_DEVICES="2,3", NUM_GPUS="3")
    with pytest.raises(UserError, match="needs numbers such as 0,1"):
        plan(multi=False, CUDA_VISIBLE_DEVICES="GPU-8f3a")


def test_gpus_are_counted_by_their_device_files(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    assert local_devices({}, str(tmp_path / "nvidia[0-9]*")) == [0, 1]
    assert local_devices({"CUDA_VISIBLE_DEVICES": ""}, str(tmp_path / "nvidia[0-9]*")) == []


def test_without_ssh_each_machine_says_which_line_it_is(plan):
    command = plan(NODE_RANK="1").command
    assert option(command, "--node_rank") == "1"
    assert option(command, "--master_addr") == "worker-1"


def test_a_path_that_ssh_would_split_is_refused(plan, tmp_path):
    with pytest.raises(UserError, match="can't use a path with a space"):
        plan_launch(
            "/x/pretrain.sh",
            ["--config", str(tmp_path / "run.yaml"), "--set", "train.micro_batch_size=1"],
            {"HOSTFILE": str(tmp_path / "hosts")},
            cwd="/home/me/my checkout",
        )


def deepspeed_quotes(argument: str) -> str:
    """What DeepSpeed's pdsh launcher does to an argument."""
    return '"{}"'.format(argument.replace('"', '\\"')) if " " in argument else argument


@pytest.mark.parametrize(
    "argument",
    ["a b", 'a "b" c', "$HOME x", "[1,2]", "a;b", "`ls` x", "\\", 'x \\" y', "{a: 'b'}", "5%n", ""],
)  # fmt: skip
def test_an_argument_survives_deepspeed_and_the_remote_shell(argument):
    sent = deepspeed_quotes(quote_argument(argument)).replace("%%", "%")
    shell = subprocess.run(
        ["bash", "-c", f"printf '%s' {sent}"], capture_output=True, text=True, check=True
    )
    assert shell.stdout == argument


def test_variables_are_sent_but_secrets_are_not():
    shell = {
        "NCCL_DEBUG": "INFO", "HF_HOME": "/d", "WANDB_API_KEY": "s", "HF_TOKEN": "s", "LANG": "C",
        "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "offline", "CUDA_VISIBLE_DEVICES": "0",
    }  # fmt: skip
    sent, secrets = variables_to_send(shell)
    assert set(sent) == {"NCCL_DEBUG", "HF_HOME", "TOKENIZERS_PARALLELISM", "WANDB_MODE"}
    assert secrets == ["HF_TOKEN", "WANDB_API_KEY"]


def test_values_with_shell_characters_are_escaped_for_deepspeeds_double_quotes():
    assert env_file_text({"A": "x/y", "B": 'say "$HOME" 5%'}) == 'A=x/y\nB=say \\"\\$HOME\\" 5%%\n'


def test_an_env_file_may_have_comments_and_a_bad_line_is_named(tmp_path):
    path = tmp_path / ".deepspeed_env"
    path.write_text("# network\n\nNCCL_SOCKET_IFNAME=eth0\nA = b=c\n")
    assert read_env_file(path) == {"NCCL_SOCKET_IFNAME": "eth0", "A": "b=c"}
    path.write_text("NCCL_DEBUG=INFO\nexport X\n")
    with pytest.raises(UserError, match=r"\.deepspeed_env:2: 'export X': expected NAME=VALUE"):
        read_env_file(path)


def test_the_users_env_file_wins_over_the_shell(plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / ".deepspeed_env").write_text("NCCL_DEBUG=WARN\nMINE=1\n")
    environ = {"NCCL_DEBUG": "INFO", "DRY_RUN": "1", "EXTRA_ARGS": "x", "OMP_NUM_THREADS": "3"}
    child = child_environment(plan(), environ)
    with open(child["DS_ENV_FILE"]) as file:
        lines = file.read().splitlines()
    assert lines == ["NCCL_DEBUG=INFO", "OMP_NUM_THREADS=3", "NCCL_DEBUG=WARN", "MINE=1"]
    assert "EXTRA_ARGS" not in child, "it is part of the command now"
