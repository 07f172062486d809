"""Two machines on this one: network namespaces joined by a cable, a host name and sshd in each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ADDRESSES = ("10.213.77.1", "10.213.77.2")
INTERFACE = "net0"
RANK_COMMAND = "megaparcae.train"

SSHD_CONFIG = """
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
UseDNS no
PasswordAuthentication no
PermitRootLogin yes
"""
SSH_CONFIG = """
Host *
    IdentityFile {folder}/user_key
    IdentitiesOnly yes
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
"""


class TwoNodes:
    """Machines node-0 and node-1; `command` is what a user would type on node-0."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = [f"mp{os.getpid()}-{index}" for index in range(2)]
        self.servers: list[subprocess.Popen[bytes]] = []
        self.hostfile = folder / "hosts"
        self.hostfile.write_text("".join(f"{address} slots=1\n" for address in ADDRESSES))

    def up(self) -> None:
        """Make the network and start both sshd. Raises OSError."""
        for name in self.names:
            run("ip", "netns", "add", name)
        first, second = self.names
        cable = ("ip", "-n", first, "link", "add", INTERFACE, "type", "veth")
        run(*cable, "peer", "name", INTERFACE, "netns", second)
        for name, address in zip(self.names, ADDRESSES, strict=True):
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                run("ip", "-n", name, "link", "set", interface, "up")
        self._write_ssh_files()
        for index in range(2):
            server = [shutil.which("sshd", path=sbin()) or "sshd", "-D", "-e"]
            server += ["-f", str(self.folder / "sshd_config")]
            with open(self.folder / f"sshd{index}.log", "w") as log:
                self.servers.append(subprocess.Popen([*self.inside(index), *server], stderr=log))
        for address in ADDRESSES:
            self._wait_for_ssh(address)

    def down(self) -> None:
        """Everything that runs on the machines is killed, and they are gone."""
        for index, name in enumerate(self.names):
            for pid in self.processes(index):
                kill(pid)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
        for server in self.servers:
            server.wait(timeout=10)

    def inside(self, index: int) -> list[str]:
        """The words before a command that run it on that machine, under its host name."""
        named = f'hostname node-{index} && exec "$@"'
        shell = ["unshare", "--uts", "bash", "-c", named, "bash"]
        return ["ip", "netns", "exec", self.names[index], *shell]

    def start(self, *command: str, cwd: Path, **variables: str) -> subprocess.Popen[str]:
        """A command on node-0, in a login's bare environment and `variables`."""
        path = f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{sbin()}"
        environ = {"PATH": path, "HOME": str(self.folder), "PYTHON": sys.executable, **variables}
        return subprocess.Popen(
            [*self.inside(0), *command],
            cwd=cwd,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def ranks(self, index: int) -> list[int]:
        """Process ids of a machine's ranks."""
        return [pid for pid in self.processes(index) if RANK_COMMAND in command_line(pid)]

    def kill_ranks(self, index: int) -> None:
        """kill -9 of all ranks of a machine."""
        killed = self.ranks(index)
        assert killed, f"no rank runs on node-{index}"
        for pid in killed:
            kill(pid)

    def kill_jobs(self) -> None:
        """kill -9 of everything on both machines but their sshd."""
        servers = {server.pid for server in self.servers}
        for pid in {*self.processes(0), *self.processes(1)} - servers:
            kill(pid)

    def cut_cable(self) -> None:
        """No packet leaves node-1 any more, not even the last one of a connection."""
        run("ip", "-n", self.names[1], "link", "set", INTERFACE, "down")

    def mend_cable(self) -> None:
        """Packets pass again."""
        run("ip", "-n", self.names[1], "link", "set", INTERFACE, "up")

    def processes(self, index: int) -> list[int]:
        """Ids of everything that runs on a machine."""
        command = ["ip", "netns", "pids", self.names[index]]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        return [int(pid) for pid in said.split()]

    def _write_ssh_files(self) -> None:
        for name in ("host_key", "user_key"):
            key = ("-t", "ed25519", "-N", "", "-q", "-f", str(self.folder / name))
            run("ssh-keygen", *key)
        (self.folder / "sshd_config").write_text(SSHD_CONFIG.format(folder=self.folder))
        (self.folder / "ssh_config").write_text(SSH_CONFIG.format(folder=self.folder))
        wrapper = self.folder / "bin" / "ssh"
        wrapper.parent.mkdir()
        ssh = shutil.which("ssh")
        wrapper.write_text(f'#!/bin/sh\nexec {ssh} -F {self.folder}/ssh_config "$@"\n')
        wrapper.chmod(0o755)
        Path("/run/sshd").mkdir(exist_ok=True)  # which its service would make

    def _wait_for_ssh(self, address: str) -> None:
        command = [*self.inside(0), str(self.folder / "bin" / "ssh"), address, "true"]
        for _ in range(40):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return
            time.sleep(0.25)
        logs = "".join(path.read_text() for path in sorted(self.folder.glob("sshd*.log")))
        raise OSError(f"ssh {address}: {done.stderr.strip()}\n{logs}")


def missing_tools() -> list[str]:
    """Programs that are not installed here."""
    tools = ("ip", "unshare", "hostname", "sshd", "ssh", "ssh-keygen", "pdsh")
    return [name for name in tools if shutil.which(name, path=sbin()) is None]


def sbin() -> str:
    """PATH with the folders of a system's own programs."""
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def run(*command: str) -> None:
    """Run to a good end; OSError with its message otherwise."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def kill(pid: int) -> None:
    """kill -9, of a process that may be gone by now."""
    try:
        os.kill(pid, 9)
    except ProcessLookupError:
        return


def command_line(pid: int) -> str:
    """The words of a process, "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
