"""Traced steps: the same numbers, a trace of every rank, and a page that adds up."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny import SyntheticRows, merged, tiny_config
from torch.autograd.profiler_util import Kernel
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

from harness import run_ranks
from megaparcae.config.load import build_config
from megaparcae.engine.distributed import Process
from megaparcae.log import read_records
from megaparcae.train.build import build_run
from megaparcae.train.profile import PARTS, Owner, innermost, measure, overlap
from megaparcae.train.profile import merged as union
from megaparcae.train.trainer import Trainer

SHORT: dict[str, Any] = {
    "train": {"num_steps": 4, "global_batch_size": 4, "micro_batch_size": 2},
    "checkpoint": {"interval": 0},
    "log": {"interval": 0, "health_interval": 0},
    "validation": {"interval": 0},
}


def train(folder: str, changes: dict[str, Any]) -> list[str]:
    """A whole run on this rank; methods that are still replaced at its end."""
    changes = merged(merged(SHORT, {"checkpoint": {"dir": folder}}), changes)
    config = tiny_config(changes)
    process = Process(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    run = build_run(config, process)
    Trainer(run, SyntheticRows(), None).train()  # type: ignore[arg-type]
    owners = [run.model, run.engine.optimizer, getattr(run.model, "core", None)]
    names = ("embed", "run_stored_block", "finish", "step", "run_units", "enter_loop")
    return [name for owner in owners if owner is not None for name in names if name in vars(owner)]


def losses(folder: Path) -> list[float]:
    return [r["loss"] for r in read_records(folder / "log.jsonl") if r["kind"] == "step"]


def page(folder: Path) -> dict[str, tuple[float, float, float]]:
    """Part -> forward, backward and both in ms; the whole step under its own name."""
    text = (folder / "profile" / "summary.txt").read_text()
    rows = re.findall(r"^([a-z ]+?) +([\d.]+) +([\d.]+) +([\d.]+) +[\d.]+%", text, re.MULTILINE)
    found = {name: (float(a), float(b), float(c)) for name, a, b, c in rows}
    whole = re.search(r"^whole step +([\d.]+)$", text, re.MULTILINE)
    assert whole is not None, text
    return {**found, "whole step": (0.0, 0.0, float(whole[1]))}


@pytest.mark.parametrize("parallel", [{}, {"pp": 2}, {"zero_stage": 2}], ids=["dp", "pp", "zero2"])
def test_two_ranks_trace_a_step_and_train_as_without(tmp_path, parallel):
    changes = {"parallel": parallel, "profile": {"steps": [3]}}
    kept = run_ranks(train, 2, str(tmp_path), changes)
    assert kept[0] == kept[1] and set(kept[0]) <= {"step"}, "torch or DeepSpeed may wrap `step`"
    for rank in (0, 1):
        with gzip.open(tmp_path / "profile" / f"step_00000003_rank{rank}.json.gz") as file:
            names = {event["name"] for event in json.load(file)["traceEvents"]}
        assert "part: optimizer" in names
        assert any(name.startswith("gloo:") for name in names)
    parts = page(tmp_path)
    assert parts.keys() == {*PARTS, "whole step"}
    whole = parts["whole step"][2]
    assert sum(parts[name][2] for name in PARTS) == pytest.approx(whole, rel=0.01)
    for name in ("prelude", "loops with gradient", "coda", "loss"):
        forward, backward, _ = parts[name]
        assert forward > 0 and backward > 0, (name, parts)
    assert parts["loops without gradient"][0] > 0 == parts["loops without gradient"][1]
    assert parts["optimizer"][0] > 0 and parts["communication"][2] > 0


def test_a_trace_changes_no_number(tmp_path):
    run_ranks(train, 1, str(tmp_path / "traced"), {"profile": {"steps": [2, 3]}})
    run_ranks(train, 1, str(tmp_path / "plain"), {})
    assert losses(tmp_path / "traced") == losses(tmp_path / "plain")
    assert not (tmp_path / "plain" / "profile").exists()
    assert len(list((tmp_path / "traced" / "profile").glob("*.json.gz"))) == 2


def test_what_checkpointing_computes_again_is_backward_work_of_its_part():
    first, second = (torch.nn.Linear(4, 4) for _ in range(2))
    with profile(activities=[ProfilerActivity.CPU]) as trace, record_function("part: other"):
        with record_function("part: prelude"):
            x = first(torch.ones(3, 4))
        with record_function("part: coda"):
            y = checkpoint(lambda x: second(torch.nn.functional.silu(x)), x, use_reentrant=False)
        y.sum().backward()
    events = [e for e in trace.events() or [] if e.name.startswith("aten::silu")]
    owner = Owner(trace.events() or [])
    found = [owner.of(event) for event in sorted(events, key=lambda e: e.time_range.start)]
    assert found[0] == ("coda", False)
    assert found[1:] and set(found[1:]) == {("coda", True)}
    linear = [owner.of(e) for e in trace.events() or [] if e.name == "aten::addmm"]
    assert sorted(linear)[-1] == ("prelude", False)


def test_on_a_gpu_the_kernels_count_and_the_rest_is_other():
    linear = torch.nn.Linear(4, 4)
    with profile(activities=[ProfilerActivity.CPU]) as trace, record_function("part: other"):
        with record_function("part: coda"):
            y = linear(torch.ones(3, 4, requires_grad=True))
        y.sum().backward()
        torch.ones(3)
    events = trace.events() or []
    whole = measure(events).whole
    for name, kernel, milliseconds in (
        ("aten::addmm", "gemm", 0.5),
        ("aten::mm", "gemm", 0.25),
        ("aten::ones", "ncclDevKernel_AllReduce", 0.125),
    ):
        launched = [e for e in events if e.name == name][-1]
        launched.kernels.append(Kernel(kernel, 0, 1000 * milliseconds))
    times = measure(events)
    assert times.forward["coda"] == 0.5 and times.backward["coda"] == 0.25
    assert times.of("communication") == 0.125
    assert times.of("other") == max(0.0, whole - 0.875)


def test_a_transformer_has_no_loops(tmp_path):
    model = {"architecture": "transformer", "num_layers": 2}
    run_ranks(train, 1, str(tmp_path), {"model": model, "profile": {"steps": [2]}})
    parts = page(tmp_path)
    assert parts["loops with gradient"][2] == parts["coda"][2] == 0
    assert parts["prelude"][1] > 0 and parts["loss"][1] > 0


def test_a_step_that_the_run_does_not_make_is_refused():
    with pytest.raises(ValueError, match=r"profile.steps=\[5, 30\] goes beyond train.num_steps=20"):
        build_config({"profile": {"steps": [5, 30]}, "train": {"num_steps": 20}}, where="test")
    with pytest.raises(ValueError, match=r"profile.steps=0 must be at least 1"):
        build_config({"profile": {"steps": [0]}}, where="test")


def event(name: str, start: float, end: float) -> Any:
    return SimpleNamespace(
        name=name, is_async=False, time_range=SimpleNamespace(start=start, end=end)
    )


def test_nested_events_are_cut_into_the_time_of_the_innermost():
    outer, inner, leaf, next_one = (
        event("outer", 0, 10), event("inner", 2, 6), event("leaf", 2, 3), event("next", 12, 13)
    )  # fmt: skip
    pieces = [
        (e.name, begin, end)
        for e, begin, end in innermost([next_one, leaf, outer, inner])
        if end > begin
    ]
    assert pieces == [
        ("outer", 0, 2), ("leaf", 2, 3), ("inner", 3, 6), ("outer", 6, 10), ("next", 12, 13),
    ]  # fmt: skip


def test_overlaps_are_counted_once():
    intervals = union([(5, 7), (0, 2), (1, 3), (9, 12)])
    assert intervals == [(0, 3), (5, 7), (9, 12)]
    assert overlap(intervals, 2, 10) == 1 + 2 + 1
    assert overlap(intervals, 3, 5) == 0
