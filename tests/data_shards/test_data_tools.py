"""The real command lines: exit codes, one sentence, memory, imports, speed of --help."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from text_fixtures import ROOT, SAMPLE, command, lines

from megaparcae.data.indexed import IndexedDataset

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    done = command(
        "train_tokenizer.py", "--input", SAMPLE, "--vocab-size", 600, "--output", folder, "--quiet"
    )
    assert done.returncode == 0, done.stderr
    assert "600 ids" in done.stdout
    return folder


def preprocess(tokenizer: Path, source: Path | str, prefix: Path, *more: object, **options):
    arguments = ["--input", source, "--output-prefix", prefix, "--tokenizer-model", tokenizer]
    return command("preprocess_data.py", *arguments, "--workers", 2, *more, **options)


@pytest.mark.parametrize("tool", ["train_tokenizer.py", "preprocess_data.py", "inspect_data.py"])
def test_help_is_fast(tool: str) -> None:
    start = time.monotonic()
    assert command(tool, "--help").returncode == 0
    assert time.monotonic() - start < 2


def test_the_summary_says_what_was_done(tokenizer: Path, tmp_path: Path) -> None:
    done = preprocess(tokenizer, SAMPLE, tmp_path / "out", "--append-eod")
    assert done.returncode == 0, done.stderr
    assert "102 documents, 0 empty" in done.stdout and "bytes/token" in done.stdout
    assert "MB/s with tiktoken" in done.stdout


def test_only_what_is_needed_is_imported(tokenizer: Path, tmp_path: Path) -> None:
    arguments = ["--input", SAMPLE, "--output-prefix", tmp_path / "out", "--workers", 1]
    tool = [ROOT / "tools" / "preprocess_data.py", *arguments, "--tokenizer-model", tokenizer]
    command = [sys.executable, "-X", "importtime", *map(str, tool)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert {"numpy", "tokenizers", "tiktoken"} <= imported
    heavy = {"torch", "transformers", "datasets", "pyarrow", "sentencepiece", "zstandard"}
    assert not imported & heavy


def test_users_mistakes_are_one_sentence_and_exit_code_2(tokenizer: Path, tmp_path: Path) -> None:
    bad = lines(tmp_path, *[{"text": "x"}] * 6, b"{")
    (tmp_path / "file").touch()
    cases = [
        preprocess(tokenizer, tmp_path / "missing.jsonl", tmp_path / "out"),
        preprocess(tokenizer, bad, tmp_path / "out"),
        preprocess(tokenizer, SAMPLE, tmp_path / "out", "--json-keys", "body"),
        preprocess(tokenizer, SAMPLE, tmp_path / "file" / "out"),
        preprocess(tmp_path / "nothing", SAMPLE, tmp_path / "out"),
        preprocess(tokenizer, SAMPLE, tmp_path / "out", "--tokenizer-type", "sentencepiece"),
    ]
    for done in cases:
        assert done.returncode == 2
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert not list(tmp_path.glob("out_*"))
    assert "c.jsonl, line 7: not JSON" in cases[1].stderr


def test_a_full_disk_is_one_sentence_and_exit_code_1(tokenizer: Path, tmp_path: Path) -> None:
    def limit() -> None:  # a file-size limit fails in write as a full disk does
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))

    done = preprocess(tokenizer, SAMPLE, tmp_path / "out", preexec_fn=limit)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert "File too large" in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.glob("out_*"))


def test_many_short_documents_from_a_pipe_in_bounded_memory(
    tokenizer: Path, tmp_path: Path
) -> None:
    number = 400_000
    line = json.dumps({"text": "to be or not"}) + "\n"
    feed = f"import sys\nfor i in range({number // 1000}): sys.stdout.write({line!r} * 1000)"
    source = subprocess.Popen([sys.executable, "-c", feed], stdout=subprocess.PIPE)

    address_space = "-v 1500000"  # KiB
    out = tmp_path / "out"
    done = preprocess(tokenizer, "-", out, stdin=source.stdout, limit=address_space)
    source.wait()
    assert done.returncode == 0, done.stderr
    assert f"{number:,} documents" in done.stdout and "peak memory" in done.stdout
    assert IndexedDataset(tmp_path / "out_text_document").num_documents == number
    words = done.stdout.replace(",", " ").split()
    peak, worker = [int(word) for word in words if word.isdigit()][-2:]
    assert peak + 2 * worker < 500


def test_an_interrupted_run_says_so_and_leaves_no_workers(tokenizer: Path, tmp_path: Path) -> None:
    source = tmp_path / "c.jsonl"
    source.write_bytes(SAMPLE.read_bytes() * 200)
    arguments = [sys.executable, ROOT / "tools" / "preprocess_data.py", "--input", source]
    arguments += ["--output-prefix", tmp_path / "out", "--tokenizer-model", tokenizer]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(arguments, env=environment, stderr=subprocess.PIPE, text=True)
    time.sleep(0.8)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 130 and "interrupted" in errors and "Traceback" not in errors
