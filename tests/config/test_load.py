"""Run configurations: what is read, what is refused, and what the refusal says."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import get_type_hints

import pytest

from megaparcae.config import schema
from megaparcae.config.load import config_differences, dump_config, load_config
from megaparcae.config.presets import PRESETS
from megaparcae.config.schema import DatasetConfig, RunConfig
from megaparcae.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def load(tmp_path):
    """Load a configuration from its text."""

    def load(text: str, *overrides: str) -> RunConfig:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return load_config(path, list(overrides))

    return load


def refusal(load, text: str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(text, *overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_empty_section_takes_all_defaults(load):
    assert load("data:\ntrain: {}") == RunConfig()


def test_a_preset_comes_below_the_file_and_the_file_below_set(load):
    text = "preset: 140m\nmodel: {sequence_length: 512}\ntrain: {num_steps: 7}"
    config = load(text, "train.num_steps=9", "model.recurrence.mean_recurrence=4")
    assert config.model.hidden_size == 768 and config.model.sequence_length == 512
    assert config.train.num_steps == 9 and config.train.global_batch_size == 256
    assert config.model.recurrence.num_grad_loops == 2, "follows the new mean, not the preset's"


def test_numbers_in_scientific_notation_are_numbers(load):
    config = load("optimizer: {lr: 8e-3, eps: 1e-10, weight_decay: 1}", "optimizer.muon_lr=2E-2")
    assert (config.optimizer.lr, config.optimizer.eps) == (8e-3, 1e-10)
    assert config.optimizer.weight_decay == 1.0 and config.optimizer.muon_lr == 2e-2


def test_set_takes_lists_null_and_quoted_text(load):
    config = load(
        "name: a",
        "validation.num_loops=[1, 4]",
        "train.micro_batch_size=null",
        'name="140"',
        "data.tokenizer=a=b",
    )
    assert config.validation.num_loops == (1, 4) and config.train.micro_batch_size is None
    assert config.name == "140" and config.data.tokenizer == "a=b"


@pytest.mark.parametrize(
    "written, meant",
    [
        ("shards/a", [("shards/a", None)]),
        ("[shards/a, shards/b]", [("shards/a", None), ("shards/b", None)]),
        ("[{prefix: a, weight: 0.3}, {prefix: b, weight: 7e-1}]", [("a", 0.3), ("b", 0.7)]),
    ],
)
def test_training_data_may_be_one_prefix_a_list_or_a_weighted_list(load, written, meant):
    expected = tuple(DatasetConfig(prefix=p, weight=w) for p, w in meant)
    assert load(f"data: {{train: {written}}}").data.train == expected
    assert load("name: x", f"data.train={written}").data.train == expected


@pytest.mark.parametrize(
    "text, expected",
    [
        ("model: {hiden_size: 3}", "unknown option model.hiden_size; did you mean model.hidden_si"),
        ("lr: 3", "unknown option lr; did you mean optimizer.lr?"),
        ("tranin: {}", "unknown option tranin; did you mean train?"),
        ("model: {recurrence: {mu: 3}}", "model.recurrence has mean_recurrence, "),
        ("data: {train: [{prefx: a}]}", "unknown option data.train[0].prefx; did you mean data.tr"),
        ("data: {train: [{weight: 1}]}", "data.train[0].prefix is missing"),
        ("preset: 140", "choose tiny, 140m"),
        ("preset: 370M", "(did you mean 370m?)"),
        ("train: {num_steps: 1.5}", "train.num_steps=1.5 must be a whole number, not a number"),
        ("train: {num_steps: true}", "train.num_steps=True must be a whole number"),
        ("train: {num_steps: null}", "train.num_steps=null must be a whole number, not nothing"),
        ("train: {deterministic: 1}", "train.deterministic=1 must be true or false"),
        ("name: 140", 'name=140 must be a text; write "140" in quotes'),
        ("optimizer: {lr: fast}", "optimizer.lr='fast' must be a number"),
        ("optimizer: {lr: .nan}", "optimizer.lr=nan must be finite"),
        ("optimizer: {betas: [0.9]}", "optimizer.betas=[0.9] must have 2 entries"),
        ("optimizer: {name: adam}", "choose muon_adamw, adamw, adamw_rdm (did you mean adamw?)"),
        ("parallel: {zero_stage: '1'}", "parallel.zero_stage='1': choose 0, 1, 2, 3"),
        ("validation: {num_loops: 4}", "validation.num_loops=4 must be a list"),
        ("train: 3", "train is a section, not a whole number"),
        ("- a", "must be a mapping of sections"),
        ("", "must be a mapping of sections"),
        ("train: {num_steps: 3}\ntrain: {seed: 1}", "run.yaml:2:1: the key 'train' is given twice"),
        ("train: {num_steps: 3", "run.yaml:2:1: expected ',' or '}'"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_remedy(load, text, expected):
    message = refusal(load, text + ("\n" if text.endswith("3") else ""))
    assert expected in message and "run.yaml" in message


@pytest.mark.parametrize(
    "override, expected",
    [
        ("train.num_steps", "--set train.num_steps: must be section.key=value"),
        ("=3", "must be section.key=value"),
        ("train.num_step=3", "--set train.num_step=3: unknown option train.num_step; did you mean"),
        ("train=3", "--set train=3: train is a section"),
        ("train.num_steps=x", "--set train.num_steps=x: train.num_steps='x' must be a whole"),
        ("validation.num_loops=[1", "the value is not YAML"),
        (
            "validation.num_loops=[1, x]",
            "--set validation.num_loops=[1, x]: validation.num_loops[1]",
        ),
    ],
)
def test_what_is_wrong_in_an_override_is_blamed_on_the_override(load, override, expected):
    assert expected in refusal(load, "name: a", override)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("model: {num_heads: 5}", "model.hidden_size=768 must be divisible by model.num_heads=5"),
        ("model: {num_core_layers: 0}", "model.num_core_layers=0 must be at least 1"),
        (
            "model: {recurrence: {mean_recurrence: 2, backprop_depth: 3}}",
            "backprop_depth=3 is more than mean_recurrence=2",
        ),
        ("parallel: {tp: 4}", "model.num_heads=6 must be divisible by parallel.tp=4; use tp in"),
        ("parallel: {zero_stage: 2, pp: 2}", "use zero_stage 0 or 1, or pp 1"),
        ("{parallel: {zero_stage: 3}, train: {compile: true}}", "use tp 1 and zero_stage 0, 1"),
        ("{parallel: {tp: 2}, train: {compile: true}}", "use tp 1 and zero_stage 0, 1 or 2"),
    ],
)
def test_options_that_contradict_each_other_are_refused_with_the_file_named(load, text, expected):
    message = refusal(load, text)
    assert expected in message and message.count("run.yaml") == 1


def test_a_missing_file_is_named_with_its_nearest_neighbour(tmp_path):
    (tmp_path / "pretrain_tiny.yaml").touch()
    with pytest.raises(UserError, match=r"did you mean .*pretrain_tiny\.yaml"):
        load_config(tmp_path / "pretrain_tyni.yaml")
    with pytest.raises(UserError, match="the folder .* does not exist"):
        load_config(tmp_path / "no" / "x.yaml")


@pytest.mark.parametrize("name", PRESETS)
def test_the_effective_configuration_is_read_back_equal(load, name):
    config = load(f"preset: {name}\ndata: {{train: [{{prefix: a, weight: 0.1}}]}}")
    assert load(dump_config(config)) == config


def test_differences_are_listed_by_option(load):
    a = load("preset: tiny")
    b = load("preset: tiny", "optimizer.lr=1e-3", "model.recurrence.draw_per=batch", "data.train=x")
    found = config_differences(a, b)
    assert found == ["model.recurrence.draw_per", "data.train", "optimizer.lr"]
    assert config_differences(a, a) == []


def test_every_option_has_a_docstring():
    tree = ast.parse(Path(schema.__file__).read_text())
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for field, after in zip(cls.body, [*cls.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign):
                section = "Config" in ast.unparse(field.annotation) and cls.name == "RunConfig"
                documented = isinstance(after, ast.Expr)
                assert documented or section, f"{cls.name}.{ast.unparse(field.target)}"


def test_sections_are_frozen():
    for kind in get_type_hints(RunConfig).values():
        if dataclasses.is_dataclass(kind):
            with pytest.raises(dataclasses.FrozenInstanceError):
                kind().anything = 1
