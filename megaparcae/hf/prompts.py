"""Prompts from a terminal or a jsonl file, and what becomes of them."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from megaparcae.errors import UserError
from megaparcae.hf.generate import GenerationOptions, Generator, Meter
from megaparcae.log import logger


def read_prompts(path: Path, key: str) -> list[dict[str, object]]:
    """Records of a jsonl file, each with text under `key`."""
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            raise UserError(f"{path}:{number} isn't JSON; give one object a line") from None
        if not isinstance(record, dict) or not isinstance(record.get(key), str):
            raise UserError(f"{path}:{number} has no text under {key!r}; name the key with --key")
        records.append(record)
    if not records:
        raise UserError(f"{path} has no prompts; give one JSON object a line")
    return records


def speak(generator: Generator, prompts: Iterable[str], options: GenerationOptions) -> Meter:
    """Continue one prompt after the other on standard output, word by word."""
    meter = Meter()
    for prompt in prompts:
        sys.stdout.write(prompt)
        sys.stdout.flush()
        started = time.perf_counter()
        meter.add(generator.generate([prompt], options, stream=True), started)
    return meter


def generate_file(
    generator: Generator,
    source: Path,
    target: Path,
    options: GenerationOptions,
    *,
    key: str,
    batch_size: int,
) -> Meter:
    """Continue every prompt of `source`; `target` appears when all are done.

    Prompts of similar length share a batch; the order of the file is kept.
    """
    if batch_size < 1:
        raise UserError(f"--batch-size {batch_size} must be at least 1")
    records = read_prompts(source, key)
    order = sorted(range(len(records)), key=lambda i: len(str(records[i][key])))
    meter = Meter()
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    partial.touch()
    try:
        for batch in batches(order, batch_size):
            started = time.perf_counter()
            found = generator.generate([str(records[i][key]) for i in batch], options)
            meter.add(found, started)
            logger.info("%s", meter.summary())
            for i, continuation in zip(batch, found, strict=True):
                records[i]["continuation"] = continuation.text
                records[i]["num_tokens"] = continuation.num_tokens
                records[i]["loops_per_token"] = round(continuation.loops_per_token, 3)
        lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        partial.write_text("".join(lines), encoding="utf-8")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return meter


def batches(order: list[int], size: int) -> Iterator[list[int]]:
    """Consecutive pieces."""
    for begin in range(0, len(order), size):
        yield order[begin : begin + size]
