"""Options that the authors' numbers do not cover."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from golden_data import golden_model
from megaparcae.config.schema import ModelConfig, RecurrenceConfig
from megaparcae.model.attention import Attention, AttentionContext
from megaparcae.model.batch import fixed_depth
from megaparcae.model.build import build_model
from megaparcae.model.init import initialize

SMALL = ModelConfig(
    vocab_size=70,
    sequence_length=16,
    hidden_size=32,
    intermediate_size=64,
    num_heads=2,
    num_prelude_layers=1,
    num_core_layers=2,
    num_coda_layers=1,
    init="scaled",
)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_loss_is_the_cross_entropy_of_the_logits_without_those_of_the_padding(softcap):
    config = replace(SMALL, logit_softcap=softcap, vocab_multiple=32)
    assert config.padded_vocab_size == 96
    model = build_model(config)
    initialize(model, config, seed=0)
    ids = torch.randint(70, (2, 17), generator=torch.Generator().manual_seed(0))
    h0 = torch.zeros(2, 16, 32)
    labels = ids[:, 1:].clone()
    labels[0, 3] = -100
    with torch.no_grad():
        loss = model(fixed_depth(ids[:, :-1], 2, h0, labels=labels))
        logits = model(fixed_depth(ids[:, :-1], 2, h0))
    assert logits.shape == (2, 16, 96)
    expected = F.cross_entropy(logits[..., :70].flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected)


def test_clipping_clamps_queries_keys_and_values():
    torch.manual_seed(0)
    config = replace(SMALL, qk_norm=False)
    plain = Attention(config, has_value_embedding=False)
    clipped = Attention(replace(config, clip_qkv=0.1), has_value_embedding=False)
    clipped.load_state_dict(plain.state_dict())
    y = torch.randn(1, 16, 32)
    not_turned = AttentionContext(torch.tensor([1.0, 0.0]).expand(16, 8, 2).contiguous())
    free_heads, clipped_heads = (a.project(y, not_turned, None, None) for a in (plain, clipped))
    for free, bounded in zip(free_heads, clipped_heads, strict=True):
        assert free.abs().max() > 0.1
        torch.testing.assert_close(bounded, free.clamp(-0.1, 0.1))


@pytest.mark.parametrize(
    ("architecture", "unrolled", "layers"), [("looped", 2 + 2 * 6, 4), ("transformer", 5, 5)]
)
def test_residual_branches_shrink_with_loops_and_layers(architecture, unrolled, layers):
    config = replace(
        SMALL,
        architecture=architecture,
        num_layers=5,
        residual_scale=0.7,
        recurrence=RecurrenceConfig(mean_recurrence=6),
    )
    model = build_model(config)
    block = model.core["0"] if architecture == "looped" else model.layers["0"]
    assert block.residual_scale == pytest.approx(0.7 / (unrolled / layers * math.sqrt(layers)))
    x, branch = torch.ones(2), torch.full((2,), 3.0)
    torch.testing.assert_close(block.add(x, branch), 1 + block.residual_scale * branch)


@pytest.mark.parametrize("model", ["parcae", "gpt"])
def test_a_weight_of_the_wrong_variant_does_not_load(model):
    other = build_model(replace(golden_model(model).config, value_embeddings=False))
    with pytest.raises(RuntimeError, match="Unexpected key"):
        other.load_state_dict(golden_model(model).state_dict())
