"""The one logger, and how a run's log.jsonl is read.

Rank 0 speaks; the other ranks only when something is wrong with them.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

logger = logging.getLogger("megaparcae")


def setup_logging(rank: int = 0, level: str = "INFO") -> None:
    """Send the logger to stderr: of rank 0 from `level` on, of the others warnings and their rank.

    MEGAPARCAE_LOG, where it is set, is the level of all.
    """
    handler = logging.StreamHandler(sys.stderr)
    prefix = "" if rank == 0 else f"[rank {rank}] "
    handler.setFormatter(logging.Formatter(f"{prefix}%(message)s"))
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(os.environ.get("MEGAPARCAE_LOG", level if rank == 0 else "WARNING"))


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a log.jsonl in the order in which they were written.

    Lines that a crash has cut short or a disk has damaged are left out. Raises OSError when there
    is no such file.
    """
    parsed = (_parse(line) for line in path.read_text("utf-8", errors="replace").splitlines())
    return [record for record in parsed if record is not None]


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_record = isinstance(record, dict) and isinstance(record.get("kind"), str)
    return record if is_record and isinstance(record.get("step"), int) else None
