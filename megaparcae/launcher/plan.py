"""What a launch will do: ranks, hosts, devices, and the command that starts them."""

from __future__ import annotations

import argparse
import glob
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megaparcae.config.batch import BatchPlan, solve_batch
from megaparcae.config.load import load_config
from megaparcae.errors import UserError
from megaparcae.launcher.exports import quote_argument
from megaparcae.launcher.hostfile import (
    Host,
    Placement,
    include_string,
    read_hostfile,
    select_devices,
)
from megaparcae.launcher.ranks import DEFAULT_PORT

CLUSTER_HOSTFILE = "/job/hostfile"
"""DeepSpeed's own default; used when it exists and HOSTFILE is not set."""

MOST_LINES = 32


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """A job before it starts."""

    placements: tuple[Placement, ...]
    batch: BatchPlan
    command: tuple[str, ...]
    over_ssh: bool
    """DeepSpeed reaches the machines through pdsh and ssh."""

    def describe(self) -> str:
        """The table of ranks and the command."""
        ranks = sum(len(p.devices) for p in self.placements)
        hosts = len(self.placements)
        title = f"ranks: {ranks}, hosts: {hosts}; {self.batch.explain()}"
        lines = self._rank_lines() if ranks <= MOST_LINES else self._host_lines()
        return "\n".join([title, *lines, shlex.join(self.command)])

    def _rank_lines(self) -> list[str]:
        lines, rank = [], 0
        tp, dp = self.batch.tp, self.batch.dp
        for placement in self.placements:
            for device in placement.devices:
                place = f"pp {rank // (tp * dp)} dp {rank // tp % dp} tp {rank % tp}"
                lines.append(f"  rank {rank}: {placement.host} device {device} ({place})")
                rank += 1
        return lines

    def _host_lines(self) -> list[str]:
        lines, first = [], 0
        for placement in self.placements:
            last = first + len(placement.devices) - 1
            devices = ",".join(map(str, placement.devices))
            lines.append(f"  ranks {first}-{last}: {placement.host} devices {devices}")
            first = last + 1
        return lines


def plan_launch(
    script: str, arguments: Sequence[str], environ: Mapping[str, str], *, cwd: str
) -> LaunchPlan:
    """Check layout and batch against the machines and build the `deepspeed` command.

    Reads HOSTFILE, NUM_NODES, NUM_GPUS, INCLUDE, EXCLUDE, MASTER_ADDR, MASTER_PORT, NODE_RANK,
    SSH_PORT and LAUNCHER_ARGS; EXTRA_ARGS is appended to the arguments. Raises UserError.
    """
    arguments = [*arguments, *split_words("EXTRA_ARGS", environ)]
    hostfile = environ.get("HOSTFILE") or (
        CLUSTER_HOSTFILE if os.path.isfile(CLUSTER_HOSTFILE) else None
    )
    placements = _placements(hostfile, environ)
    batch = _check_layout(arguments, placements)
    over_ssh = hostfile is not None and "NODE_RANK" not in environ and not _only_here(placements)
    command = [sys.executable, "-m", "deepspeed.launcher.runner"]
    command += _where(hostfile, placements, environ)
    command += ["--master_port", environ.get("MASTER_PORT", str(DEFAULT_PORT))]
    if "NODE_RANK" in environ:
        command += _without_ssh(hostfile, placements, environ)
    elif over_ssh:
        command += _over_ssh(script, placements, environ, cwd)
    else:
        command += ["--log_level", "error"]  # this machine's ranks are in the table above
    command += ["--no_python", "--no_local_rank", script]
    command += [quote_argument(a) for a in arguments] if over_ssh else arguments
    return LaunchPlan(
        placements=tuple(placements), batch=batch, command=tuple(command), over_ssh=over_ssh
    )


def split_words(name: str, environ: Mapping[str, str]) -> list[str]:
    """A variable as a shell would split it: quotes keep words together."""
    try:
        return shlex.split(environ.get(name, ""))
    except ValueError as error:
        raise UserError(f"{name}={environ[name]!r}: {error}; close the quotes") from None


def local_devices(environ: Mapping[str, str], pattern: str = "/dev/nvidia[0-9]*") -> list[int]:
    """Devices of this machine: CUDA_VISIBLE_DEVICES, else its GPUs, else one process on CPU."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        try:
            return [int(device) for device in visible.split(",")]
        except ValueError:
            raise UserError(
                f"CUDA_VISIBLE_DEVICES={visible!r}: DeepSpeed's launcher needs numbers such as "
                "0,1; to use device names, start the ranks with torchrun or srun"
            ) from None
    return list(range(len(glob.glob(pattern)))) if visible is None else []


def _placements(hostfile: str | None, environ: Mapping[str, str]) -> list[Placement]:
    num_gpus = _number("NUM_GPUS", environ)
    include, exclude = environ.get("INCLUDE", ""), environ.get("EXCLUDE", "")
    num_nodes = _number("NUM_NODES", environ)
    if hostfile is not None:
        return select_devices(
            read_hostfile(hostfile),
            include=include,
            exclude=exclude,
            num_nodes=num_nodes,
            num_devices=num_gpus,
        )
    if num_nodes not in (None, 1):
        raise UserError(f"NUM_NODES={num_nodes} needs HOSTFILE, which names the machines")
    devices = local_devices(environ)
    if not devices:  # CPU: as many processes as asked for
        devices = list(range(num_gpus or 1))
    if include or exclude:
        here = Host(name="localhost", slots=max(devices) + 1, where="this machine")
        return select_devices([here], include=include, exclude=exclude, num_devices=num_gpus)
    if num_gpus is not None and not 1 <= num_gpus <= len(devices):
        raise UserError(
            f"NUM_GPUS={num_gpus}: this machine has {len(devices)}; use 1 to {len(devices)}"
        )
    return [Placement(host="localhost", devices=tuple(devices[:num_gpus]))]


def _check_layout(arguments: Sequence[str], placements: Sequence[Placement]) -> BatchPlan:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default="")
    parser.add_argument("--set", action="append", nargs="+", default=[])
    options, _ = parser.parse_known_args(arguments)
    config = load_config(options.config, [item for group in options.set for item in group])
    tp, pp = config.parallel.tp, config.parallel.pp
    world = sum(len(p.devices) for p in placements)
    batch = solve_batch(config.train, world=world, tp=tp, pp=pp)
    for placement in placements:
        if len(placement.devices) % tp:
            raise UserError(
                f"parallel.tp={tp} must divide the {len(placement.devices)} devices used on "
                f"{placement.host}, so that tensor-parallel ranks share a machine; change tp or "
                "the devices"
            )
    return batch


def _where(
    hostfile: str | None, placements: Sequence[Placement], environ: Mapping[str, str]
) -> list[str]:
    """Hosts and devices, all named: DeepSpeed's own filters have surprised people."""
    if hostfile is not None:
        return ["--hostfile", hostfile, "--include", include_string(placements)]
    (here,) = placements
    if here.devices == tuple(range(len(here.devices))) and not environ.get("CUDA_VISIBLE_DEVICES"):
        return ["--num_gpus", str(len(here.devices))]
    return ["--include", include_string(placements)]


def _without_ssh(
    hostfile: str | None, placements: Sequence[Placement], environ: Mapping[str, str]
) -> list[str]:
    rank = _number("NODE_RANK", environ)
    if hostfile is None or rank is None or rank >= len(placements):
        raise UserError(
            f"NODE_RANK={environ['NODE_RANK']} needs HOSTFILE and lies in 0 to "
            f"{len(placements) - 1}, the place of this machine among its lines"
        )
    address = environ.get("MASTER_ADDR") or placements[0].host
    return ["--no_ssh", "--node_rank", str(rank), "--master_addr", address]


def _over_ssh(
    script: str, placements: Sequence[Placement], environ: Mapping[str, str], cwd: str
) -> list[str]:
    for path in (cwd, script):
        if shlex.quote(path) != path:
            raise UserError(
                f"{path!r}: DeepSpeed's ssh launcher can't use a path with a space or shell "
                "character; move the checkout, or start the ranks with NODE_RANK, torchrun or srun"
            )
    options = [] if len(placements) > 1 else ["--force_multi"]
    for name, option in (("MASTER_ADDR", "--master_addr"), ("SSH_PORT", "--ssh_port")):
        if environ.get(name):
            options += [option, environ[name]]
    if environ.get("LAUNCHER_ARGS"):
        options.append(f"--launcher_args={environ['LAUNCHER_ARGS']}")
    return options


def _only_here(placements: Sequence[Placement]) -> bool:
    """One host, and it is this machine: nothing to reach."""
    name = socket.gethostname()
    here = {"localhost", "127.0.0.1", name, name.split(".")[0], socket.getfqdn()}
    return len(placements) == 1 and placements[0].host in here


def _number(name: str, environ: Mapping[str, str]) -> int | None:
    text = environ.get(name, "")
    if not text:
        return None
    if not text.isdigit():
        raise UserError(f"{name}={text!r} must be a whole number")
    return int(text)
