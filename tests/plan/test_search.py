"""Which layouts are legal, which fit, which is best, and what is said about the others."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from megaparcae.config.load import load_config, preset_config
from megaparcae.errors import UserError
from megaparcae.plan.machines import MACHINES, Cluster
from megaparcae.plan.report import plan_numbers
from megaparcae.plan.run import Plan, make_plan


def planned(preset: str, gpus: int, *options: str, machine: str = "h100", **how) -> Plan:
    cluster = Cluster(name=machine, machine=MACHINES[machine], gpus=gpus)
    arguments = {"tokens": None, "keep": 4, "as_is": False} | how
    return make_plan(preset_config(preset, options), cluster, **arguments)


@pytest.mark.parametrize("gpus", [1, 8, 4096])
def test_a_cluster_is_planned_in_ten_seconds(gpus):
    started = time.process_time()
    plan = planned("1p3b", gpus, keep=8)
    assert time.process_time() - started < 10
    assert plan.best.batch.world == gpus
    assert plan.best.memory.total <= plan.cluster.usable


def test_the_fastest_comes_first_and_everything_fits():
    plan = planned("370m", 16)
    times = [layout.time.total for layout in plan.ranking.best]
    assert times == sorted(times, key=lambda t: round(t, 4))
    assert all(x.memory.total <= plan.cluster.usable for x in plan.ranking.best)
    names = [layout.name for layout in plan.ranking.best]
    assert len(set(names)) == len(names)


def test_no_rejected_layout_is_faster_than_the_best():
    plan = planned("370m", 16, "optimizer.name=adamw")
    best = plan.best.time.total
    assert all(r.seconds is None or r.seconds >= best * 0.999 for r in plan.ranking.rejected)
    assert all(r.reason for r in plan.ranking.rejected)


def test_reasons_are_the_rules_that_training_uses():
    plan = planned("140m", 64, "train.global_batch_size=48", keep=1)
    reasons = {r.reason for r in plan.ranking.rejected}
    assert "model.num_heads=6 must be divisible by parallel.tp=4" in reasons
    assert "dp 64 does not divide the batch of 48 sequences" in reasons


def test_checkpointing_is_chosen_when_memory_is_short():
    roomy = planned("370m", 1, machine="h200").best
    short = planned("770m", 1, "model.sequence_length=16384", machine="rtx4090").best
    assert roomy.config.parallel.recompute_core == roomy.config.parallel.recompute_coda == "none"
    parallel = short.config.parallel
    assert {parallel.recompute_prelude, parallel.recompute_core} != {"none"}


def test_what_cannot_fit_is_refused_with_the_nearest_that_would():
    long = "model.sequence_length=16384"
    with pytest.raises(UserError) as refused:
        planned("1p3b", 1, long, machine="rtx4090")
    message = str(refused.value)
    assert "1p3b does not fit on 1 x rtx4090" in message
    gpus = int(message.split("--gpus=")[1].split()[0])
    machine = message.split("--machine=")[1].split()[0]
    assert planned("1p3b", gpus, long, machine="rtx4090").ranking.best
    assert planned("1p3b", 1, long, machine=machine).ranking.best


def test_gpus_that_no_layout_can_use_are_refused_with_a_number_that_works():
    config = preset_config("transformer_140m", ["train.global_batch_size=8"])
    cluster = Cluster(name="h100", machine=replace(MACHINES["h100"], per_node=16), gpus=13)
    with pytest.raises(UserError, match="use --gpus=") as refused:
        make_plan(config, cluster, tokens=None, keep=1, as_is=False)
    near = replace(cluster, gpus=int(str(refused.value).split("--gpus=")[1]))
    assert make_plan(config, near, tokens=None, keep=1, as_is=False).ranking.best


def test_the_written_run_is_accepted_and_has_the_planned_layout(tmp_path):
    plan = planned("370m", 16, tokens=1e9)
    path = tmp_path / "run.yaml"
    path.write_text(plan.run_yaml())
    config = load_config(path)
    assert config.parallel == plan.best.config.parallel
    assert config.train.micro_batch_size == plan.best.batch.micro_batch
    assert config.train.global_batch_size == 256
    tokens = config.train.num_steps * 256 * 2048
    assert 1e9 <= tokens < 1e9 + 256 * 2048
    assert config.model == preset_config("370m").model


def test_a_config_as_it_is_gets_its_own_figures():
    options = ("parallel.tp=2", "parallel.recompute_core=block")
    plan = planned("370m", 8, *options, as_is=True)
    assert [layout.name for layout in plan.ranking.best] == ["tp 2 pp 1 dp 4"]
    ranked = planned("370m", 8, *options)
    assert ranked.own is not None
    assert ranked.own.time.total == plan.best.time.total > ranked.best.time.total


def test_an_illegal_layout_is_refused_as_it_is():
    with pytest.raises(UserError, match="must divide the 2 GPUs of a node"):
        cluster = Cluster(name="h100", machine=replace(MACHINES["h100"], per_node=2), gpus=4)
        config = preset_config("370m", ["parallel.tp=4"])
        make_plan(config, cluster, tokens=None, keep=1, as_is=True)


def test_numbers_for_programs_hold_parts_that_add_up():
    numbers = plan_numbers(planned("140m", 8))
    layout = numbers["layouts"][0]
    for parts in (layout["memory_bytes"], layout["step_seconds"]):
        assert sum(v for k, v in parts.items() if k != "total") == pytest.approx(parts["total"])
    run = numbers["run"]
    assert run["days"] == pytest.approx(run["steps"] * layout["step_seconds"]["total"] / 86400)
    assert run["gpu_hours"] == pytest.approx(24 * 8 * run["days"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": 0}, "--gpus=0 must be at least 1"),
        ({"gpus": 12}, "whole number of nodes of 8"),
        ({"mfu": 1.5}, "--mfu=1.5 must be above 0"),
    ],
)
def test_impossible_clusters_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        Cluster(**{"name": "h100", "machine": MACHINES["h100"], "gpus": 8} | changes)
