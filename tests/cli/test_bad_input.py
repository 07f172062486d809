"""Bad text, folders and disks: one sentence, the right exit code, nothing half-written.

Wrong options of a run are in test_training.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from command_lines import files_below, only_error, tool, write_lines
from training_runs import finish, make_shard, start

pytestmark = pytest.mark.slow

GOOD = [{"text": "It was the best of times, it was the worst of times."}] * 6


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return make_shard(tmp_path_factory.mktemp("shard"))


@pytest.fixture
def tokenizer(options: dict[str, object]) -> Path:
    return Path(str(options["data.tokenizer"]))


def preprocess(tokenizer: Path, source: Path, folder: Path, *more: object):
    prefix = ("--output-prefix", folder / "s")
    arguments = ("--input", source, *prefix, "--tokenizer-model", tokenizer, "--append-eod")
    return tool("preprocess_data.py", *arguments, *more)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (None, "text.jsonl does not exist"),
        ([*GOOD, "not json"], "text.jsonl, line 7: not JSON"),
        ([{"body": "x"}], "line 1: no key 'text' (its keys: body)"),
        ([], "no document with text"),
    ],
)
def test_text_that_cannot_become_a_shard(tokenizer, tmp_path, records, message):
    source = tmp_path / "text.jsonl"
    if records is not None:
        write_lines(source, records)
    done = preprocess(tokenizer, source, tmp_path / "out")
    assert done.returncode == 2, done.stderr
    assert message in only_error(done.stderr)
    assert files_below(tmp_path) <= {"text.jsonl"}


def test_a_tokenizer_without_an_end_of_text_token(tokenizer, tmp_path):
    changed = tmp_path / "tokenizer"
    shutil.copytree(tokenizer, changed)
    (changed / "tokenizer_config.json").unlink()
    path = changed / "tokenizer.json"
    tree = json.loads(path.read_text())
    tree["added_tokens"] = []
    tree["model"]["vocab"] = {
        token.replace("<|eos|>", "other"): i for token, i in tree["model"]["vocab"].items()
    }
    path.write_text(json.dumps(tree))
    done = preprocess(changed, write_lines(tmp_path / "text.jsonl", GOOD), tmp_path / "out")
    assert done.returncode == 2, done.stderr
    assert "--append-eod" in only_error(done.stderr)
    assert not files_below(tmp_path / "out")


def test_a_vocabulary_larger_than_the_dtype(tmp_path):
    from tokenizers import Tokenizer, models

    vocabulary = {f"w{i}": i for i in range(70_000)} | {"<|eos|>": 70_000}
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    made.add_special_tokens(["<|eos|>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|eos|>"}')
    source = write_lines(tmp_path / "text.jsonl", GOOD)
    done = preprocess(folder, source, tmp_path / "out", "--dtype", "uint16")
    assert done.returncode == 2, done.stderr
    assert "uint16" in only_error(done.stderr)
    assert not files_below(tmp_path / "out")


def test_a_folder_that_cannot_be_written(tokenizer, tmp_path):
    source = write_lines(tmp_path / "text.jsonl", GOOD)
    (tmp_path / "file").touch()
    for done in (
        preprocess(tokenizer, source, tmp_path / "file"),
        tool(
            *("train_tokenizer.py", "--input", source),
            *("--vocab-size", 300, "--output", tmp_path / "file" / "t"),
        ),
    ):
        assert done.returncode == 2, done.stderr
        assert str(tmp_path / "file") in only_error(done.stderr)
    assert files_below(tmp_path) == {"text.jsonl", "file"}


@pytest.fixture
def small_disk(tmp_path: Path):
    """A disk of 1 MB, where the machine allows to mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_ends_preprocessing_with_code_1(tokenizer, small_disk, tmp_path):
    source = write_lines(tmp_path / "text.jsonl", [{"text": "some words " * 200}] * 1000)
    done = preprocess(tokenizer, source, small_disk)
    assert done.returncode == 1, done.stderr
    assert "No space left" in only_error(done.stderr)
    assert not {name for name in files_below(small_disk) if name.endswith((".bin", ".idx"))}


def test_a_disk_too_small_for_the_first_checkpoint_ends_training_with_code_1(options, small_disk):
    wide = {"model.hidden_size": 128, "model.intermediate_size": 256}
    codes, said = finish(start({**options, **wide, "checkpoint.dir": small_disk}))
    assert codes == [1], said
    assert "MB free" in only_error(said)
    assert not list(small_disk.glob("step_*"))
