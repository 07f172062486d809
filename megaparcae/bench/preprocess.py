"""From text to a shard: our command, Megatron's way, and the bare tokenizer, in turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from megaparcae.bench.measure import Variant, in_processes, take_turns
from megaparcae.bench.options import PreprocessOptions
from megaparcae.bench.report import Report
from megaparcae.data.tokenizer import BPETokenizer, load_tokenizer
from megaparcae.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
LOOK_EVERY_S = 0.05
"""How often memory is looked at."""
OURS, STARTED, THEIRS = "ours", "ours, without its start", "Megatron's way"


def run(options: PreprocessOptions) -> Report:
    """Tables `rates`, `memory`, `start` and `result`."""
    with tempfile.TemporaryDirectory(prefix="bench-preprocess-") as name:
        folder = Path(name)
        assert options.input is not None
        text = _beginning(Path(options.input), folder / "text.jsonl", options.megabytes * 10**6)
        job = Job(text, folder, options)
        tables = {
            "rates": rates(job),
            "start": start(job),
            "memory": memory(job),
            "result": result(job),
        }
    return Report("preprocess", options, tables)


@dataclass(frozen=True)
class Job:
    """The text and where things go."""

    text: Path
    folder: Path
    options: PreprocessOptions

    def ours(self, text: Path | None = None) -> list[str]:
        """Our whole command."""
        tool = str(ROOT / "tools" / "preprocess_data.py")
        return [sys.executable, tool, "--quiet", *self._arguments("ours", text or self.text)]

    def theirs(self) -> list[str]:
        """The stand-in's."""
        module = "megaparcae.bench.megatron_way"
        return [sys.executable, "-m", module, *self._arguments("theirs", self.text)]

    def _arguments(self, name: str, text: Path) -> list[str]:
        return [
            *("--input", str(text), "--output-prefix", str(self.folder / name), "--append-eod"),
            *("--tokenizer-model", str(self.options.tokenizer_model)),
            *("--workers", str(self.options.workers)),
        ]


def rates(job: Job) -> list[dict[str, Any]]:
    """MB/s of text. Ours is the whole command, and that less the time for one document, since the
    others are taken without imports and loading. Engines: as many processes as workers, each with
    its share of the texts in memory, nothing but encoding.
    """

    one = _one_document(job)

    def theirs() -> float:
        _run(job.theirs())
        return float(json.loads((job.folder / "theirs.times.json").read_text())["seconds"])

    variants: dict[str, Variant] = {
        THEIRS: theirs,
        OURS: lambda: _run(job.ours()),
        STARTED: lambda: max(_run(job.ours()) - _run(job.ours(one)), 0.001),
        **{name: _bare(job, name) for name in _engines(job)},
    }
    timings = take_turns(variants, job.options.repeats, warmups=0)
    amount = sum(len(text.encode()) for text in _texts(job.text)) / 1e6
    table = timings.rows(THEIRS, megabytes=amount)
    for row in table:
        row["ours_over_this"] = timings.speedup(OURS, row["variant"]).median
        row["started_over_this"] = timings.speedup(STARTED, row["variant"]).median
    return table


def start(job: Job) -> list[dict[str, Any]]:
    """Seconds of our command on one document."""
    one = _one_document(job)
    timings = take_turns({OURS: lambda: _run(job.ours(one))}, job.options.repeats)
    return [{"variant": OURS, "seconds": timings.median(OURS), "spread": timings.spread(OURS)}]


def memory(job: Job) -> list[dict[str, Any]]:
    """Largest memory of all processes of a command together, shared pages counted once."""
    table = [
        {"variant": OURS, "input": "the text", "peak_megabytes": _peak_memory(job.ours()) / 1e6},
        {
            "variant": THEIRS,
            "input": "the text",
            "peak_megabytes": _peak_memory(job.theirs()) / 1e6,
        },
    ]
    count = job.options.short_documents
    if count:
        path = job.folder / "short.jsonl"
        with path.open("w") as file:
            file.writelines(
                f'{{"text": "document {i} of {count}, a line"}}\n' for i in range(count)
            )
        peak = _peak_memory(job.ours(path)) / 1e6
        table.append({"variant": OURS, "input": f"{count:,} lines", "peak_megabytes": peak})
        _run(job.ours())  # the shard of the text again, for the comparison of files
    return table


def result(job: Job) -> list[dict[str, Any]]:
    """What both wrote; the files must be the same, byte for byte."""
    prefixes = [job.folder / f"{name}_text_document" for name in ("ours", "theirs")]
    files = [[Path(f"{p}{end}").read_bytes() for p in prefixes] for end in (".bin", ".idx")]
    assert job.options.tokenizer_model is not None
    tokenizer = load_tokenizer(job.options.tokenizer_model)
    sidecar = json.loads(Path(f"{prefixes[0]}.json").read_text())
    num_bytes = sum(len(text.encode()) for text in _texts(job.text))
    return [
        {
            "identical_bin": files[0][0] == files[0][1],
            "identical_idx": files[1][0] == files[1][1],
            "builder": json.loads((job.folder / "theirs.times.json").read_text())["builder"],
            "engine": tokenizer.engine,
            "documents": sidecar["documents"],
            "tokens": sidecar["tokens"],
            "text_bytes_per_token": num_bytes / sidecar["tokens"],
        }
    ]


def _one_document(job: Job) -> Path:
    path = job.folder / "one.jsonl"
    path.write_text(json.dumps({"text": "One document."}) + "\n")
    return path


def _engines(job: Job) -> list[str]:
    """Ways to call the tokenizer's own library."""
    assert job.options.tokenizer_model is not None
    tokenizer = load_tokenizer(job.options.tokenizer_model)
    gigatoken = ["bare gigatoken"] if tokenizer.engine == "gigatoken" else []
    if not isinstance(tokenizer, BPETokenizer):
        return ["bare sentencepiece", *gigatoken]
    if tokenizer.encoding is None:
        return ["bare tokenizers", *gigatoken]
    return ["bare tiktoken, lists", "bare tiktoken, buffers", *gigatoken]


def _bare(job: Job, engine: str) -> Variant:
    """Seconds from the first process's start to the last one's end."""

    def measure() -> float:
        count = job.options.workers
        with tempfile.TemporaryDirectory(dir=job.folder) as meeting:
            arguments = [(job, engine, worker, count, Path(meeting)) for worker in range(count)]
            spans = in_processes(_encode_share, arguments)
        return max(end for _, end in spans) - min(begin for begin, _ in spans)

    return measure


def _encode_share(
    job: Job, engine: str, worker: int, count: int, meeting: Path
) -> tuple[float, float]:
    """Encode every count-th text; begin and end by the machine's clock."""
    assert job.options.tokenizer_model is not None
    encode = _encoder(load_tokenizer(job.options.tokenizer_model), engine)
    texts = _texts(job.text)[worker::count]
    (meeting / str(worker)).touch()
    while len(list(meeting.iterdir())) < count:  # all begin together
        time.sleep(0.001)
    begin = time.monotonic()
    for text in texts:
        encode(text)
    return begin, time.monotonic()


def _encoder(tokenizer: Any, engine: str) -> Callable[[str], Any]:
    match engine:
        case "bare tiktoken, lists":
            encode_ordinary: Callable[[str], Any] = tokenizer.encoding.encode_ordinary
            return encode_ordinary
        case "bare tiktoken, buffers":
            tokenizer.gigatoken = None
            return lambda text: tokenizer.encode_batch([text])
        case "bare gigatoken":
            gigatoken: Callable[[str], Any] = tokenizer.gigatoken
            return gigatoken
        case _:
            return lambda text: tokenizer.encode(text)


def _texts(path: Path) -> list[str]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def _beginning(source: Path, target: Path, num_bytes: int) -> Path:
    """The first lines of a file; all of them for 0."""
    written = 0
    with source.open("rb") as lines, target.open("wb") as out:
        for line in lines:
            if num_bytes and written >= num_bytes:
                break
            written += out.write(line)
    if not written:
        raise UserError(f"--input {source} is empty; give JSON lines with the text under `text`")
    return target


def _run(command: Sequence[str]) -> float:
    """Seconds of a whole command."""
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=_environment())
    _check(command, done.returncode, done.stderr)
    return time.perf_counter() - begin


def _peak_memory(command: Sequence[str]) -> int:
    """Bytes: proportional set sizes of the command and all it starts, as often as we look."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=_environment())
        peak = 0
        while process.poll() is None:
            peak = max(peak, _memory_now(process.pid))
            time.sleep(LOOK_EVERY_S)
        said.seek(0)
        _check(command, process.returncode, said.read())
    return peak


def _memory_now(pid: int) -> int:
    total = 0
    try:
        parent = psutil.Process(pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for one in family:
        try:
            total += one.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it has just ended
    return total


def _environment() -> dict[str, str]:
    """This checkout is found, installed or not."""
    return os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def _check(command: Sequence[str], code: int, said: str) -> None:
    if code:
        raise RuntimeError(f"{' '.join(command)} ended with {code}: {said.strip()[-300:]}")
