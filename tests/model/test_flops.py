"""Parameter counts and FLOPs against the authors' tables, the built models and torch's counter."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from golden_data import CONFIGS, read_json
from megaparcae.config.load import build_config
from megaparcae.config.presets import PRESETS
from megaparcae.config.schema import ModelConfig, RecurrenceConfig
from megaparcae.model.batch import Batch
from megaparcae.model.build import build_model
from megaparcae.model.expected_depth import expected_loops
from megaparcae.model.flops import (
    Recompute,
    authors_flops_per_token,
    count_parameters,
    expected_flops,
    hardware_flops_per_token,
    needed_flops,
    step_flops,
    unrolled_params,
)
from megaparcae.model.init import initialize
from megaparcae.model.loop_plan import LoopPlan

SIZES = {"140m": "140m", "370m": "370m", "770m": "770m", "1p3b": "1.3b"}
SMALL = ModelConfig(
    vocab_size=320, sequence_length=64, hidden_size=64, intermediate_size=192, num_heads=4
)
VARIANTS = {
    "parcae": SMALL,
    "transformer": replace(SMALL, architecture="transformer", num_layers=3),
    "swiglu_linear": replace(SMALL, mlp="swiglu", injection="linear", prelude_norm=False),
    "grouped_query": replace(SMALL, num_kv_heads=2, num_prelude_layers=1, num_core_layers=3),
    "untied_additive": replace(SMALL, tie_embeddings=False, injection="additive", readout=False),
    "plain": replace(SMALL, value_embeddings=False, qk_norm=False, qk_bias=True),
    "sandwich": replace(CONFIGS["huginn"], num_prelude_layers=2),
    "wide_mlp": replace(SMALL, intermediate_size=512, num_core_layers=1),
}
OUTSIDE = {"none": "none", "block": "block", "loop": "none", "selective": "selective"}


def preset_model(name: str) -> ModelConfig:
    return build_config({"preset": name}, where="test").model


def with_loops(config: ModelConfig, mean: int) -> ModelConfig:
    return replace(config, recurrence=RecurrenceConfig(mean_recurrence=mean))


def test_torch_is_not_needed_to_count():
    code = "import sys, megaparcae.model.flops; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("size", SIZES)
def test_parameters_of_the_presets_are_those_of_the_paper(size):
    golden = read_json("parcae_sizes")["models"][SIZES[size]]
    config = preset_model(size)
    count = count_parameters(config)
    parts = golden["parcae"]["by_component"]
    assert count.total == golden["parcae"]["total"]
    assert asdict(count) == {
        "embedding": parts["wte"],
        "value_embeddings": parts["value_embeds"],
        "prelude": parts["prelude"],
        "core": parts["core"],
        "coda": parts["coda"],
        "injection": parts["injection"],
        "readout": parts["C"],
        "norms": parts["model_norms"],
        "head": 0,
    }
    for mean, params in golden["unrolled_parameters_at_mu"].items():
        assert unrolled_params(with_loops(config, int(mean))) == params
    baseline = preset_model(f"transformer_{size}")
    assert count_parameters(baseline).total == golden["transformer"]["total"]
    assert unrolled_params(baseline) == golden["transformer"]["total"]


def test_parameters_of_the_rdm_setup_are_those_printed_in_the_paper():
    printed = read_json("parcae_sizes")["table17"]["printed"]
    for preset, name in (
        ("rdm_100m", "RDM-100M"),
        ("rdm_350m", "RDM-350M"),
        ("parcae_350m", "Parcae-350M"),
    ):
        assert count_parameters(preset_model(preset)).total == printed[name]
    # The table repeats RDM's number for Parcae-100M; its own rule gives this one.
    assert count_parameters(preset_model("parcae_100m")).total == 113_189_888


@pytest.mark.parametrize("name", [*PRESETS, *VARIANTS, *CONFIGS])
def test_counted_parameters_are_those_of_the_built_model(name):
    config = VARIANTS.get(name) or CONFIGS.get(name) or preset_model(name)
    with torch.device("meta"):
        model = build_model(config)
    parts = dict.fromkeys(asdict(count_parameters(config)), 0)
    for parameter_name, parameter in model.named_parameters():
        part = parameter_name.split(".")[0]
        part = {"layers": "prelude", "prelude_norm": "norms", "final_norm": "norms"}.get(part, part)
        parts[part] += parameter.numel()
    assert asdict(count_parameters(config)) == parts


@pytest.mark.parametrize("size", SIZES)
def test_the_authors_flops_are_exact_integers(size):
    golden = read_json("flops")["models"][SIZES[size]]
    config = preset_model(size)
    for mean, row in golden["per_mean_recurrence"].items():
        model = with_loops(config, int(mean))
        assert model.recurrence.num_grad_loops == row["mean_backprop"]
        assert authors_flops_per_token(model) == row["flops_per_token"]
        found = authors_flops_per_token(model, head_not_tables=True)
        assert found == row["with_head_without_tables"]
    baseline = preset_model(f"transformer_{size}")
    assert authors_flops_per_token(baseline) == golden["transformer"]["flops_per_token"]


def run_counted(config: ModelConfig, n: list[int], k: list[int], mode: str, fused: bool) -> int:
    """FLOPs by torch's counter of a forward and backward pass of rows with these depths."""
    model = build_model(config)
    initialize(model, config, seed=0)
    model.set_recompute(prelude=OUTSIDE[mode], core=mode, coda=OUTSIDE[mode])
    ids = torch.randint(config.vocab_size, (len(n), config.sequence_length))
    plan, state = LoopPlan.from_depths(n, k), torch.zeros(*ids.shape, config.hidden_size)
    batch = Batch(ids=ids, labels=ids, plan=plan, start_state=lambda: state)

    def forward(q, k, v, *rest, **options) -> int:  # torch does not know the CPU's fused attention
        return sdpa_flop_count(q, k, v)

    def backward(grad, q, k, v, *rest, **options) -> int:
        return sdpa_backward_flop_count(grad, q, k, v)

    ops = torch.ops.aten
    own = {
        ops._scaled_dot_product_flash_attention_for_cpu: forward,
        ops._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }
    backend = SDPBackend.FLASH_ATTENTION if fused else SDPBackend.MATH
    counter = FlopCounterMode(display=False, custom_mapping=own)
    with sdpa_kernel(backend), counter:
        model(batch).backward()
    return counter.get_total_flops()


CASES = [(name, ([3, 0], [2, 1])) for name in VARIANTS]
CASES += [("parcae", depths) for depths in (([0, 0], [1, 1]), ([0], [4]), ([4], [4]))]


@pytest.mark.parametrize(("name", "depths"), CASES, ids=str)
def test_needed_flops_are_what_torch_counts_without_anything_done_twice(name, depths):
    config, (n, k) = VARIANTS[name], depths
    found = run_counted(config, n, k, "none", fused=False)
    counted = step_flops(
        config,
        rows_no_grad=sum(n),
        rows_grad=sum(k),
        rows=len(n),
        sequence_length=config.sequence_length,
        causal=False,
    )
    assert counted.total == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize("mode", OUTSIDE)
@pytest.mark.parametrize("name", ["parcae", "swiglu_linear", "grouped_query", "sandwich"])
def test_executed_flops_are_what_torch_counts(name, mode):
    config, n, k = VARIANTS[name], [2, 0], [2, 1]
    found = run_counted(config, n, k, mode, fused=True)
    modes = Recompute(prelude=OUTSIDE[mode], core=mode, coda=OUTSIDE[mode])
    counted = step_flops(
        config,
        rows_no_grad=sum(n),
        rows_grad=sum(k),
        rows=len(n),
        sequence_length=config.sequence_length,
        executed=modes,
        causal=False,
    )
    assert counted.total == pytest.approx(found, rel=0.02)


def test_checkpointing_the_core_costs_less_than_a_third_more_of_its_loops_with_gradient():
    plain = expected_flops(SMALL, executed=Recompute())
    again = expected_flops(SMALL, executed=Recompute(core="block"))
    assert again.core_grad / plain.core_grad < 4 / 3
    assert replace(again, core_grad=plain.core_grad) == plain


def test_the_causal_discount_halves_the_scores_and_nothing_else():
    d, s, layers = SMALL.hidden_size, SMALL.sequence_length, SMALL.num_prelude_layers
    with_mask, without = (expected_flops(SMALL, causal=causal) for causal in (True, False))
    assert without.prelude - with_mask.prelude == 3 * layers * 4 * d * (s - (s + 1) / 2)
    assert (without.head, without.projections) == (with_mask.head, with_mask.projections)


def test_a_step_is_the_sum_of_its_rows():
    whole = needed_flops(SMALL, 9, 11, 3, 64)
    pieces = [needed_flops(SMALL, n, k, 1, 64) for n, k in ((5, 4), (4, 4), (0, 3))]
    assert whole == pytest.approx(sum(pieces))
    without = needed_flops(SMALL, 0, 0, 3, 64)
    assert whole - without == pytest.approx((9 + 3 * 11) / 3 * (needed_flops(SMALL, 0, 1, 0, 64)))


def test_flops_are_counted_in_units_and_by_hand():
    config = ModelConfig(
        architecture="transformer",
        num_layers=1,
        vocab_size=64,
        sequence_length=7,
        hidden_size=32,
        intermediate_size=128,
        num_heads=1,
        value_embeddings=False,
    )
    block = 2 * (4 * 32 * 32 + 2 * 32 * 128)  # 24,576 per token
    scores = 2 * 2 * 32 * 4  # the mean position of seven sees four
    assert expected_flops(config).total == 3 * (block + scores + 2 * 32 * 64) == 87_552
    assert hardware_flops_per_token(config) == 87_552 + scores / 2


@pytest.mark.parametrize(("mean", "most"), [(8, 4), (16, 8), (2, 1), (1, 1), (12, 6), (32, 8)])
@pytest.mark.parametrize(
    ("sampler", "name"),
    [
        ("poisson", "poisson-truncated-full"),
        ("poisson_full", "poisson-full"),
        ("poisson_fill", "poisson-fill"),
        ("fixed", "fixed"),
        ("lognormal_poisson", "lognormal-poisson (Huginn)"),
    ],
)
def test_expected_loops_are_the_exact_means(mean, most, sampler, name):
    exact = read_json("depth_sampling")["exact"][f"mu{mean}_b{most}"][name]
    config = RecurrenceConfig(mean_recurrence=mean, backprop_depth=most, sampler=sampler)
    n, k = expected_loops(config)
    tolerance = 1e-12 if sampler != "lognormal_poisson" else 3e-3  # its table is cut short
    assert k == pytest.approx(exact["k"].get("mean", exact["k"].get("value")), rel=tolerance)
    assert n == pytest.approx(exact["n"].get("mean", exact["n"].get("value")), rel=tolerance)
