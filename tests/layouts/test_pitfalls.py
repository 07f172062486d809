"""What other trainers have got wrong between layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from comparison import TABLE, assert_same_run, one_process, run_layout
from tiny import full_weights, merged, start, steps, tiny_config

import megaparcae.optim.muon as muon_module
from harness import run_ranks
from megaparcae.model.looped_core import LoopedCore
from megaparcae.optim.recipe import make_recipe


def table_config(changes: dict[str, Any]) -> Any:
    return tiny_config(merged(TABLE, changes))


def evaluate_between_steps(changes: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    """Train, evaluate in batches of each of these sizes, train on."""
    run, batches = start(table_config(changes))
    results = steps(run, batches, 0, 2)
    validations = []
    for number in rows:
        plan, batches.plan = batches.plan, replace(batches.plan, micro_batch=number)
        evaluation = batches.validation_batches(2)
        batches.plan = plan
        validations.append(float(run.engine.eval_batch(evaluation)))
        results += steps(run, batches, len(results), len(results) + 1)
    return {"steps": results, "validation": validations, "weights": full_weights(run)}


EVALUATIONS = [4, 1, 3, 2]
"""Six validation rows; some sizes leave rows over that no rank may count."""


@pytest.fixture(scope="module")
def evaluated() -> dict[str, Any]:
    return run_ranks(evaluate_between_steps, 1, {}, EVALUATIONS)[0]


@pytest.mark.parametrize(
    "world, parallel",
    [
        (2, {"pp": 2}),
        (2, {}),
        (2, {"zero_stage": 3}),
        (4, {"pp": 2, "zero_stage": 1}),
        (4, {"tp": 2, "sequence_parallel": True, "pp": 2}),
    ],
)
def test_evaluation_may_have_other_row_counts_and_does_not_disturb_training(
    world, parallel, evaluated
):
    ranks = run_ranks(evaluate_between_steps, world, {"parallel": parallel}, EVALUATIONS)
    for rank in ranks:
        assert rank["validation"] == pytest.approx(evaluated["validation"], rel=1e-5)
        for got, want in zip(rank["steps"], evaluated["steps"], strict=True):
            assert got == pytest.approx(want, rel=1e-5)


def test_evaluation_between_steps_leaves_no_trace():
    undisturbed = run_ranks(evaluate_between_steps, 1, {}, [])[0]["steps"]
    disturbed = run_ranks(evaluate_between_steps, 1, {}, [2, 5])[0]["steps"]
    assert disturbed[:2] == undisturbed
    straight = one_process()["steps"]
    assert disturbed == straight[: len(disturbed)]


@pytest.mark.parametrize("optimizer", ["muon_adamw", "adamw"])
@pytest.mark.parametrize("micro_batch, accumulation", [(8, 1), (4, 2), (1, 8)])
def test_the_split_into_micro_batches_does_not_matter(micro_batch, accumulation, optimizer):
    changes = {"optimizer": {"name": optimizer, "muon_dtype": "fp32", "muon_lr": 2e-3}}
    split = {
        "train": {
            "micro_batch_size": micro_batch,
            "gradient_accumulation_steps": accumulation,
        }
    }
    assert_same_run(run_layout(1, merged(changes, split)), one_process(changes))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_fixed_depth_core_under_zero_with_checkpointing_in_each_loop(zero):
    depth = {"model": {"recurrence": {"mean_recurrence": 4, "sampler": "fixed"}}}
    split = {"parallel": {"zero_stage": zero, "recompute_core": "loop"}}
    assert_same_run(run_layout(2, merged(depth, split), 4), one_process(depth, 4))


def change_of_one_step(changes: dict[str, Any]) -> dict[str, torch.Tensor] | None:
    run, batches = start(table_config(changes))
    before = full_weights(run)
    steps(run, batches, 0, 1)
    after = full_weights(run)
    if before is None or after is None:
        return None
    return {name: after[name] - before[name] for name in before}


def plain_adamw_change(changes: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The model's own gradients, clipped by hand, and torch's AdamW."""
    run, batches = start(table_config(changes))
    parameters = dict(run.model.named_parameters())
    config = run.config
    adamw = torch.optim.AdamW(
        parameters.values(),
        lr=config.optimizer.lr,
        betas=config.optimizer.betas,
        eps=config.optimizer.eps,
        weight_decay=0.0,
    )
    counted = run.plan.global_batch * config.model.sequence_length
    bf16 = config.train.precision == "bf16"
    for batch in batches.to_device(batches.read(0), 0):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = run.model(batch) / counted
        loss.backward()
    before = {name: p.detach().clone() for name, p in parameters.items()}
    torch.nn.utils.clip_grad_norm_(parameters.values(), config.optimizer.grad_clip)
    adamw.step()
    return {name: p.detach() - before[name] for name, p in parameters.items()}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_every_zero_stage_makes_the_step_of_plain_adamw(precision, accumulation):
    changes = {
        # A smaller eps turns rounding into signs at the first step; a smaller rate makes changes
        # that are lost in the rounding of the weights.
        "optimizer": {"eps": 1e-3, "lr": 0.3},
        "train": {"precision": precision, "micro_batch_size": 4 // accumulation},
    }
    want = run_ranks(plain_adamw_change, 1, merged(changes, {"train": {"micro_batch_size": 4}}))[0]
    tolerance = {"fp32": 1e-5, "bf16": 3e-2}[precision]
    for zero in range(4):
        stage = {"parallel": {"zero_stage": zero}}
        got = run_ranks(change_of_one_step, 2, merged(changes, stage))[0]
        for name, change in want.items():
            apart = float((got[name] - change).norm() / change.norm())
            assert apart < tolerance, (zero, name, apart)


def count_orthogonalised(changes: dict[str, Any], num_steps: int) -> tuple[int, list[str]]:
    """Matrices orthogonalised on this rank, and the names the recipe gives to Muon."""
    count = 0
    original = muon_module.orthogonalize

    def counting(matrices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        nonlocal count
        count += len(matrices)
        x = original(matrices, dtype)
        values = torch.linalg.svdvals(x.float())
        assert 0.7 < float(values.median()) < 1.3, "not orthogonal"
        return x

    muon_module.orthogonalize = counting
    run, batches = start(table_config(changes))
    steps(run, batches, 0, num_steps)
    recipe = make_recipe(run.config.optimizer)
    weights = full_weights(run) or {}
    return count, [n for n, w in weights.items() if recipe.rule(n, tuple(w.shape)).kind == "muon"]


@pytest.mark.parametrize("world, parallel", [(1, {}), (2, {}), (2, {"tp": 2}), (4, {"tp": 2})])
def test_muon_orthogonalises_each_matrix_once_a_step(world, parallel):
    changes = {"optimizer": {"name": "muon_adamw"}, "parallel": parallel}
    ranks = run_ranks(count_orthogonalised, world, changes, 3)
    matrices = ranks[0][1]
    assert any("core" in name for name in matrices)
    assert sum(count for count, _ in ranks) == 3 * len(matrices) * parallel.get("tp", 1)


def weights_after(changes: dict[str, Any], num_steps: int) -> dict[str, torch.Tensor] | None:
    run, batches = start(table_config(changes))
    steps(run, batches, 0, num_steps)
    return full_weights(run)  # asserts that copies are equal bit for bit


@pytest.mark.parametrize(
    "world, changes",
    [
        (3, {}),
        (6, {"parallel": {"tp": 2, "sequence_parallel": True}}),
        (6, {"parallel": {"pp": 2}}),
        (6, {"parallel": {"pp": 2, "zero_stage": 1}}),
        (6, {"parallel": {"tp": 2, "zero_stage": 1}}),
        pytest.param(6, {"parallel": {"tp": 2, "zero_stage": 3}}, marks=pytest.mark.slow),
        pytest.param(8, {"parallel": {"pp": 2}}, marks=pytest.mark.slow),
        (4, {"parallel": {"pp": 2, "tp": 2, "sequence_parallel": True}}),
    ],
)
@pytest.mark.parametrize("optimizer", ["adamw", "muon_adamw"])
def test_copies_stay_bit_identical_over_fifty_steps(world, changes, optimizer):
    parallel = changes.get("parallel", {})
    if optimizer == "muon_adamw" and parallel.get("zero_stage", 0):
        return  # refused
    dp = world // (parallel.get("tp", 1) * parallel.get("pp", 1))
    batch = {"train": {"global_batch_size": 2 * dp, "micro_batch_size": 1}}
    name = {"optimizer": {"name": optimizer, "muon_lr": 2e-3}}
    changes = merged(merged(changes, batch), name)
    weights = run_ranks(weights_after, world, changes, 50, timeout=240)[0]
    assert all(bool(weight.isfinite().all()) for weight in weights.values())


def count_gathers(zero_options: dict[str, int], parallel: dict[str, Any]) -> list[int]:
    """All-gathers of core parameters in the forward and in the backward pass of a micro-batch."""
    import json
    import tempfile
    from pathlib import Path

    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

    from megaparcae.engine.ds_config import SHIPPED

    options = json.loads((SHIPPED / "zero3.json").read_text())
    options["zero_optimization"] |= {"stage3_param_persistence_threshold": 0, **zero_options}
    path = Path(tempfile.mkdtemp()) / "zero3.json"
    path.write_text(json.dumps(options))
    changes = {
        "parallel": {"zero_stage": 3, "deepspeed_config": str(path), **parallel},
        "train": {"global_batch_size": 4, "micro_batch_size": 2},
        "model": {"recurrence": {"mean_recurrence": 6, "backprop_depth": 3, "sampler": "fixed"}},
    }
    run, batches = start(table_config(changes))
    core = next(m for m in run.model.modules() if isinstance(m, LoopedCore))
    wanted = {id(p) for p in core.parameters()}
    gathers = 0
    owner = coordinator.PartitionedParameterCoordinator
    original = owner._PartitionedParameterCoordinator__all_gather_params

    def counting(self: Any, params: Any, forward: bool) -> None:
        nonlocal gathers
        gathers += sum(id(p) in wanted for p in params)
        original(self, params, forward)

    owner._PartitionedParameterCoordinator__all_gather_params = counting
    per_step = []
    for step in range(3):
        gathers = 0
        steps(run, batches, step, step + 1)
        per_step.append(gathers)
    return [count / len(wanted) for count in per_step]


@pytest.mark.parametrize("recompute", ["none", "block", "loop"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stage3_max_live_parameters": 0},
        {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0},
    ],
    ids=["defaults", "nothing live", "nothing reused"],
)
def test_zero_3_gathers_the_core_at_most_once_in_each_pass(options, recompute):
    for per_step in run_ranks(count_gathers, 2, options, {"recompute_core": recompute}):
        assert all(1 <= count <= 2 for count in per_step), per_step
