"""The one logger. Rank 0 speaks; the other ranks only when something is wrong with them."""

from __future__ import annotations

import logging
import os
import sys

logger = logging.getLogger("megaparcae")


def setup_logging(rank: int = 0) -> None:
    """Send the logger to stderr: all of rank 0, warnings with the rank's number of the others."""
    handler = logging.StreamHandler(sys.stderr)
    prefix = "" if rank == 0 else f"[rank {rank}] "
    handler.setFormatter(logging.Formatter(f"{prefix}%(message)s"))
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(os.environ.get("MEGAPARCAE_LOG", "INFO" if rank == 0 else "WARNING"))
