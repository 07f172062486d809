"""Imported once by the process that all test ranks are forked from; no tensor work here."""

from __future__ import annotations

import os

for name, value in {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}.items():
    os.environ[name] = value

import deepspeed  # noqa: E402
import deepspeed.ops  # noqa: E402
import deepspeed.runtime.pipe.engine  # noqa: E402
import pytest  # noqa: E402, F401
import torch._dynamo  # noqa: E402, F401

# The shared-memory all-reduce would be compiled on first use; gloo alone is enough.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
