"""What remote machines are given: environment variables, and arguments that survive the shell."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from megaparcae.errors import UserError

SENT = (
    *("NCCL_", "GLOO_", "UCX_", "FI_", "OMP_", "MKL_", "CUDA_", "TORCH", "DS_", "DEEPSPEED_"),
    *("MEGAPARCAE_", "WANDB_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "TRITON_", "XDG_CACHE_HOME"),
)
"""Variables that begin so are sent along; DeepSpeed by itself sends PYTHON*, NCCL* and few more."""

KEPT = {"CUDA_VISIBLE_DEVICES", "DS_ENV_FILE"}
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")
"""Not sent: every user of a machine can read the command lines on it."""


def variables_to_send(environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The variables of this shell that ranks elsewhere need, and the names of secrets held back."""
    named = {n: v for n, v in sorted(environ.items()) if n.startswith(SENT) and n not in KEPT}
    secrets = [name for name in named if SECRET.search(name) and name != "TOKENIZERS_PARALLELISM"]
    sent = {n: v for n, v in named.items() if n not in secrets and "\n" not in v}
    return sent, secrets


def read_env_file(path: Path) -> dict[str, str]:
    """NAME=VALUE lines of a .deepspeed_env; DeepSpeed would stop at a blank line or a comment."""
    found = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        content = line.strip()
        if not content or content.startswith("#"):
            continue
        name, equals, value = content.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name.strip()):
            raise UserError(f"{path}:{number}: {content!r}: expected NAME=VALUE")
        found[name.strip()] = value.strip()
    return found


def env_files(environ: Mapping[str, str]) -> list[Path]:
    """What DeepSpeed reads: .deepspeed_env (or DS_ENV_FILE) at home and in this folder."""
    name = environ.get("DS_ENV_FILE", ".deepspeed_env")
    folders = dict.fromkeys((Path(os.path.expanduser("~")), Path()))
    paths = dict.fromkeys(folder / name for folder in folders)
    return [path for path in paths if path.is_file()]


def quote_argument(argument: str) -> str:
    """An argument as DeepSpeed has to be given it for the shell at the other end to see it whole.

    DeepSpeed puts double quotes around an argument with a space and escapes those inside, but
    leaves $, ` and \\ to the remote shell; an argument without a space it sends as it is.
    pdsh replaces %n, %h and %u in everything it is given.
    """
    if " " in argument:
        quoted = re.sub(r"([\\$`])", r"\\\1", argument)
    else:
        quoted = shlex.quote(argument)
    return quoted.replace("%", "%%")


def env_file_text(variables: Mapping[str, str]) -> str:
    """Variables in the form of a .deepspeed_env; DeepSpeed puts double quotes around values."""
    lines = (f"{name}={_escape(value)}\n" for name, value in variables.items())
    return "".join(lines)


def _escape(value: str) -> str:
    special = re.search(r"[^\w@%+=:,./-]", value)
    escaped = re.sub(r'([\\$`"])', r"\\\1", value) if special else value
    return escaped.replace("%", "%%")
