"""Settings of all tests: CPU, one thread per process, no run-time compilation, no network."""

from __future__ import annotations

import os
import signal
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

os.environ.update(
    DS_ACCELERATOR="cpu",
    OMP_NUM_THREADS="1",
    TORCHDYNAMO_DISABLE="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
)
# Command lines that tests start find the package also when it is not installed.
entries = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
os.environ["PYTHONPATH"] = os.pathsep.join(entries)
# Started in the background of a shell, Ctrl-C would be ignored here and in everything started here.
signal.signal(signal.SIGINT, signal.default_int_handler)
