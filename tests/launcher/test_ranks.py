"""Who a process is, whoever started it."""

from __future__ import annotations

import pytest

from megaparcae.errors import UserError
from megaparcae.launcher.ranks import (
    first_host,
    network_variables,
    rank_variables,
    ranks_exist,
    tasks_on_node,
)

STEP = {
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "10",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),2",
    "SLURM_STEP_NODELIST": "gpu[07-08,11]",
    "SLURM_JOB_ID": "123456",
}


def test_a_lone_process_is_rank_zero_of_one():
    assert not ranks_exist({})
    found = rank_variables({})
    assert (found["RANK"], found["WORLD_SIZE"], found["MASTER_ADDR"]) == ("0", "1", "127.0.0.1")


def test_torchruns_local_world_size_is_the_local_size():
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    torchrun |= {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert ranks_exist(torchrun) and rank_variables(torchrun)["LOCAL_SIZE"] == "2"


def test_half_a_launcher_is_refused():
    with pytest.raises(UserError, match=r"RANK=0 is set but WORLD_SIZE, LOCAL_RANK, .* unset RANK"):
        rank_variables({"RANK": "0"})


def test_a_slurm_step_of_several_tasks_is_read():
    assert ranks_exist(STEP)
    assert rank_variables(STEP) == {
        "RANK": "9",
        "WORLD_SIZE": "10",
        "LOCAL_RANK": "1",
        "LOCAL_SIZE": "2",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": str(29500 + 456),
    }


def test_a_batch_script_and_a_step_of_one_task_are_no_ranks():
    assert not ranks_exist({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"})
    assert not ranks_exist(STEP | {"SLURM_STEP_NUM_TASKS": "1"})


@pytest.mark.parametrize(
    "nodes, first",
    [("n1", "n1"), ("n1,n2", "n1"), ("n[3-5]", "n3"), ("n[03,05],m1", "n03"), ("r[2-3]-x", "r2-x")],
)  # fmt: skip
def test_the_first_host_of_a_node_list(nodes, first):
    assert first_host(nodes) == first


def test_tasks_of_each_node():
    assert [tasks_on_node("4(x2),3", node) for node in range(3)] == [4, 4, 3]
    with pytest.raises(UserError, match="has no entry for node 3"):
        tasks_on_node("4(x2),3", 3)


def test_the_users_interface_stands_and_one_machine_needs_none():
    assert network_variables({"GLOO_SOCKET_IFNAME": "ib0", "MASTER_ADDR": "10.0.0.1"}) == {}
    assert network_variables({"MASTER_ADDR": "127.0.0.1"}) == {}
    assert network_variables({"MASTER_ADDR": "no.such.host.invalid"}) == {}
