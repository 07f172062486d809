"""The suites `optimizer`, `pipeline` and `checkpoint` at the size of a unit test."""

from __future__ import annotations

import pytest

from megaparcae.bench import checkpoint, optimizer, pipeline
from megaparcae.bench.options import CheckpointOptions, OptimizerOptions, PipelineOptions

TINY = (
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_heads=2",
    "model.vocab_size=64",
    "train.device=cpu",
)


def test_a_sharded_optimizer_step_is_compared_and_keeps_half_of_the_states():
    options = OptimizerOptions(repeats=1, overrides=(*TINY, "optimizer.name=adamw"))
    tables = optimizer.run(options).tables
    whole, sharded = tables["step"]
    assert whole["of_whole"] == 1.0
    assert sharded["of_whole"] == pytest.approx(1 / sharded["speedup"])
    sizes = {(row["rank"], row["variant"]): row["megabytes"] for row in tables["states"]}
    everything = sizes[0, "every rank all of it"]
    assert everything == sizes[1, "every rank all of it"]
    assert sizes[0, "sharded"] + sizes[1, "sharded"] == pytest.approx(everything)


def test_a_real_pipeline_does_the_passes_of_the_simulated_one():
    layers = [f"model.num_{part}_layers=1" for part in ("prelude", "core", "coda")]
    options = PipelineOptions(
        overrides=(*layers, "model.recurrence.mean_recurrence=4", "train.device=cpu"),
        stages=2, micro_batches=3, rows=2, simulated_steps=2, real_steps=2,
    )  # fmt: skip
    tables = pipeline.run(options).tables
    ideal, wide, narrow, counted = (row["efficiency"] for row in tables["efficiency"])
    assert ideal == 0.75
    assert 0 < wide < ideal
    assert counted == pytest.approx(narrow)
    assert sum(row["layer_rows_grad"] for row in tables["counted"]) > 0
    assert [row["stage"] for row in tables["simulated"]] == [0, 1]


def test_saves_beside_the_training_are_compared_with_saves_it_waits_for(tmp_path):
    options = CheckpointOptions(repeats=1, overrides=TINY, dir=str(tmp_path), threads=1)
    tables = checkpoint.run(options).tables
    rows = {row["variant"]: row for row in tables["save"]}
    assert rows["save"]["of_save"] == 1.0
    assert all(row["megabytes_per_second"] > 0 for row in rows.values())
    (training,) = tables["training"]
    assert training["step_seconds"] > 0
    assert not list(tmp_path.iterdir())
