"""The suite `generate` at the size of a unit test."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megaparcae.bench import generate
from megaparcae.bench.options import GenerateOptions
from megaparcae.bench.shapes import run_config
from megaparcae.hf.cache_parcae import ParcaeCache

TINY = (
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_heads=2",
    "model.vocab_size=64",
    "model.recurrence.mean_recurrence=2",
)
OPTIONS = GenerateOptions(
    overrides=TINY, repeats=1, prompt=4, new_tokens=3, batch=2, wide=64, lengths=(4, 8)
)


def test_generate_measures_cache_batch_floor_and_length():
    tables = generate.run(OPTIONS).tables
    assert [row["variant"] for row in tables["cache"]] == ["recomputing", "with cache"]
    assert tables["batch"][0]["throughput"] == 1
    assert tables["batch"][1]["throughput"] > 0
    floor = {row["variant"]: row for row in tables["floor, width 64"]}
    assert floor["bare, both"]["times_bare"] == 1
    assert floor["generate"]["times_bare"] > 1
    assert [row["context"] for row in tables["length, width 64"]] == [4, 8]


@pytest.mark.parametrize("injection", ["diagonal", "linear", "additive"])
def test_the_bare_products_are_those_of_a_token(injection):
    config = run_config(OPTIONS, (), [f"model.injection={injection}"]).model
    model = generate.make_model(config, "float32", "cpu")
    bare, cache = generate.BareToken(model, 6), ParcaeCache()
    with torch.no_grad():
        model(torch.zeros(1, 5, dtype=torch.long), cache=cache, use_cache=True)
        with FlopCounterMode(display=False) as counted:
            model(torch.zeros(1, 1, dtype=torch.long), cache=cache, use_cache=True)
        with FlopCounterMode(display=False) as floor:
            bare.products()
            bare.attention()
    assert floor.get_total_flops() == counted.get_total_flops()
