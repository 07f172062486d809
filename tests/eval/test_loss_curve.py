"""Loss curves of log.jsonl, and the unigram entropy that they are held against."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_batches.fake_shards import write_shard
from megaparcae.config.schema import DataConfig, DatasetConfig, RunConfig
from megaparcae.errors import UserError
from megaparcae.eval.curve import read_curve, terminal_chart, validation_table, write_picture
from megaparcae.eval.unigram import entropy, unigram_entropy


def write_log(folder: Path, *records: dict[str, object], tail: str = "") -> None:
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "log.jsonl").write_text(lines + tail)


def step(number: int, loss: float | None) -> dict[str, object]:
    return {"kind": "step", "step": number, "loss": loss}


def test_a_step_logged_twice_by_a_resumed_run_counts_once_and_a_torn_line_not_at_all(tmp_path):
    validation = {"kind": "validation", "step": 2, "loss": {"1": 3.5, "4": 3.25}}
    records = [step(1, 5.0), step(2, 4.0), step(3, None), step(2, 3.0), validation]
    write_log(tmp_path, *records, tail='{"kind": "st')
    curve = read_curve(tmp_path)
    assert curve.steps == {1: 5.0, 2: 3.0}
    assert curve.final_validation() == (2, {"1": 3.5, "4": 3.25})
    assert "T =  4  3.2500" in validation_table(curve, 6.0)


def test_the_chart_has_one_point_a_column_and_the_level_as_a_line(tmp_path):
    write_log(tmp_path, *(step(i, 8 / i) for i in range(1, 201)))
    lines = terminal_chart(read_curve(tmp_path), width=50, height=9, level=6.0).splitlines()
    assert len(lines) == 10
    assert sum(line.count("●") for line in lines) == 50
    assert sum("╌" in line for line in lines) == 1
    assert lines[-1].endswith("200")


def test_a_flat_curve_and_a_single_step_can_be_drawn(tmp_path):
    write_log(tmp_path, step(1, 2.0))
    assert "●" in terminal_chart(read_curve(tmp_path), level=None)


def test_the_picture_is_written(tmp_path):
    write_log(tmp_path, step(1, 2.0), {"kind": "validation", "step": 1, "loss": {"1": 2.5}})
    write_picture(read_curve(tmp_path), tmp_path / "a" / "loss.png", title="x", level=3.0)
    assert (tmp_path / "a" / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("log", [None, ""])
def test_a_run_without_steps_is_the_users_mistake(tmp_path, log):
    if log is not None:
        (tmp_path / "log.jsonl").write_text(log)
    with pytest.raises(UserError, match=r"log\.jsonl"):
        read_curve(tmp_path)


def test_entropy_of_equal_frequencies_is_the_log_of_their_number():
    assert entropy(np.array([5, 0, 5, 5, 5])) == pytest.approx(math.log(4))


def test_unigram_entropy_is_that_of_the_documents_held_out(tmp_path):
    train, held = (str(tmp_path / name) for name in ("train", "held"))
    write_shard(Path(train), [[7, 7, 7, 7]])
    write_shard(Path(held), [[1, 2], [3], [2, 9]])
    data = DataConfig(
        train=(DatasetConfig(prefix=train),), validation=(DatasetConfig(prefix=held),)
    )
    config = replace(RunConfig(), data=data)
    p = np.array([1, 2, 1, 1]) / 5
    assert unigram_entropy(config) == pytest.approx(float(-(p * np.log(p)).sum()))


def test_a_run_that_holds_nothing_out_is_told(tmp_path):
    prefix = str(tmp_path / "train")
    write_shard(Path(prefix), [[7, 7, 7, 7]])
    data = DataConfig(train=(DatasetConfig(prefix=prefix),), validation_fraction=0.0)
    with pytest.raises(UserError, match="holds no document out"):
        unigram_entropy(replace(RunConfig(), data=data))
