"""Hostfile and device selection: which rank runs where, and what is wrong with a line.

# one machine per line; slots is the machine's total number of devices
worker-1 slots=8
worker-2 slots=8
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megaparcae.errors import UserError

LINE = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)[ \t]+slots=(?P<slots>[0-9]+)")
EXPECTED = "expected 'HOST slots=N', such as 'worker-1 slots=8'"


@dataclass(frozen=True, kw_only=True)
class Host:
    """One line of a hostfile, or this machine."""

    name: str
    slots: int
    """All devices of the machine, numbered from 0."""
    where: str
    """File and line, for messages."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The devices that a job takes on one host; ranks follow their order."""

    host: str
    devices: tuple[int, ...]


def read_hostfile(path: str | Path) -> list[Host]:
    """The hosts of a hostfile, in order; UserError with file, line, content and expected form."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"hostfile {path}: no such file; unset HOSTFILE for one machine") from None
    except (UnicodeDecodeError, IsADirectoryError):
        raise UserError(f"hostfile {path}: not a text file; {EXPECTED}") from None
    if text.startswith("#!"):  # deepspeed --hostfile launch/X.sh, with the hostfile forgotten
        raise UserError(f"hostfile {path}: this is a script; give the hostfile's name before it")
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.split("#")[0].strip()
        if content:
            host = _parse_line(content, f"{path}:{number}")
            if host.name in hosts:
                raise UserError(
                    f"{host.where}: {content!r}: {host.name} is also in {hosts[host.name].where}; "
                    "give a machine one line with all its slots"
                )
            hosts[host.name] = host
    if not hosts:
        raise UserError(f"hostfile {path}: no machine in it; {EXPECTED}")
    return list(hosts.values())


def select_devices(
    hosts: list[Host],
    *,
    include: str = "",
    exclude: str = "",
    num_nodes: int | None = None,
    num_devices: int | None = None,
) -> list[Placement]:
    """The devices of a job, in the order of the hostfile.

    include and exclude are DeepSpeed's "host[:device[,device...]][@host...]"; a host without
    devices means all of them. num_nodes takes the first hosts, num_devices the first devices of
    each. Raises UserError for hosts and devices that don't exist.
    """
    if include and exclude:
        raise UserError("INCLUDE and EXCLUDE exclude each other; give one of them")
    if (include or exclude) and (num_nodes or num_devices):
        raise UserError(
            "NUM_NODES and NUM_GPUS can't be combined with INCLUDE or EXCLUDE; drop them"
        )
    everything = {host.name: set(range(host.slots)) for host in hosts}
    if include:
        wanted = _parse_filter("INCLUDE", include, hosts)
    else:
        removed = _parse_filter("EXCLUDE", exclude, hosts) if exclude else {}
        wanted = {name: slots - removed.get(name, set()) for name, slots in everything.items()}
    if num_nodes is not None:
        wanted = _first_hosts(wanted, num_nodes)
    if num_devices is not None:
        wanted = _first_devices(wanted, num_devices, hosts)
    chosen = [
        Placement(host=host.name, devices=tuple(sorted(wanted[host.name])))
        for host in hosts
        if wanted.get(host.name)
    ]
    if not chosen:
        raise UserError(f"EXCLUDE={exclude!r} leaves no device; exclude fewer")
    return chosen


def include_string(placements: Iterable[Placement]) -> str:
    """The placements as DeepSpeed's --include, every device named."""
    return "@".join(f"{p.host}:{','.join(map(str, p.devices))}" for p in placements)


def _parse_line(content: str, where: str) -> Host:
    match = LINE.fullmatch(content)
    if match is None:
        raise UserError(f"{where}: {content!r}: {EXPECTED}{_what_is_wrong(content)}")
    slots = int(match["slots"])
    if slots == 0:
        raise UserError(f"{where}: {content!r}: slots must be at least 1; remove the line instead")
    return Host(name=match["name"], slots=slots, where=where)


def _what_is_wrong(content: str) -> str:
    name, *rest = content.split()
    joined = "".join(rest)
    if _is_ipv6(name):
        return "; an IPv6 address needs a host name (/etc/hosts), since pdsh divides at colons"
    if ":" in name:
        host, _, slots = name.partition(":")
        return f"; write '{host} slots={slots if slots.isdigit() else 'N'}'"
    if "@" in name:
        return "; put the user's name into ~/.ssh/config, since '@' separates hosts"
    if not rest:
        return "; the number of devices is missing"
    if re.fullmatch(r"slots=\d+", joined):
        return "; no spaces around '='"
    if re.match(r"slots=\d+", joined):
        return "; nothing may follow the number (a comment begins with '#')"
    if re.fullmatch(r"slots=-?\D*", joined):
        return "; the number of devices is missing"
    if re.fullmatch(r"\w+=\d+", joined):
        return f"; {joined.split('=')[0]!r} is not slots"
    return ""


def _is_ipv6(name: str) -> bool:
    try:
        return ipaddress.ip_address(name.strip("[]").split("%")[0]).version == 6
    except ValueError:
        return False


def _parse_filter(option: str, text: str, hosts: list[Host]) -> dict[str, set[int]]:
    known = {host.name: host for host in hosts}
    wanted: dict[str, set[int]] = {}
    for part in text.split("@"):
        name, colon, numbers = part.strip().partition(":")
        if name not in known:
            raise UserError(f"{option}={text!r}: no host {name!r}; choose {', '.join(known)}")
        host = known[name]
        if colon:
            devices = {_device(option, text, host, n) for n in numbers.split(",")}
        else:
            devices = set(range(host.slots))
        wanted.setdefault(name, set()).update(devices)
    return wanted


def _device(option: str, text: str, host: Host, number: str) -> int:
    if not number.strip().isdigit():
        raise UserError(
            f"{option}={text!r}: {number!r} is not a device number; expected HOST:0,1@HOST2"
        )
    device = int(number)
    if device >= host.slots:
        raise UserError(
            f"{option}={text!r}: {host.name} has no device {device}, since {host.where} says "
            f"slots={host.slots}, devices 0 to {host.slots - 1}; slots is the machine's total: "
            f"write slots={device + 1} or more when it has that many"
        )
    return device


def _first_hosts(wanted: dict[str, set[int]], count: int) -> dict[str, set[int]]:
    if not 1 <= count <= len(wanted):
        raise UserError(f"NUM_NODES={count}: there are {len(wanted)} hosts; use 1 to {len(wanted)}")
    return {name: wanted[name] for name in list(wanted)[:count]}


def _first_devices(
    wanted: dict[str, set[int]], count: int, hosts: list[Host]
) -> dict[str, set[int]]:
    for host in hosts:
        if host.name in wanted and not 1 <= count <= host.slots:
            raise UserError(
                f"NUM_GPUS={count}: {host.name} has {host.slots} ({host.where}); "
                f"use 1 to {host.slots}"
            )
    return {name: set(range(count)) for name in wanted}
