"""Text to shards: blocks of the inputs go to workers, parts are joined in the input's order."""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megaparcae.data.blocks import Block, iterate_blocks
from megaparcae.data.inputs import STDIN, Source, find_sources
from megaparcae.data.parts import PartSettings, read_arrays
from megaparcae.data.pool import BadInput, Done, WorkerError, run_blocks
from megaparcae.data.progress import Progress
from megaparcae.data.records import load_block, place, read_records
from megaparcae.data.sidecar import KeyTotals, SourceRecord, build_sidecar
from megaparcae.data.tokenizer import Tokenizer
from megaparcae.data.writer import IndexedWriter, require_writable_folder
from megaparcae.errors import UserError
from megaparcae.log import logger

SAMPLE_CHARACTERS = 100_000
"""Text of the input on which a converted tokenizer is compared with the original."""


@dataclass(frozen=True)
class PreprocessOptions:
    """What the command line says."""

    inputs: tuple[str, ...]
    output_prefix: str
    settings: PartSettings
    num_workers: int = 1
    input_format: str = "auto"
    split: str = "train"
    separator: bytes | None = None
    """Divides .txt files into documents; None is one document a file."""
    resume: bool = False
    quiet: bool = False


@dataclass
class Summary:
    """What a run did."""

    keys: dict[str, KeyTotals]
    num_skipped: int = 0
    num_repaired: int = 0
    seconds: float = 0.0
    problems_file: Path | None = None
    outputs: list[str] = field(default_factory=list)


def preprocess(options: PreprocessOptions, tokenizer: Tokenizer) -> Summary:
    """Write `{prefix}_{key}_document.bin/.idx/.json` for every key.

    Raises UserError (one sentence) for anything that the user can mend, before workers start where
    possible; OSError for a full disk; WorkerError when a worker dies. None leaves a half-written
    shard; finished parts stay in `{prefix}.parts` for --resume.
    """
    start = time.monotonic()
    check_options(options, tokenizer)
    sources = find_sources(options.inputs, options.input_format, options.split)
    require_writable_folder(
        Path(options.output_prefix).parent, "--output-prefix", options.output_prefix
    )
    tokenizer.check_engine(_sample(sources, options))
    with _work_folder(options) as folder, _Joiner(options, tokenizer, folder) as joiner:
        blocks = iterate_blocks(sources, options.separator)
        with _located(joiner):
            for done in run_blocks(
                blocks, options.num_workers, tokenizer, options.settings, folder
            ):
                joiner.add(done)
        joiner.close(sum(source.size for source in sources))
    shutil.rmtree(folder)
    joiner.summary.seconds = time.monotonic() - start
    return joiner.summary


def check_options(options: PreprocessOptions, tokenizer: Tokenizer) -> None:
    """Refuse what cannot work, before anything starts."""
    if options.num_workers < 1:
        raise UserError(f"--workers={options.num_workers} must be at least 1")
    if options.settings.append_eod and tokenizer.eod_id is None:
        raise UserError(
            f"--append-eod: tokenizer {tokenizer.path} has no end-of-text token (</s>, <|eos|>, "
            "<|endoftext|>); leave the option out or use a tokenizer that has one"
        )
    limit = np.iinfo(options.settings.token_dtype(tokenizer)).max
    if tokenizer.vocab_size - 1 > limit:
        raise UserError(
            f"--dtype={options.settings.dtype} holds ids up to {limit}, tokenizer {tokenizer.path} "
            f"has {tokenizer.vocab_size} ids; use --dtype int32"
        )
    keys = options.settings.keys
    if len(set(keys)) != len(keys) or any("/" in key for key in keys):
        raise UserError(f"--json-keys {' '.join(keys)}: give each key once, and none with a slash")


class _Joiner:
    """Puts finished parts in order and streams them into the shards."""

    def __init__(self, options: PreprocessOptions, tokenizer: Tokenizer, folder: Path) -> None:
        keys = options.settings.keys
        self.options, self.tokenizer, self.folder = options, tokenizer, folder
        self.dtype = options.settings.token_dtype(tokenizer)
        self.summary = Summary({key: KeyTotals() for key in keys})
        self.sources: list[SourceRecord] = []
        self.current: Source | None = None
        self.num_numbers = 0
        """Lines (rows, documents) of the current source before the next block."""
        self.next_index = 0
        self._waiting: dict[int, Done] = {}
        self._stack = contextlib.ExitStack()
        self._progress = Progress("tokenised", 0, options.quiet)
        self.prefixes = [f"{options.output_prefix}_{key}_document" for key in keys]
        self._problems = Path(f"{options.output_prefix}_problems.jsonl")
        self._problems.unlink(missing_ok=True)

    def __enter__(self) -> _Joiner:
        with contextlib.ExitStack() as stack:
            self.writers = [
                stack.enter_context(IndexedWriter(prefix, self.dtype, self.folder))
                for prefix in self.prefixes
            ]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.end()
        self._stack.__exit__(*error)  # type: ignore[arg-type]

    def add(self, done: Done) -> None:
        """Take a finished block; write all that are next in order."""
        self._progress.advance(done.block.progress)
        self._waiting[done.index] = done
        while (ready := self._waiting.pop(self.next_index, None)) is not None:
            self._write(ready)
            self.next_index += 1

    def close(self, total_bytes: int) -> None:
        """Finish the shards; UserError when there is nothing in them."""
        totals = self.summary.keys
        if not any(total.documents for total in totals.values()):
            empty = sum(total.empty for total in totals.values())
            raise UserError(
                f"--input {' '.join(self.options.inputs)}: no document with text ({total_bytes} "
                f"bytes read, {empty} empty documents, {self.summary.num_skipped} skipped); "
                "nothing was written, check file and --json-keys"
            )
        for key, writer in zip(totals, self.writers, strict=True):
            sidecar = build_sidecar(
                key,
                totals[key],
                self.dtype,
                self.options.settings.append_eod,
                self.tokenizer,
                self.sources,
            )
            writer.close(sidecar)
        self.summary.outputs = self.prefixes
        if self.summary.num_skipped or self.summary.num_repaired:
            self.summary.problems_file = self._problems

    def position(self, block: Block) -> int:
        """Number of the first record of the next block in order."""
        return self.num_numbers if block.source == self.current and not block.files else 0

    def _write(self, done: Done) -> None:
        if done.block.source != self.current:
            self.current, self.num_numbers = done.block.source, 0
            self.sources.append(SourceRecord(self.current.path, self.current.size))
        self._list_problems(done)
        self.sources[-1].add(done.part.fingerprint, done.part.num_documents[0])
        arrays = read_arrays(done.path, done.part, self.dtype)
        for i, (lengths, tokens) in enumerate(arrays):
            self.writers[i].add_many(tokens, lengths)
        for i, total in enumerate(self.summary.keys.values()):
            total.documents += done.part.num_documents[i]
            total.empty += done.part.num_empty[i]
            total.tokens += done.part.num_tokens[i]
            total.bytes += done.part.num_bytes[i]
        self.num_numbers += done.part.num_numbers

    def _list_problems(self, done: Done) -> None:
        for what, problems in (("skipped", done.part.skipped), ("repaired", done.part.repaired)):
            for number, reason in problems:
                where = place(done.block, self.position(done.block) + number)
                with self._problems.open("a") as file:
                    file.write(json.dumps({"where": where, "what": what, "reason": reason}) + "\n")
                if self.summary.num_skipped + self.summary.num_repaired < 5:
                    logger.warning(f"{where}: {what}, {reason}")
                self.summary.num_skipped += what == "skipped"
                self.summary.num_repaired += what == "repaired"


@contextlib.contextmanager
def _located(joiner: _Joiner) -> Iterator[None]:
    """Name file and line in the errors of the workers."""
    try:
        yield
    except BadInput as error:
        bad = error.bad
        if bad.number < 0:
            raise UserError(bad.reason) from None
        where = place(bad.block, joiner.position(bad.block) + bad.number)
        raise UserError(
            f"{where}: {bad.reason}; mend it or use --on-error skip (--resume keeps what is done)"
        ) from None
    except WorkerError as error:
        first = joiner.position(error.block) if joiner.next_index else 0
        where = place(error.block, first + error.number)
        raise RuntimeError(f"{error} on {where}; --resume keeps what is done") from None


@contextlib.contextmanager
def _work_folder(options: PreprocessOptions) -> Iterator[Path]:
    """`{prefix}.parts`, held by one run at a time; emptied unless an earlier run is continued."""
    folder = Path(f"{options.output_prefix}.parts")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"--output-prefix {options.output_prefix}: another run is writing it now (lock in "
                f"{folder}); wait for it or choose another prefix"
            ) from None
        for path in folder.iterdir():
            if path.name != "lock" and (not options.resume or ".tmp-" in path.name):
                path.unlink()
        yield folder


def _sample(sources: Sequence[Source], options: PreprocessOptions) -> Iterator[str]:
    """The first texts of the input, as far as they can be read twice."""
    left = SAMPLE_CHARACTERS
    readable = [s for s in sources if s.path != STDIN and s.format != "hub"]
    for block in iterate_blocks(readable[:1], options.separator):
        for record in read_records(load_block(block, options.settings.keys), options.settings.keys):
            for text in record.texts:
                yield text[:left]
                left -= len(text)
            if left <= 0:
                return
        return
