"""Settings of all tests: CPU, one thread per process, no run-time compilation."""

from __future__ import annotations

import os

os.environ.update(
    DS_ACCELERATOR="cpu",
    OMP_NUM_THREADS="1",
    TORCHDYNAMO_DISABLE="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
)
