"""Early exit per token: saves loops, keeps the cache valid, and does nothing at threshold 0."""

from __future__ import annotations

import pytest
import torch
from golden_models import tensors
from test_generation import greedy, tiny

from megaparcae.hf.cache_parcae import ParcaeCache
from megaparcae.hf.exit_curve import exit_curve


@pytest.mark.parametrize("rule", ["kl", "entropy", "state"])
def test_threshold_zero_runs_every_loop_and_changes_nothing(rule: str) -> None:
    data, cache = tensors("cache_generation"), ParcaeCache()
    ids = greedy(tiny(), data["prompt"], early_exit=rule, exit_threshold=0.0, cache=cache)
    assert torch.equal(ids, data["full.ids"])
    assert cache.loops_used.shape == (2, 15)
    assert (cache.loops_used == 8).all()


@pytest.mark.parametrize("rule", ["kl", "entropy", "state"])
def test_a_generous_threshold_stops_after_two_loops(rule: str) -> None:
    cache = ParcaeCache()
    prompt = tensors("cache_generation")["prompt"]
    greedy(tiny(), prompt, early_exit=rule, exit_threshold=1e9, cache=cache)
    assert (cache.loops_used == 2).all()


@pytest.mark.parametrize("budget", [None, 2])
@pytest.mark.parametrize("rule, threshold", [("kl", 0.005), ("entropy", 0.02), ("state", 0.1)])
def test_a_batch_exits_row_by_row_as_single_rows_do(
    rule: str, threshold: float, budget: int | None
) -> None:
    model, prompt = tiny(), tensors("cache_generation")["prompt"]
    options = {"early_exit": rule, "exit_threshold": threshold}
    cache = ParcaeCache(loop_budget=budget)
    batch = greedy(model, prompt, cache=cache, **options)
    used = cache.loops_used
    assert (used < 8).any()
    for row in range(2):
        alone = ParcaeCache(loop_budget=budget)
        assert torch.equal(
            batch[row], greedy(model, prompt[row : row + 1], cache=alone, **options)[0]
        )
        assert torch.equal(used[row], alone.loops_used[0])


def test_skipped_loops_hold_the_last_keys_and_values() -> None:
    model, prompt = tiny(), tensors("cache_generation")["prompt"]
    cache = ParcaeCache()
    with torch.no_grad():
        model(prompt[:, :11], cache=cache, use_cache=True)
        options = {"early_exit": "kl", "exit_threshold": 1e9}
        model(prompt[:, 11:], cache=cache, use_cache=True, **options)
    assert {layer.length for layer in cache.layers} == {12}
    second = cache.layers[4 + 2].keys[:, :, 11]
    for loop in range(2, 8):
        assert torch.equal(cache.layers[4 + 2 * loop].keys[:, :, 11], second)


def test_a_single_token_prompt_may_exit_early() -> None:
    cache = ParcaeCache()
    greedy(tiny(), torch.tensor([[7]]), early_exit="state", exit_threshold=1e9, cache=cache)
    assert cache.loops_used.shape == (1, 16)


def test_unknown_rules_are_refused() -> None:
    with pytest.raises(ValueError, match="early_exit='psychic'"):
        greedy(tiny(), tensors("cache_generation")["prompt"], early_exit="psychic")


def test_the_curve_runs_from_two_loops_to_the_loss_of_all_loops() -> None:
    rows = [*tensors("cache_generation")["prompt"].numpy(), torch.arange(5).numpy()]
    points = exit_curve(tiny(), rows, ["kl", "state"], factors=[0.0, 1.0, 1e9], batch_tokens=24)
    fixed = [point for point in points if point.rule == "fixed"]
    assert [point.loops for point in fixed] == list(range(1, 9))
    assert {point.num_tokens for point in points} == {11 + 11 + 4}
    for rule in ("kl", "state"):
        never, some, soon = (point for point in points if point.rule == rule)
        assert never.loops == 8
        assert never.loss == pytest.approx(fixed[7].loss, rel=1e-5)
        assert 2 <= some.loops <= 8
        assert soon.loops == 2
        assert soon.loss == pytest.approx(fixed[1].loss, rel=1e-5)
