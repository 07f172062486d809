"""Caches, batches and transformers' own generation features on an exported model."""

from __future__ import annotations

import pytest
import torch
from golden_models import hf_model, meta, tensors

from megaparcae.hf.cache_parcae import ParcaeCache
from megaparcae.hf.modeling_parcae import ParcaeForCausalLM

BUDGETS = {"full": None, "shared1": 1, "shared2": 2, "shared4": 4, "shared2_T5": 2}


def tiny(**changes: object) -> ParcaeForCausalLM:
    model = hf_model(meta("parcae_tiny")["config"], tensors("parcae_tiny"), **changes)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def greedy(model: ParcaeForCausalLM, prompt: torch.Tensor, count: int = 16, **options: object):
    return model.generate(prompt, max_new_tokens=count, do_sample=False, **options)


@pytest.mark.parametrize("strategy", BUDGETS)
def test_every_cache_strategy_gives_the_golden_tokens(strategy: str) -> None:
    data, loops = tensors("cache_generation"), 5 if strategy.endswith("T5") else 8
    ids = greedy(tiny(), data["prompt"], num_loops=loops, loop_budget=BUDGETS[strategy])
    assert torch.equal(ids, data[f"{strategy}.ids"])


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("strategy", ["full", "shared1", "shared2", "shared4"])
def test_forced_tokens_give_the_golden_logits(strategy: str, static: bool) -> None:
    data, model = tensors("cache_generation"), tiny()
    cache = ParcaeCache(loop_budget=BUDGETS[strategy], max_length=28, static=static)
    ids, theirs = data["no_cache.ids"], data[f"{strategy}.forced_step_logits"]
    with torch.no_grad():
        out = model(ids[:, :12], cache=cache, num_loops=8, use_cache=True)
        for step in range(16):
            assert (out.logits[:, -1] - theirs[:, step]).abs().max() <= 2e-5
            out = model(ids[:, 12 + step : 13 + step], cache=cache, num_loops=8, use_cache=True)


def test_generation_without_a_cache_gives_the_golden_tokens() -> None:
    data = tensors("cache_generation")
    assert torch.equal(greedy(tiny(), data["prompt"], use_cache=False), data["no_cache.ids"])


@pytest.mark.parametrize("state_init", ["like_init", "normal", "embed", "unit"])
def test_a_seeded_start_state_gives_the_same_tokens_with_and_without_cache(state_init: str) -> None:
    model = tiny(initial_state="seeded", state_init=state_init)
    prompt = tensors("cache_generation")["prompt"]
    with_cache = greedy(model, prompt, num_loops=2)
    assert torch.equal(with_cache, greedy(model, prompt, num_loops=2, use_cache=False))


@pytest.mark.parametrize("strategy", ["full", "shared2"])
def test_a_static_cache_gives_the_golden_tokens(strategy: str) -> None:
    data = tensors("cache_generation")
    options = {"cache_implementation": "static", "loop_budget": BUDGETS[strategy]}
    assert torch.equal(greedy(tiny(), data["prompt"], **options), data[f"{strategy}.ids"])


def test_with_a_static_cache_all_steps_are_one_compiled_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._dynamo.utils import counters
    from transformers import CompileConfig

    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    compiler = CompileConfig(fullgraph=True, backend="eager", mode=None, dynamic=False)
    compiler._compile_all_devices = True  # generate compiles on GPUs only by itself
    data, options = tensors("cache_generation"), {"cache_implementation": "static"}
    options |= {"num_loops": 5, "loop_budget": 2, "compile_config": compiler}
    torch._dynamo.reset()
    counters.clear()
    assert torch.equal(greedy(tiny(), data["prompt"], **options), data["shared2_T5.ids"])
    assert counters["stats"]["unique_graphs"] == 1


def test_padding_and_early_exit_go_with_a_static_cache() -> None:
    model, prompt = tiny(), tensors("cache_generation")["prompt"]
    ids, mask = prompt.clone(), torch.ones_like(prompt)
    ids[0, :7] = mask[0, :7] = 0
    options = {"attention_mask": mask, "early_exit": "state", "exit_threshold": 0.1}
    static = greedy(model, ids, cache_implementation="static", **options)
    assert torch.equal(static, greedy(model, ids, **options))


@pytest.mark.parametrize("budget, slots", [(None, 8), (1, 1), (4, 4)])
def test_the_cache_takes_the_memory_of_its_formula(budget: int | None, slots: int) -> None:
    model = tiny(loop_budget=budget)
    cache = ParcaeCache(loop_budget=budget, max_length=28)
    greedy(model, tensors("cache_generation")["prompt"], cache=cache)
    assert len(cache.layers) == 4 + 2 * slots
    assert cache.num_bytes == model.config.cache_bytes(2, 28, itemsize=4)


@pytest.mark.parametrize("initial_state", ["zero", "seeded"])
def test_left_padded_rows_generate_what_they_generate_alone(initial_state: str) -> None:
    model = tiny(initial_state=initial_state)
    prompt = tensors("cache_generation")["prompt"][0]
    ids, mask = torch.zeros(3, 12, dtype=torch.long), torch.zeros(3, 12, dtype=torch.long)
    for row, length in enumerate([12, 5, 1]):
        ids[row, 12 - length :], mask[row, 12 - length :] = prompt[:length], 1
    batch = greedy(model, ids, attention_mask=mask)
    for row, length in enumerate([12, 5, 1]):
        alone = greedy(model, prompt[None, :length])
        assert torch.equal(batch[row, 12:], alone[0, length:])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_changes_no_logit(side: str, attention: str) -> None:
    model = tiny(initial_state="seeded")
    model.set_attn_implementation(attention)
    ids = tensors("cache_generation")["prompt"]
    pad = (4, 0) if side == "left" else (0, 4)
    mask = torch.nn.functional.pad(torch.ones_like(ids), pad)
    with torch.no_grad():
        padded = model(torch.nn.functional.pad(ids, pad), attention_mask=mask).logits
        plain = model(ids).logits
    padded = padded[:, 4:] if side == "left" else padded[:, :12]
    assert (padded - plain).abs().max() <= 2e-5


def test_beam_search_with_cache_equals_beam_search_without() -> None:
    prompt = tensors("cache_generation")["prompt"]
    with_cache = greedy(tiny(), prompt, num_beams=3)
    assert torch.equal(with_cache, greedy(tiny(), prompt, num_beams=3, use_cache=False))


def test_sampling_is_reproducible() -> None:
    model, prompt = tiny(), tensors("cache_generation")["prompt"]
    draws = []
    for _ in range(2):
        torch.manual_seed(1)
        draws.append(model.generate(prompt, max_new_tokens=8, do_sample=True, top_k=20, top_p=0.9))
    assert torch.equal(*draws)


def test_assisted_generation_gives_the_greedy_tokens() -> None:
    data, model = tensors("cache_generation"), tiny()
    ids = greedy(model, data["prompt"][:1], prompt_lookup_num_tokens=3)
    assert torch.equal(ids, data["full.ids"][:1])
    ids = greedy(model, data["prompt"][:1], assistant_model=tiny())
    assert torch.equal(ids, data["full.ids"][:1])


def test_num_loops_changes_the_result_and_must_be_positive() -> None:
    model, prompt = tiny(), tensors("cache_generation")["prompt"]
    assert not torch.equal(greedy(model, prompt, num_loops=1), greedy(model, prompt, num_loops=8))
    with pytest.raises(ValueError, match="num_loops=0"):
        model(prompt, num_loops=0)


def test_the_older_name_of_the_cache_argument_works() -> None:
    model, prompt = tiny(), tensors("cache_generation")["prompt"]
    with torch.no_grad():
        out = model(prompt[:, :11], use_cache=True)
        last = model(prompt[:, 11:], past_key_values=out.cache, use_cache=True)
        assert (last.logits[:, -1] - model(prompt).logits[:, -1]).abs().max() <= 2e-5


def test_a_transformers_cache_works_as_well() -> None:
    from transformers import DynamicCache

    data = tensors("cache_generation")
    assert torch.equal(greedy(tiny(), data["prompt"], cache=DynamicCache()), data["full.ids"])


def test_unsupported_cache_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="cache_implementation='quantized'"):
        greedy(tiny(), tensors("cache_generation")["prompt"], cache_implementation="quantized")


def test_input_embeddings_alone_are_refused_when_there_are_value_embeddings() -> None:
    model, prompt = tiny(), tensors("cache_generation")["prompt"]
    with pytest.raises(ValueError, match="input_ids is missing"):
        model(inputs_embeds=model.get_input_embeddings()(prompt))


def test_gradient_checkpointing_changes_no_gradient() -> None:
    prompt = tensors("cache_generation")["prompt"]
    norms = []
    for checkpointing in (False, True):
        model = tiny().train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(prompt, labels=prompt).loss.backward()
        norms.append(torch.stack([p.grad.norm() for p in model.parameters()]))
    assert torch.allclose(*norms, rtol=1e-5)
