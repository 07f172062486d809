"""Initial weights: the authors' statistics, and the same values wherever they are made."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor

from golden_data import CONFIGS, read_json
from megaparcae.checkpoint.names import canonical_shapes
from megaparcae.config.schema import ModelConfig
from megaparcae.model.batch import fixed_depth
from megaparcae.model.build import build_model
from megaparcae.model.init import initial_value, initialize

VOCAB = 4096  # of the authors' 32,768: the formulas hold for any
OFFICIAL_140M = ModelConfig(vocab_size=VOCAB)
SCALED_140M = ModelConfig(vocab_size=VOCAB, init="scaled", init_orthogonal=False)
NAMES = {
    "embedding.weight": "transformer.wte.weight",
    "prelude.0.attention_norm.weight": "transformer.prelude.*.norm_1.weight",
    "prelude.0.attention.q_proj.weight": "transformer.prelude.*.attn.c_q.weight",
    "core.1.attention.k_proj.weight": "transformer.core_block.*.attn.c_k.weight",
    "coda.0.attention.v_proj.weight": "transformer.coda.*.attn.c_v.weight",
    "coda.1.attention.o_proj.weight": "transformer.coda.*.attn.c_proj.weight",
    "core.0.mlp_norm.weight": "transformer.core_block.*.norm_2.weight",
    "core.0.mlp.up_proj.weight": "transformer.core_block.*.mlp.fc.weight",
    "prelude.0.mlp.down_proj.weight": "transformer.prelude.*.mlp.proj.weight",
    "core.1.attention.value_gate.weight": "transformer.core_block.*.attn.ve_gate.weight",
    "injection.A_log": "transformer.adapter.A_log",
    "injection.dt_bias": "transformer.adapter.dt_bias",
    "injection.B": "transformer.adapter.B",
    "readout.weight": "transformer.C.weight",
    "prelude_norm.weight": "transformer.ln_prelude.weight",
    "final_norm.weight": "transformer.ln_f.weight",
    "value_embeddings.3.weight": "value_embeds.*.weight",
}
ORTHOGONAL = [n for n in NAMES if n.split(".")[-2] in ("embedding", "q_proj", "up_proj", "readout")]


@functools.cache
def value_of(name: str, config: ModelConfig, seed: int = 1) -> Tensor:
    return initial_value(config, seed=seed, name=name, shape=canonical_shapes(config)[name])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("config", "table"),
    [(OFFICIAL_140M, "measured"), (SCALED_140M, "measured_scaled_init_orthogonal_false")],
    ids=["scaled_zero", "scaled"],
)
def test_statistics_are_the_authors(name, config, table):
    golden, value = read_json("init_stats")[table][NAMES[name]], value_of(name, config)
    # A gate has 192 entries, so its two measurements differ by chance.
    rel = 0.15 if "gate" in name else 0.01
    assert value.dtype == torch.float32
    assert value.std().item() == pytest.approx(golden["std"], rel=rel, abs=1e-9)
    zeros = (value == 0).float().mean().item()
    assert zeros == pytest.approx(golden["fraction_exactly_zero"], abs=1e-4)
    if "mean" in golden and golden["std"] == 0:
        assert value.mean().item() == pytest.approx(golden["mean"], rel=1e-6)
    cut = "norm" not in name and table != "measured" and golden["std"] > 0
    if cut and "value_embeddings" not in name and "injection" not in name:
        assert value.abs().max().item() <= golden["max"] * 1.01


@pytest.mark.parametrize("name", ORTHOGONAL)
def test_matrices_start_as_scaled_orthogonal_matrices(name):
    value = value_of(name, OFFICIAL_140M).double()
    rows, columns = value.shape
    assert rows >= columns
    std = read_json("init_stats")["formulas"]["base_std"]["value_140m"]
    gram = value.T @ value / (std * std * rows)
    assert (gram - torch.eye(columns)).abs().max() < 1e-5
    golden = read_json("init_stats")["measured"][NAMES[name]]["singular_values"]["median"]
    if name != "embedding.weight":  # whose vocabulary is smaller here
        assert std * math.sqrt(rows) == pytest.approx(golden, rel=1e-5)


def test_a_wide_matrix_has_orthogonal_rows():
    config = ModelConfig(num_kv_heads=2)  # k_proj [256, 768]
    value = value_of("core.0.attention.k_proj.weight", config).double()
    gram = value @ value.T / (768 * 2 / (5 * 768))
    assert (gram - torch.eye(256)).abs().max() < 1e-5


def test_a_value_is_a_function_of_seed_and_name_alone():
    name, config = "core.0.attention.q_proj.weight", CONFIGS["parcae"]
    shape = canonical_shapes(config)[name]
    torch.manual_seed(123)
    first = initial_value(config, seed=1, name=name, shape=shape)
    torch.randn(17)
    with torch.device("meta"):
        again = initial_value(config, seed=1, name=name, shape=shape)
    assert torch.equal(first, again)
    assert not torch.equal(first, initial_value(config, seed=2, name=name, shape=shape))
    other = initial_value(config, seed=1, name=name.replace("core", "coda"), shape=shape)
    assert not torch.equal(first, other)


def test_making_a_value_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    value_of("core.0.attention.q_proj.weight", CONFIGS["parcae"], seed=9)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_of_every_variant_has_a_rule(name):
    model = build_model(CONFIGS[name])
    for parameter in model.parameters():
        parameter.data.fill_(math.nan)
    initialize(model, CONFIGS[name], seed=0)
    for parameter_name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), parameter_name


def test_a_parameter_without_a_rule_is_named():
    with pytest.raises(ValueError, match=r"'core.0.novel.weight' of shape \(3, 4\)"):
        initial_value(OFFICIAL_140M, seed=0, name="core.0.novel.weight", shape=(3, 4))


def test_every_block_is_the_identity_at_the_start():
    config = CONFIGS["parcae"]
    model = build_model(config)
    initialize(model, config, seed=0)
    ids = torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(0))
    h = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(fixed_depth(ids, 3, h))
        x = model.embedding.weight[ids]
        e = x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()
        for _ in range(3):
            h = math.sqrt(1 / 5) * h + 0.5 * math.log(5) * e
        z = h @ model.readout.weight.T
        z = z / (z.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()
    torch.testing.assert_close(logits, z @ model.embedding.weight.T, rtol=1e-4, atol=1e-5)


def test_output_projections_of_the_scaled_start_shrink_with_the_unrolled_depth():
    golden = read_json("init_stats")["other_strategies_nominal_std"]["scaled"]
    value = value_of("core.0.mlp.down_proj.weight", SCALED_140M)
    assert value.std().item() == pytest.approx(0.98658 * golden["out_proj"], rel=0.01)
    orthogonal = ModelConfig(vocab_size=VOCAB, init="scaled")
    value = value_of("core.0.mlp.down_proj.weight", orthogonal)
    assert value.std().item() == pytest.approx(golden["out_proj"], rel=1e-4)
