"""Who this process is: from DeepSpeed, torchrun, Slurm, or alone."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

from megaparcae.errors import UserError

DEFAULT_PORT = 29500


def ranks_exist(environ: Mapping[str, str]) -> bool:
    """Whether a launcher has already started one process per rank, this being one of them."""
    return "RANK" in environ or _slurm_tasks(environ) > 1


def rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_SIZE, MASTER_ADDR and MASTER_PORT of this process.

    `deepspeed` and torchrun set them; an srun step of several tasks sets Slurm's own; otherwise
    this is the only process. Raises UserError when a launcher left half of them out.
    """
    if "RANK" in environ:
        return _complete(environ)
    if _slurm_tasks(environ) > 1:
        return _from_slurm(environ)
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": environ.get("MASTER_PORT") or str(_free_port()),
    }


def network_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """GLOO_SOCKET_IFNAME: the interface that leads to MASTER_ADDR, unless it is this machine.

    Gloo by itself takes the address of the host's name, often a loopback address that no other
    machine reaches; all then wait for ever.
    """
    if "GLOO_SOCKET_IFNAME" in environ:
        return {}
    import psutil  # comes with deepspeed

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((environ["MASTER_ADDR"], 1))  # sends nothing, only looks for the route
        except OSError:
            return {}
        here = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if not here.startswith("127.") and here in (a.address for a in addresses):
            return {"GLOO_SOCKET_IFNAME": name}
    return {}


def first_host(nodelist: str) -> str:
    """The first name of Slurm's compressed list: node[03-07,9],gpu1 gives node03."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodelist)
    if match is None:
        raise UserError(f"SLURM_STEP_NODELIST={nodelist!r} names no host; set MASTER_ADDR")
    prefix, number, suffix = match.groups()
    return prefix + (number or "") + (suffix or "")


def tasks_on_node(per_node: str, node: int) -> int:
    """Tasks on the node of that index, from Slurm's list: 4(x2),3 means 4, 4, 3."""
    counts: list[int] = []
    for part in per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            break
        counts += [int(match[1])] * int(match[2] or 1)
    if node >= len(counts):
        raise UserError(f"SLURM_STEP_TASKS_PER_NODE={per_node!r} has no entry for node {node}")
    return counts[node]


def _free_port() -> int:
    """For a process that is alone: other runs on the machine may hold the usual one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _slurm_tasks(environ: Mapping[str, str]) -> int:
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    return int(tasks) if tasks.isdigit() and "SLURM_PROCID" in environ else 0


def _complete(environ: Mapping[str, str]) -> dict[str, str]:
    values = {
        "RANK": environ["RANK"],
        "WORLD_SIZE": environ.get("WORLD_SIZE"),
        "LOCAL_RANK": environ.get("LOCAL_RANK"),
        "LOCAL_SIZE": environ.get("LOCAL_SIZE") or environ.get("LOCAL_WORLD_SIZE"),
        "MASTER_ADDR": environ.get("MASTER_ADDR"),
        "MASTER_PORT": environ.get("MASTER_PORT"),
    }
    missing = [name for name, value in values.items() if not value]
    if missing:
        raise UserError(
            f"RANK={environ['RANK']} is set but {', '.join(missing)} not; unset RANK for one "
            "process, or let deepspeed, torchrun or srun start the ranks"
        )
    return {name: value for name, value in values.items() if value}


def _from_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ["SLURM_TASKS_PER_NODE"]
    nodes = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_NODELIST"]
    port = DEFAULT_PORT + int(environ.get("SLURM_JOB_ID", "0")) % 1000  # two jobs may share a node
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_SIZE": str(tasks_on_node(per_node, int(environ.get("SLURM_NODEID", "0")))),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or first_host(nodes),
        "MASTER_PORT": environ.get("MASTER_PORT", str(port)),
    }
