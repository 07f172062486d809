"""The user's mistakes, and how every command ends: 0 done, 1 failed, 2 the user's mistake."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


class UserError(ValueError):
    """One sentence for the person at the keyboard: option, value, rule, remedy."""


def run_command(main: Callable[[], int | None]) -> None:
    """Run a command line's `main` and exit: no traceback for a user's mistake, no half-eaten pipe.

    UserError and missing or unwritable files end with 2, a full disk and anything else with 1.
    """
    try:
        code = main() or 0
        sys.stdout.flush()
    except UserError as error:
        code = _complain(str(error), 2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        code = _complain(
            f"{error.filename}: {error.strerror}; check the path and its permissions", 2
        )
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        code = _complain(f"{where}{error.strerror or error}", 1)
    except KeyboardInterrupt:
        code = _complain("interrupted", 130)
    sys.exit(code)


def _complain(message: str, code: int) -> int:
    """Say it once a machine: every rank finds out what is wrong with options or files there."""
    if code != 2 or os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {message}", file=sys.stderr, flush=True)
    return code
