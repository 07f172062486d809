"""What the machine can do at best: copying memory, and one large matrix product."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from megaparcae.bench.measure import take_turns, timed
from megaparcae.engine.distributed import Process

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
"""Of the tensor that is copied: far beyond the caches."""
WIDTH = {"cuda": 8192, "cpu": 2048}
"""Of the square matrices."""
TIMES = {"cuda": 20, "cpu": 1}
"""Products or copies in one measurement."""


def ceilings(process: Process, dtypes: tuple[str, ...], repeats: int) -> list[dict[str, Any]]:
    """GB/s of a copy (read and written bytes) and TFLOP/s of a product, by precision of the run.

    fp32 products are as the run's: PyTorch's setting for TF32 decides.
    """
    kind = process.device.type
    source = torch.ones(BYTES[kind], dtype=torch.uint8, device=process.device)
    target, times = torch.empty_like(source), TIMES[kind]
    variants = {"copy": timed(lambda: [target.copy_(source) for _ in range(times)])}
    for name in dtypes:
        a, b, out = _matrices(WIDTH[kind], DTYPES[name], process.device)
        variants[name] = timed(partial(_multiply, a, b, out, times))
    timings = take_turns(variants, repeats)
    moved = 2 * BYTES[kind] * times / timings.median("copy")
    table: list[dict[str, Any]] = [{"what": "copy", "gigabytes_per_second": moved / 1e9}]
    for name in dtypes:
        rate = 2 * WIDTH[kind] ** 3 * times / timings.median(name)
        table.append({"what": f"product, {name}", "tflops": rate / 1e12})
    for row, name in zip(table, variants, strict=True):
        row["spread"] = timings.spread(name)
    return table


def _multiply(a: Tensor, b: Tensor, out: Tensor, times: int) -> None:
    for _ in range(times):
        torch.mm(a, b, out=out)


def _matrices(width: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Two factors and room for the product; not zeros, which cost a GPU less power."""
    return [torch.randn(width, width, device=device).to(dtype) for _ in range(3)]
