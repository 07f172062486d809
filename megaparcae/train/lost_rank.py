"""A rank that is gone: how the others find out, and what they say."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator

from megaparcae.train.safety import TrainingError

SIGNS = re.compile(
    r"(gloo|nccl).*(connection (closed|reset|refused|was closed)|broken pipe|socket closed"
    r"|timed ?out|timeout|remote ?error|remote process|communicator was aborted)",
    re.IGNORECASE | re.DOTALL,
)
"""What gloo and NCCL say of a peer; a wrong size or a misuse of theirs reads otherwise."""


class LostRankError(TrainingError):
    """Another rank of the run is gone; a restart continues from the last checkpoint."""

    def __init__(self, last_step: int | None) -> None:
        when = "before the first step" if last_step is None else f"after step {last_step}"
        super().__init__(
            f"{socket.gethostname()}: another rank was lost {when} (its machine's messages may say "
            "why); start the same command again to resume"
        )


def is_lost_rank(error: BaseException) -> bool:
    """Whether a collective failed because a rank at its other end is gone or silent."""
    return any(isinstance(e, RuntimeError) and SIGNS.search(str(e)) for e in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
