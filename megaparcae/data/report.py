"""Tables that the data tools print."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import TextIO

from megaparcae.data.preprocess import Summary
from megaparcae.data.tokenizer import Tokenizer


def write_summary(out: TextIO, summary: Summary, tokenizer: Tokenizer) -> None:
    """What preprocessing did, and the largest memory of this process and of a worker."""
    for (key, total), prefix in zip(summary.keys.items(), summary.outputs, strict=True):
        bytes_per_token = total.bytes / max(total.tokens, 1)
        out.write(
            f"{key}: {total.documents:,} documents, {total.empty:,} empty, "
            f"{total.tokens:,} tokens, "
            f"{total.bytes / 1e6:,.2f} MB of text, {bytes_per_token:.3f} bytes/token\n"
            f"  -> {prefix}.bin .idx .json\n"
        )
    if summary.problems_file:
        out.write(
            f"{summary.num_skipped:,} records skipped, {summary.num_repaired:,} repaired "
            f"(U+FFFD), listed in {summary.problems_file}\n"
        )
    worker = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024  # KiB on Linux
    megabytes = max(total.bytes for total in summary.keys.values()) / 1e6
    out.write(
        f"{summary.seconds:.1f} s, {megabytes / summary.seconds:.1f} MB/s with {tokenizer.engine}; "
        f"peak memory {_peak_memory():.0f} MiB, largest worker {worker:.0f} MiB\n"
    )


def _peak_memory() -> float:
    """MiB of this process; its resource usage would count what the process that started it had."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split("VmHWM:")[1].split()[0]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # macOS counts bytes
