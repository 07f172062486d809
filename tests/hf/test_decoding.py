"""The fast path of one new token gives what the ordinary model gives, for every kind of model."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from test_export import SMALL, VARIANTS, random_weights

from megaparcae.checkpoint.names import to_hf
from megaparcae.config.schema import ModelConfig
from megaparcae.hf.cache_parcae import ParcaeCache
from megaparcae.hf.config import to_hf_config
from megaparcae.hf.decode_parcae import Decoder, make_decoder
from megaparcae.hf.modeling_parcae import ParcaeForCausalLM


def model_of(config: ModelConfig, dtype: torch.dtype) -> ParcaeForCausalLM:
    hf_config = to_hf_config(config, vocab_size=config.padded_vocab_size)
    model = ParcaeForCausalLM._from_config(hf_config, dtype=torch.float32)
    weights = random_weights(config)
    model.load_state_dict({to_hf(k): v for k, v in weights.items()}, strict=False)
    model.tie_weights()
    return model.to(dtype).eval()


def step_logits(model: ParcaeForCausalLM) -> torch.Tensor:
    ids, cache = torch.arange(36).view(3, 12), ParcaeCache(loop_budget=3)
    with torch.no_grad():
        model(ids[:, :8], cache=cache, use_cache=True)
        steps = [model(ids[:, i : i + 1], cache=cache, use_cache=True) for i in range(8, 12)]
    return torch.cat([step.logits for step in steps], dim=1)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_fast_path_equals_the_ordinary_one(
    name: str, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(VARIANTS[name], dtype)
    fast = step_logits(model)
    monkeypatch.setattr(ParcaeForCausalLM, "decoder", lambda *args: None)
    plain = step_logits(model)
    scale = max(1.0, plain.abs().max().item())
    assert (fast - plain).abs().max().item() <= tolerance * scale


def test_the_fast_path_is_taken_where_it_can_be() -> None:
    model, cache = model_of(SMALL, torch.float32), ParcaeCache()
    mask = torch.ones(3, 8, dtype=torch.long)
    mask[0, :5] = 0
    with torch.no_grad():
        model(torch.arange(24).view(3, 8), attention_mask=mask, cache=cache, use_cache=True)
        assert cache.decoder is None
        options = {"cache": cache, "use_cache": True}
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        model(torch.arange(3)[:, None], attention_mask=mask, **options)
        assert isinstance(cache.decoder[1], Decoder)
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        ids = torch.arange(3)[:, None]
        out = model(ids, attention_mask=mask, output_hidden_states=True, **options)
    assert len(out.hidden_states) == 2 + 8 + 1  # which the fast path does not know
    assert copy.deepcopy(cache).decoder is None  # a copy of the cache is none of the model


def test_hooks_and_replaced_modules_take_the_ordinary_path() -> None:
    model = model_of(VARIANTS["grouped query, padded vocabulary"], torch.float32)
    expected, seen = step_logits(model), []
    model.model.core[0].mlp.register_forward_hook(lambda *args: seen.append(1))
    assert (step_logits(model) - expected).abs().max() <= 2e-5
    assert len(seen) == 5 * 8

    model = model_of(VARIANTS["grouped query, padded vocabulary"], torch.float32)
    layer = model.model.prelude[0].attention
    layer.forward = functools.partial(layer.forward)  # what accelerate does to place weights
    assert make_decoder(model) is None

    class Doubled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    old = model.model.coda[0].mlp.down_proj
    model.model.coda[0].mlp.down_proj = Doubled(old.in_features, old.out_features, bias=False)
    model.model.coda[0].mlp.down_proj.weight = old.weight
    assert (step_logits(model) - expected).abs().max() > 1e-3
