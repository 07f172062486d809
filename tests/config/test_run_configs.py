"""The shipped runs: each loads, divides over the GPUs it is written for, and is the paper's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megaparcae.config.batch import solve_batch
from megaparcae.config.load import load_config
from megaparcae.config.presets import PRESETS
from megaparcae.config.schema import ModelConfig, RunConfig

FOLDER = Path(__file__).resolve().parents[2] / "launch" / "configs"
GPUS = {"pretrain_tiny": 2, "pretrain_1p3b_64gpus": 64, "pretrain_1p3b_256gpus": 256}
"""Processes that a configuration is written for; 8 where nothing else is said."""


def load(name: str, *overrides: str) -> RunConfig:
    return load_config(FOLDER / f"{name}.yaml", overrides)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_run_loads_and_divides_over_its_gpus(path):
    config = load_config(path)
    parallel = config.parallel
    plan = solve_batch(config.train, world=GPUS.get(path.stem, 8), tp=parallel.tp, pp=parallel.pp)
    assert plan.micro_batch * plan.accumulation * plan.dp == config.train.global_batch_size
    assert config.data.train and config.data.tokenizer
    assert config.checkpoint.dir == f"runs/{config.name}"


def test_every_preset_has_a_run():
    assert {load(path.stem).preset for path in FOLDER.glob("*.yaml")} == set(PRESETS)


def test_the_layouts_of_the_largest_run_train_the_same_model_on_the_same_batches():
    one, *others = [load(f"pretrain_1p3b{suffix}") for suffix in ("", "_64gpus", "_256gpus")]
    for other in others:
        assert other.model == one.model and other.optimizer == one.optimizer
        same = replace(other.train, micro_batch_size=one.train.micro_batch_size)
        assert same == one.train and other.schedule == one.schedule


@pytest.mark.parametrize(
    "size, lr, tokens", [("140m", 8e-3, 11.2e9), ("370m", 8e-3, 29.6e9), ("770m", 6e-3, 61.6e9),
                         ("1p3b", 6e-3, 104e9)]
)  # fmt: skip
def test_the_recipe_of_table_21(size, lr, tokens):
    config = load(f"pretrain_{size}")
    assert config.optimizer.lr == lr and config.optimizer.muon_lr == 8e-3
    assert config.optimizer.betas == (0.8, 0.95) and config.optimizer.eps == 1e-10
    per_step = config.train.global_batch_size * config.model.sequence_length
    assert 0 <= config.train.num_steps * per_step - tokens < per_step
    assert config.schedule.cooldown_fraction == 0.5 and config.schedule.warmup_steps == 0
    assert config.model.recurrence.mean_recurrence == 8
    assert config.model.recurrence.num_grad_loops == 4


def count(model: ModelConfig) -> int:
    """Parameters by hand: tables, blocks, injection, readout, norms; the tied head once."""
    d, mlp = model.hidden_size, 3 if model.mlp == "swiglu" else 2
    norms = 4 if model.block == "sandwich" else 2
    block = 4 * d * d + mlp * d * model.intermediate_size + norms * d
    tables = len(model.value_embedding_layers)
    total = model.padded_vocab_size * d * (1 + tables) + tables * model.kv_heads * 32
    total += model.num_stored_layers * block + d
    if model.architecture == "looped":
        total += {"diagonal": d * d + 2 * d, "linear": 2 * d * d, "additive": 0}[model.injection]
        total += d * d * model.readout + d * model.prelude_norm
    return total


@pytest.mark.parametrize(
    "preset, parameters",
    [
        ("140m", 144_323_136), ("transformer_140m", 143_141_184),
        ("370m", 388_003_328), ("transformer_370m", 385_903_104),
        ("770m", 776_655_680), ("transformer_770m", 773_375_040),
        ("1p3b", 1_338_591_744), ("transformer_1p3b", 1_333_868_544),
        ("parcae_100m", 113_189_888), ("parcae_350m", 378_558_464),
        ("rdm_100m", 114_242_560), ("rdm_350m", 382_765_056),
    ],
)  # fmt: skip
def test_presets_have_the_parameters_of_tables_17_and_19(preset, parameters):
    assert count(load("pretrain_" + preset).model) == parameters
