"""Tables that the data tools print."""

from __future__ import annotations

import resource
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
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    peaks = [resource.getrusage(one).ru_maxrss / 1024 for one in who]  # KiB on Linux
    megabytes = max(total.bytes for total in summary.keys.values()) / 1e6
    out.write(
        f"{summary.seconds:.1f} s, {megabytes / summary.seconds:.1f} MB/s with {tokenizer.engine}; "
        f"peak memory {peaks[0]:.0f} MiB, largest worker {peaks[1]:.0f} MiB\n"
    )
