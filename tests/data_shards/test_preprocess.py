"""Text to shards: every input gives the same documents, and bad input says where it is bad."""

from __future__ import annotations

import gzip
import io
import json
import logging
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from text_fixtures import SAMPLE, CharacterTokenizer, documents, lines, run, texts_of, twenty

from megaparcae.data import blocks
from megaparcae.data.index_cache import IndexSpec, cached_index
from megaparcae.data.indexed import IndexedDataset
from megaparcae.data.split import DocumentSplit
from megaparcae.errors import UserError


def test_documents_are_tokenised_in_order_and_end_with_eod(tmp_path: Path) -> None:
    path, texts = twenty(tmp_path)
    summary = run(path, tmp_path / "out", append_eod=True)
    assert documents(tmp_path / "out") == [[*(b + 3 for b in t.encode()), 1] for t in texts]
    assert summary.keys["text"].documents == 20
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["c.jsonl", *(f"out_text_document.{s}" for s in ("bin", "idx", "json"))]
    sidecar = IndexedDataset(tmp_path / "out_text_document").sidecar
    assert sidecar is not None and sidecar["tokenizer"]["identity"] == "bytes"
    assert sidecar["text_bytes"] == sum(len(text) for text in texts)


@pytest.mark.parametrize("append_eod", [False, True])
def test_empty_documents_are_left_out_and_counted(tmp_path: Path, append_eod: bool) -> None:
    texts = ["", *"abcde", "", "   ", "x", ""]
    path = lines(tmp_path, *({"text": text} for text in texts))
    summary = run(path, tmp_path / "out", append_eod=append_eod)
    assert summary.keys["text"].empty == 3
    assert texts_of(tmp_path / "out") == [*"abcde", "   ", "x"]
    kept = run(path, tmp_path / "kept", append_eod=append_eod, keep_empty=True)
    assert kept.keys["text"].documents == 10
    assert documents(tmp_path / "kept")[0] == ([1] if append_eod else [])


def test_a_worker_that_dies_ends_the_run_with_cause_and_record(tmp_path: Path) -> None:
    path, _ = twenty(tmp_path)

    def die(text: str) -> None:
        if text.startswith("document 11"):
            os._exit(9)

    with pytest.raises(RuntimeError, match=r"exit code 9 on .*c\.jsonl, line 12"):
        run(path, tmp_path / "out", CharacterTokenizer(hook=die), num_workers=4)
    assert not list(tmp_path.glob("out_*"))

    def be_killed(text: str) -> None:
        if text.startswith("document 11"):
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RuntimeError, match=r"killed by SIGKILL.*line 12"):
        run(path, tmp_path / "out", CharacterTokenizer(hook=be_killed), num_workers=4)
    assert not list(tmp_path.glob("out_*"))


def test_a_failing_tokenizer_names_the_record(tmp_path: Path) -> None:
    path, _ = twenty(tmp_path)

    def fail(text: str) -> None:
        if text.startswith("document 3"):
            raise ValueError("cannot")

    with pytest.raises(RuntimeError, match=r"ValueError: cannot on .*line 4"):
        run(path, tmp_path / "out", CharacterTokenizer(hook=fail))


def test_append_eod_without_an_eod_token_is_refused(tmp_path: Path) -> None:
    path, _ = twenty(tmp_path)
    tokenizer = CharacterTokenizer(eos_id=None)
    with pytest.raises(UserError, match=r"--append-eod: tokenizer bytes has no end-of-text"):
        run(path, tmp_path / "out", tokenizer, append_eod=True)
    assert run(path, tmp_path / "out", tokenizer).keys["text"].documents == 20


@pytest.mark.parametrize("num_documents, num_workers", [(3, 8), (1, 2)])
def test_more_workers_than_documents(tmp_path: Path, num_documents: int, num_workers: int) -> None:
    path = lines(tmp_path, *({"text": "x" * (i + 1)} for i in range(num_documents)))
    run(path, tmp_path / "out", num_workers=num_workers)
    assert texts_of(tmp_path / "out") == ["x" * (i + 1) for i in range(num_documents)]


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n'])
def test_an_empty_corpus_is_a_clear_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "c.jsonl").write_text(content)
    with pytest.raises(UserError, match=r"no document with text"):
        run(tmp_path / "c.jsonl", tmp_path / "out")
    assert not list(tmp_path.glob("out_*"))


def test_broken_characters_are_replaced_and_counted(tmp_path: Path) -> None:
    path = lines(
        tmp_path,
        b'\xef\xbb\xbf{"text": "after a BOM"}',
        b'{"text": "carriage return"}\r',
        b'{"text": "a nul \\u0000 inside"}',
        b'{"text": "bad \xff byte"}',
        b'{"text": "ok \\ud800 bad"}',
        b'{"text": "pair \\ud83d\\ude00"}',
        '{"text": "emoji 🤖"}'.encode(),
    )
    summary = run(path, tmp_path / "out")
    assert texts_of(tmp_path / "out") == [
        "after a BOM",
        "carriage return",
        "a nul \0 inside",
        "bad \ufffd byte",
        "ok \ufffd bad",
        "pair 😀",
        "emoji 🤖",
    ]
    assert summary.num_repaired == 2
    assert summary.problems_file is not None
    listed = [json.loads(line) for line in summary.problems_file.read_text().splitlines()]
    assert [item["where"].split(", ")[1] for item in listed] == ["line 4", "line 5"]


def test_characters_cut_by_block_edges_stay_whole(tmp_path: Path, monkeypatch) -> None:
    texts = ["🤖é" * i for i in range(1, 60)]
    path = lines(tmp_path, *({"text": text} for text in texts))
    path.write_text("".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in texts))
    monkeypatch.setattr(blocks, "SMALLEST_BLOCK", 7)
    monkeypatch.setattr(blocks, "LARGEST_BLOCK", 7)
    run(path, tmp_path / "out")
    assert texts_of(tmp_path / "out") == texts
    with gzip.open(tmp_path / "c.jsonl.gz", "wb") as file:
        file.write(path.read_bytes())
    run(tmp_path / "c.jsonl.gz", tmp_path / "zipped")
    assert texts_of(tmp_path / "zipped") == texts


@pytest.mark.parametrize(
    "line, reason",
    [
        (b"not json", "not JSON"),
        (b'{"text": "cut', "not JSON"),
        ([1], "not a JSON object"),
        ({"body": "x"}, "no key 'text' .its keys: body."),
        ({"text": None}, "key 'text' holds null, not text"),
        ({"text": ["a"]}, "key 'text' holds a list"),
        (b'{"text": "raw \x00 nul"}', "not JSON"),
    ],
)
def test_bad_lines_stop_or_are_skipped(tmp_path: Path, line: object, reason: str) -> None:
    good = {"text": "good"}
    path = lines(tmp_path, *[good] * 6, line, good)
    with pytest.raises(UserError, match=rf"c\.jsonl, line 7: {reason}"):
        run(path, tmp_path / "out")
    assert not list(tmp_path.glob("out_*"))
    summary = run(path, tmp_path / "out", skip_errors=True)
    assert summary.num_skipped == 1 and len(documents(tmp_path / "out")) == 7


def test_the_line_number_counts_earlier_blocks(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(blocks, "SMALLEST_BLOCK", 50)
    monkeypatch.setattr(blocks, "LARGEST_BLOCK", 50)
    path = lines(tmp_path, *[{"text": "good"}] * 30, b"", b"{", {"text": "x"}, b"[")
    for _ in range(3):
        with pytest.raises(UserError, match=r"line 32: not JSON"):
            run(path, tmp_path / "out", num_workers=3)


def test_ids_beyond_the_dtype_are_never_wrapped(tmp_path: Path) -> None:
    path = lines(tmp_path, {"text": "x"})
    big = CharacterTokenizer(vocab_size=70000, hook=lambda text: [65535, 65536, 69999])
    run(path, tmp_path / "out", big)
    assert documents(tmp_path / "out") == [[65535, 65536, 69999]]
    with pytest.raises(UserError, match=r"--dtype=uint16 holds ids up to 65535.*70000 ids"):
        run(path, tmp_path / "out", big, dtype="uint16")
    liar = CharacterTokenizer(vocab_size=300, hook=lambda text: [300])
    with pytest.raises(UserError, match=r"gave id 300 but reports a vocabulary of 300"):
        run(path, tmp_path / "out", liar)
    edge = CharacterTokenizer(vocab_size=65536, hook=lambda text: [65535])
    run(path, tmp_path / "forced", edge, dtype="uint16")
    assert documents(tmp_path / "forced") == [[65535]]
    assert IndexedDataset(tmp_path / "forced_text_document").dtype.name == "uint16"


def test_several_keys_give_a_shard_each(tmp_path: Path) -> None:
    path = lines(tmp_path, {"a": "one", "b": "two"}, {"a": "", "b": "four"})
    summary = run(path, tmp_path / "out", keys=("a", "b"))
    assert texts_of(tmp_path / "out", "a") == ["one"]
    assert texts_of(tmp_path / "out", "b") == ["two", "four"]
    assert summary.keys["a"].empty == 1


def write_inputs(folder: Path, texts: list[str]) -> dict[str, str]:
    """The same documents in every kind of input."""
    plain = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (folder / "in.jsonl").write_bytes(plain)
    with gzip.open(folder / "in.jsonl.gz", "wb") as file:  # two members
        file.write(plain[:100])
    with gzip.open(folder / "in.jsonl.gz", "ab") as file:
        file.write(plain[100:])
    (folder / "files").mkdir()
    for i, text in enumerate(texts):
        (folder / "files" / f"{i:02}.txt").write_text(text)
    (folder / "joined.txt").write_text("\n==\n".join(texts) + "\n==\n")
    kinds = {"jsonl": "in.jsonl", "gz": "in.jsonl.gz", "folder": "files", "glob": "files/*.txt"}
    return {kind: str(folder / name) for kind, name in kinds.items()}


@pytest.mark.parametrize("kind", ["jsonl", "gz", "folder", "glob"])
def test_every_input_gives_the_same_documents(tmp_path: Path, kind: str) -> None:
    _, texts = twenty(tmp_path)
    paths = write_inputs(tmp_path, texts)
    run(paths[kind], tmp_path / "out")
    assert texts_of(tmp_path / "out") == texts


def test_a_separator_divides_a_text_file(tmp_path: Path, monkeypatch) -> None:
    _, texts = twenty(tmp_path)
    write_inputs(tmp_path, texts)
    monkeypatch.setattr(blocks, "SMALLEST_BLOCK", 1001)
    run(tmp_path / "joined.txt", tmp_path / "out", separator=b"\n==\n")
    assert texts_of(tmp_path / "out") == texts


def test_zstandard(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    path, texts = twenty(tmp_path)
    packed = zstandard.ZstdCompressor().compress(path.read_bytes())
    (tmp_path / "c.jsonl.zst").write_bytes(packed)
    run(tmp_path / "c.jsonl.zst", tmp_path / "out")
    assert texts_of(tmp_path / "out") == texts
    (tmp_path / "cut.jsonl.zst").write_bytes(b"not zstandard at all")
    with pytest.raises(UserError, match=r"cut\.jsonl\.zst: cannot be decompressed"):
        run(tmp_path / "cut.jsonl.zst", tmp_path / "out2")


def test_parquet_row_groups(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    _, texts = twenty(tmp_path)
    table = pyarrow.table({"text": texts, "id": list(range(20))})
    parquet.write_table(table, tmp_path / "c.parquet", row_group_size=6)
    run(tmp_path / "c.parquet", tmp_path / "out")
    assert texts_of(tmp_path / "out") == texts
    with pytest.raises(UserError, match=r"--json-keys body: .* no such column .*text, id"):
        run(tmp_path / "c.parquet", tmp_path / "out2", keys=("body",))
    (tmp_path / "bad.parquet").write_bytes(b"nothing of the kind")
    with pytest.raises(UserError, match=r"bad\.parquet: not a parquet file"):
        run(tmp_path / "bad.parquet", tmp_path / "out2")


def test_broken_characters_in_parquet_are_replaced_and_counted(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    raw = [b"good", b"bad \xff byte", "naïve".encode(), None]
    data, offsets = b"".join(one or b"" for one in raw), [0, 4, 14, 20, 20]
    buffers = [pyarrow.py_buffer(part) for part in (b"\x07", np.int32(offsets).tobytes(), data)]
    column = pyarrow.Array.from_buffers(pyarrow.string(), 4, buffers)
    binary = pyarrow.array(raw, pyarrow.binary())
    encoded = pyarrow.array(["a", "b", "a", None]).dictionary_encode()
    table = pyarrow.table({"text": column, "raw": binary, "encoded": encoded})
    parquet.write_table(table, tmp_path / "c.parquet", row_group_size=3)
    with pytest.raises(UserError, match=r"c\.parquet, row 4: key 'text' holds null"):
        run(tmp_path / "c.parquet", tmp_path / "out")
    keys = ("text", "raw", "encoded")
    summary = run(tmp_path / "c.parquet", tmp_path / "out", keys=keys, skip_errors=True)
    for key in keys[:2]:
        assert texts_of(tmp_path / "out", key) == ["good", "bad \ufffd byte", "naïve"]
    assert texts_of(tmp_path / "out", "encoded") == ["a", "b", "a"]
    assert summary.num_repaired == summary.num_skipped == 1
    assert summary.problems_file is not None
    listed = [json.loads(line) for line in summary.problems_file.read_text().splitlines()]
    assert sorted(item["where"].split(", ")[1] for item in listed) == ["row 2", "row 4"]
    assert any("0xff" in item["reason"] for item in listed)


def test_a_dataset_by_name_is_streamed(tmp_path: Path, monkeypatch) -> None:
    datasets = pytest.importorskip("datasets")
    path, texts = twenty(tmp_path)
    monkeypatch.setattr(blocks, "SMALLEST_BLOCK", 2000)
    (tmp_path / "folder").mkdir()
    path.rename(tmp_path / "folder" / "train.jsonl")  # a folder stands for a name of the hub
    run(f"hf:{tmp_path / 'folder'}", tmp_path / "out")
    assert texts_of(tmp_path / "out") == texts
    with pytest.raises(UserError, match=r"hf:.*folder::test: .*check name and network"):
        run(f"hf:{tmp_path / 'folder'}::test", tmp_path / "out2")

    def torn(*_: object, **__: object) -> Iterator[dict[str, str]]:
        yield from ({"text": text} for text in texts[:12])
        raise ConnectionError("the network is gone")

    monkeypatch.setattr(datasets, "load_dataset", torn)
    with pytest.raises(UserError, match=r"hf:name, after 12 rows: ConnectionError: the network"):
        run("hf:name", tmp_path / "out2")
    assert not list(tmp_path.glob("out2_*")) and list(tmp_path.glob("out2.parts/*.part"))


def test_a_dataset_saved_by_hugging_face(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    _, texts = twenty(tmp_path)
    dataset = datasets.Dataset.from_dict({"text": texts})
    dataset.save_to_disk(str(tmp_path / "one"), num_shards=3)
    run(tmp_path / "one", tmp_path / "out")
    assert texts_of(tmp_path / "out") == texts
    datasets.DatasetDict({"train": dataset}).save_to_disk(str(tmp_path / "many"))
    run(tmp_path / "many", tmp_path / "out2")
    assert texts_of(tmp_path / "out2") == texts
    with pytest.raises(UserError, match=r"--split test: .* has the splits train"):
        run(tmp_path / "many", tmp_path / "out3", split="test")


def test_stdin(tmp_path: Path, monkeypatch) -> None:
    path, texts = twenty(tmp_path)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
    run("-", tmp_path / "out")
    assert texts_of(tmp_path / "out") == texts


def test_a_damaged_gz_is_named(tmp_path: Path) -> None:
    path, _ = twenty(tmp_path)
    packed = gzip.compress(path.read_bytes())
    (tmp_path / "c.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(UserError, match=r"c\.jsonl\.gz: cannot be decompressed"):
        run(tmp_path / "c.jsonl.gz", tmp_path / "out")
    assert not list(tmp_path.glob("out_*"))


def test_missing_and_unknown_inputs_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing\.jsonl does not exist"):
        run(tmp_path / "nothing.jsonl", tmp_path / "out")
    (tmp_path / "c.doc").touch()
    with pytest.raises(UserError, match=r"c\.doc: unknown kind of file"):
        run(tmp_path / "c.doc", tmp_path / "out")
    with pytest.raises(UserError, match=r"no readable file found"):
        run(tmp_path / "*.jsonl", tmp_path / "out")
    with pytest.raises(UserError, match=r"--workers=0 must be at least 1"):
        run(twenty(tmp_path)[0], tmp_path / "out", num_workers=0)


def test_resume_keeps_finished_blocks_of_moved_files(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(blocks, "SMALLEST_BLOCK", 2000)
    path, texts = twenty(tmp_path)
    seen = tmp_path / "seen"

    def note(text: str) -> None:
        with seen.open("a") as file:
            file.write("x\n")
        if text == texts[15] and not (tmp_path / "go").exists():
            time.sleep(0.3)
            os._exit(1)

    tokenizer = CharacterTokenizer(hook=note)
    with pytest.raises(RuntimeError):
        run(path, tmp_path / "out", tokenizer)
    first = len(seen.read_text().splitlines())
    path = path.rename(tmp_path / "moved.jsonl")
    (tmp_path / "go").touch()
    seen.unlink()
    run(path, tmp_path / "out", tokenizer, resume=True)
    assert texts_of(tmp_path / "out") == texts
    again = len(seen.read_text().splitlines())
    assert first > 10 and again < 12
    run(path, tmp_path / "straight")
    for suffix in ("bin", "idx"):
        a, b = (tmp_path / f"{name}_text_document.{suffix}" for name in ("out", "straight"))
        assert a.read_bytes() == b.read_bytes()


def test_kill_9_at_20_random_moments_then_resume_gives_the_same_bytes(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(blocks, "SMALLEST_BLOCK", 50_000)
    monkeypatch.setattr(blocks, "LARGEST_BLOCK", 50_000)
    source = tmp_path / "c.jsonl"
    source.write_bytes(SAMPLE.read_bytes() * 8)
    begin = time.monotonic()
    run(source, tmp_path / "whole", append_eod=True)
    duration = time.monotonic() - begin
    moments = random.Random(7)
    killed = 0
    while killed < 20:
        pid = os.fork()
        if pid == 0:
            try:
                run(source, tmp_path / "out", append_eod=True, resume=True)
                os._exit(0)
            finally:
                os._exit(1)
        time.sleep(moments.uniform(0, 1) * duration)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert status in (0, signal.SIGKILL)
        killed += status == signal.SIGKILL
        index = tmp_path / "out_text_document.idx"
        if index.exists():  # what has the name is whole; begin anew
            IndexedDataset(tmp_path / "out_text_document")
            index.unlink()
    run(source, tmp_path / "out", append_eod=True, resume=True)
    for suffix in ("bin", "idx"):
        a, b = (tmp_path / f"{name}_text_document.{suffix}" for name in ("out", "whole"))
        assert a.read_bytes() == b.read_bytes()
    assert not (tmp_path / "out.parts").exists() and not list(tmp_path.glob("*tmp*"))


def test_resume_with_other_settings_does_not_reuse_parts(tmp_path: Path) -> None:
    path = lines(tmp_path, {"text": "abc"}, b"{")
    with pytest.raises(UserError):
        run(path, tmp_path / "out")
    run(path, tmp_path / "out", append_eod=True, skip_errors=True, resume=True)
    assert documents(tmp_path / "out") == [[100, 101, 102, 1]]


def test_a_part_that_is_cut_short_is_made_again(tmp_path: Path) -> None:
    path = lines(tmp_path, {"text": "abc"}, {"text": "defg"})
    (tmp_path / "bad.jsonl").write_text("{")
    with pytest.raises(UserError):  # leaves the part of the first input
        run("", tmp_path / "out", inputs=(str(path), str(tmp_path / "bad.jsonl")), num_workers=1)
    (part,) = (tmp_path / "out.parts").glob("*.part")
    part.write_bytes(part.read_bytes()[:-2])
    run(path, tmp_path / "out", resume=True)
    assert texts_of(tmp_path / "out") == ["abc", "defg"]


def test_two_runs_on_one_prefix_are_refused(tmp_path: Path) -> None:
    path, _ = twenty(tmp_path)
    pid = os.fork()
    if pid == 0:
        run(path, tmp_path / "out", CharacterTokenizer(hook=lambda text: time.sleep(0.5)))
        os._exit(0)
    try:
        deadline = time.monotonic() + 10
        while not (tmp_path / "out.parts" / "lock").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.2)
        with pytest.raises(UserError, match=r"another run is writing it now"):
            run(path, tmp_path / "out")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_text_edited_in_place_and_preprocessed_again_gets_an_index_of_its_own(
    tmp_path: Path, caplog, monkeypatch
) -> None:
    monkeypatch.setattr(logging.getLogger("megaparcae"), "propagate", True)
    caplog.set_level(logging.INFO, "megaparcae")
    path, _ = twenty(tmp_path)
    spec = IndexSpec("concatenate", 16, True, DocumentSplit())
    for first, rebuilt in (("document 7", False), ("DOCUMENT 7", True)):
        path.write_text(path.read_text().replace("document 7", first))
        run(path, tmp_path / "out")
        caplog.clear()
        cached_index(IndexedDataset(tmp_path / "out_text_document"), spec)
        assert ("the one in the cache is for other data" in caplog.text) == rebuilt
        assert "building" in caplog.text
    caplog.clear()
    cached_index(IndexedDataset(tmp_path / "out_text_document"), replace(spec, sequence_length=64))
    assert "sequence_length was 16, is 64" in caplog.text


def test_a_shard_edited_in_place_is_refused_for_its_record(tmp_path: Path) -> None:
    path, _ = twenty(tmp_path)
    run(path, tmp_path / "out")
    with (tmp_path / "out_text_document.bin").open("r+b") as file:
        file.seek(400)
        file.write(b"\1\2")
    with pytest.raises(
        UserError, match=r"out_text_document\.bin is not the file .* preprocess again"
    ):
        IndexedDataset(tmp_path / "out_text_document")
