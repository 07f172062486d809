"""A rank that is gone: how the others find out, and what they say."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from megaparcae.train.safety import TrainingError

PROBES = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 35_000}
"""A silent connection is probed after 15 s and given up after 35 s (the last in ms)."""

SIGNS = re.compile(
    r"(gloo|nccl).*(connection (closed|reset|refused|was closed)|no route|broken pipe|socket closed"
    r"|timed ?out|timeout|remote ?error|remote process|communicator was aborted)",
    re.IGNORECASE | re.DOTALL,
)
"""What gloo and NCCL say of a peer; a wrong size or a misuse of theirs reads otherwise."""

PEER = re.compile(r"\[([0-9a-fA-F.:]+)(?:%\w+)?\]:\d+")
"""The address of the other end in what gloo says."""


class LostRankError(TrainingError):
    """Another rank of the run is gone; a restart continues from the last checkpoint."""

    def __init__(self, last_step: int | None, error: BaseException | None = None) -> None:
        """`error` is what the transport said; it may name the other end."""
        when = "before the first step" if last_step is None else f"after step {last_step}"
        address = next((m[1] for e in _chain(error) if (m := PEER.search(str(e)))), None)
        where = "its machine's messages" if address is None else f"the messages of {address}"
        super().__init__(
            f"{socket.gethostname()}: another rank was lost {when} ({where} may say "
            "why); start the same command again to resume"
        )


def is_lost_rank(error: BaseException) -> bool:
    """Whether a collective failed because a rank at its other end is gone or silent."""
    return any(isinstance(e, RuntimeError) and SIGNS.search(str(e)) for e in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def probe_connections() -> None:
    """Let the kernel probe this process's TCP connections, for gloo.

    A process that dies closes its connections; a machine that loses power or its network does not,
    and gloo would wait half an hour. The other kernel answers and gloo sends only what is awaited,
    so a busy rank is not given up. NCCL does send ahead, and has a watchdog of its own.
    """
    for entry in Path("/proc/self/fd").glob("*"):
        try:
            if os.readlink(entry).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                    _probe(connection)
        except OSError:  # closed by now
            continue


def _probe(connection: socket.socket) -> None:
    if connection.type == socket.SOCK_STREAM and connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in PROBES.items():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
