"""Six whole steps of the authors: model, schedule, clipping, Muon and AdamW together."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from golden_data import CONFIGS, dialect, golden_model, meta, tensors
from megaparcae.checkpoint.names import official_entries
from megaparcae.config.schema import OptimizerConfig, ScheduleConfig
from megaparcae.model.batch import Batch
from megaparcae.model.loop_plan import LoopPlan, depth_order
from megaparcae.optim.param_groups import ParameterRule
from megaparcae.optim.recipe import Recipe, make_recipe
from megaparcae.optim.schedule import hyperparameters_at
from megaparcae.parallel.mesh import make_mesh
from megaparcae.parallel.shard import ShardSpec, set_spec
from megaparcae.parallel.sharded_optimizer import ShardedOptimizer

OPTIMIZER = OptimizerConfig(name="muon_adamw", muon_dtype="fp32", grad_clip=1.0)
SCHEDULE = ScheduleConfig(kind="trapezoid", cooldown_steps=3)
NUM_STEPS = 6


class AuthorsRecipe(Recipe):
    """The authors' code gives value-embedding gates to Muon; the paper and we to AdamW."""

    def rule(self, name: str, full_shape: tuple[int, ...]) -> ParameterRule:
        if name.endswith("value_gate.weight"):
            return ParameterRule("muon", decayed=True)
        return super().rule(name, full_shape)


def make_optimizer(model: nn.Module) -> ShardedOptimizer:
    for name, parameter in model.named_parameters():
        set_spec(parameter, ShardSpec(name=name, full_shape=tuple(parameter.shape)))
    plain = make_recipe(OPTIMIZER)
    recipe = AuthorsRecipe(plain.config, plain.adamw, plain.muon)
    return ShardedOptimizer(model.parameters(), recipe, make_mesh(pp=1, tp=1))


def micro_batch(tokens: Tensor, n: Tensor, k: Tensor) -> Batch:
    """tokens [rows, S + 1], deepest row first; start state 0."""
    order = depth_order(n.tolist(), k.tolist())
    ids = tokens[order, :-1]
    return Batch(
        ids=ids,
        labels=tokens[order, 1:],
        plan=LoopPlan.from_depths(n[order].tolist(), k[order].tolist()),
        start_state=lambda: torch.zeros(*ids.shape, CONFIGS["parcae"].hidden_size),
    )


@pytest.fixture(scope="module")
def trace() -> tuple[nn.Module, list[dict]]:
    """The model after six steps, and what was measured in each."""
    model, data, rows = golden_model("parcae"), tensors("train_trace"), []
    optimizer = make_optimizer(model)
    for step in range(NUM_STEPS):
        now = hyperparameters_at(step, optimizer=OPTIMIZER, schedule=SCHEDULE, num_steps=NUM_STEPS)
        optimizer.set_hyperparameters(now.lr_factor, now.muon_momentum, now.muon_weight_decay)
        losses = []
        for tokens, n, k in zip(
            data["tokens"][step], data["n"][step], data["k"][step], strict=True
        ):
            loss = model(micro_batch(tokens, n, k)) / tokens[:, 1:].numel()
            (loss / 2).backward()
            losses.append(loss.item())
        optimizer.step()
        total = torch.stack([p.detach().double().square().sum() for p in model.parameters()]).sum()
        rows.append(
            {
                "losses": losses,
                "grad_norm_before_clip": optimizer._global_grad_norm,
                "lr": now.lr_factor * OPTIMIZER.lr,
                "muon_weight_decay": now.muon_weight_decay,
                "muon_momentum": now.muon_momentum,
                "total_parameter_l2": total.sqrt().item(),
            }
        )
    return model, rows


@pytest.mark.parametrize("step", range(NUM_STEPS))
def test_every_step_is_the_authors(trace, step):
    ours, golden = trace[1][step], meta("train_trace")["rows"][step]
    assert ours.pop("losses") == pytest.approx(golden["losses"], abs=2e-5)
    assert ours.pop("grad_norm_before_clip") == pytest.approx(
        golden["grad_norm_before_clip"], rel=2e-5
    )
    assert ours.pop("total_parameter_l2") == pytest.approx(golden["total_parameter_l2"], rel=1e-5)
    for key, value in ours.items():
        assert value == pytest.approx(golden[key], rel=1e-15), key


def test_final_weights_are_the_authors(trace):
    weights = dict(trace[0].named_parameters())
    golden = meta("train_trace")["final_parameters"]
    names = {
        e.official: e.canonical[0] for e in official_entries(CONFIGS["parcae"], dialect("parcae"))
    }
    assert {names[official] for official in golden} == set(weights)
    for official, expected in golden.items():
        ours = weights[names[official]].detach()
        norm = torch.linalg.vector_norm(ours, dtype=torch.float64).item()
        assert norm == pytest.approx(expected["l2"], rel=1e-5), official
        # Sum and first element feel single elements; an element can move by a few lr per step.
        assert ours.double().sum().item() == pytest.approx(expected["sum"], rel=1e-4, abs=1e-3)
        assert ours.flatten()[0].item() == pytest.approx(expected["first"], abs=1e-4)
