"""The suites `loader` and `preprocess` at sizes of a unit test."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import numpy as np
import pytest

from megaparcae.bench import preprocess
from megaparcae.bench.megatron_way import PlainBuilder
from megaparcae.bench.options import PreprocessOptions
from megaparcae.bench.shards import made_up_lengths, write_sparse_shard
from megaparcae.data.indexed import IndexedDataset
from megaparcae.data.train_tokenizer import train_bpe

ROOT = Path(__file__).resolve().parents[2]


def test_loader_measures_both_packings_and_their_indices(tmp_path, monkeypatch, capsys):
    """Through the command line, so that options and JSON are those of a user."""
    sizes = {"sequence-length": 64, "rows": 4, "megabytes": 1, "mean-length": 50}
    sizes |= {"documents": 2000, "seconds": 0.01, "repeats": 1, "json": tmp_path / "found.json"}
    arguments = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    monkeypatch.setattr("sys.argv", ["benchmark.py", "loader", *arguments])
    runpy.run_path(str(ROOT / "tools" / "benchmark.py"), run_name="benchmark")["main"]()
    assert "memmap slices" in capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["options"]["documents"] == 2000
    reading = {row["variant"]: row for row in found["tables"]["reading"]}
    assert {"memmap slices", "concatenate", "best_fit, document ids"} <= set(reading)
    assert all(row["samples_per_second"] > 0 for row in reading.values())
    index = {row["variant"]: row for row in found["tables"]["index"]}
    assert index["cumsum"]["cumsums"] == 1
    assert index["best_fit"]["cumsums"] > 1
    assert index["best_fit"]["peak_megabytes"] > 0


def test_made_up_shards_are_shards(tmp_path):
    lengths = made_up_lengths(100, 30)
    assert lengths.min() >= 1
    assert write_sparse_shard(tmp_path / "s", lengths) == lengths.sum()
    shard = IndexedDataset(tmp_path / "s")
    np.testing.assert_array_equal(shard.lengths, lengths)
    assert not shard.get(99).any()


@pytest.mark.slow
def test_preprocess_compares_with_megatrons_way_and_the_files_are_the_same(tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text("".join(f'{{"text": "line {i} of the text"}}\n' for i in range(200)))
    train_bpe(iter(["line of the text"]), 262, tmp_path, show=False)
    options = PreprocessOptions(
        input=str(text), tokenizer_model=str(tmp_path), repeats=1, short_documents=50
    )
    tables = preprocess.run(options).tables
    assert [row["variant"] for row in tables["rates"][:2]] == ["Megatron's way", "ours"]
    assert {row["variant"] for row in tables["rates"]} >= {"bare tiktoken, lists"}
    assert all(row["peak_megabytes"] > 1 for row in tables["memory"])
    (result,) = tables["result"]
    assert result["identical_bin"] and result["identical_idx"]
    assert result["documents"] == 200


def test_the_plain_builder_writes_shards(tmp_path):
    builder = PlainBuilder(str(tmp_path / "s.bin"), np.uint16)
    builder.add_document([5, 6, 7], [3])
    builder.add_document([8], [1])
    builder.finalize(str(tmp_path / "s.idx"))
    shard = IndexedDataset(tmp_path / "s")
    assert [shard.get(i).tolist() for i in range(2)] == [[5, 6, 7], [8]]
