"""Which update each parameter gets: the paper's table 20."""

from __future__ import annotations

import pytest

from megaparcae.checkpoint.names import canonical_shapes
from megaparcae.config.load import build_config
from megaparcae.config.presets import PRESETS
from megaparcae.config.schema import ModelConfig
from megaparcae.optim.param_groups import describe, parameter_rule


def rules(config: ModelConfig, optimizer: str = "muon_adamw") -> dict:
    return {n: parameter_rule(n, s, optimizer) for n, s in canonical_shapes(config).items()}


def test_muon_has_attention_and_mlp_matrices_and_nothing_else():
    muon = {n for n, rule in rules(ModelConfig(mlp="swiglu")).items() if rule.kind == "muon"}
    assert muon == {
        f"{part}.{i}.{weight}.weight"
        for part in ("prelude", "core", "coda")
        for i in (0, 1)
        for weight in (
            *(f"attention.{x}_proj" for x in "qkvo"),
            *(f"mlp.{x}_proj" for x in ("up", "gate", "down")),
        )
    }


def test_norms_biases_injection_and_readout_are_not_decayed():
    config = ModelConfig(qk_bias=True, block="sandwich")
    exempt = {n for n, rule in rules(config, "adamw").items() if not rule.decayed}
    assert all("norm" in n or "bias" in n or n.startswith(("injection", "readout")) for n in exempt)
    assert {"injection.A_log", "injection.dt_bias", "injection.B", "readout.weight"} <= exempt
    kept = {n for n, rule in rules(config, "adamw").items() if rule.decayed}
    assert not any("norm" in n or "bias" in n for n in kept)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_rdm"])
def test_adamw_optimizers_update_everything_by_adamw(optimizer):
    assert {rule.kind for rule in rules(ModelConfig(), optimizer).values()} == {"adamw"}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_parameter_of_every_preset_has_a_rule(preset):
    config = build_config({"preset": preset}, where="test")
    assert rules(config.model, config.optimizer.name)


def test_a_name_without_a_rule_is_an_error_that_names_it():
    with pytest.raises(ValueError, match=r"'core\.0\.attention\.mystery' has no optimizer rule"):
        parameter_rule("core.0.attention.mystery", (4, 4), "muon_adamw")


def test_a_flattened_muon_weight_is_refused():
    with pytest.raises(ValueError, match="needs a matrix"):
        parameter_rule("core.0.mlp.up_proj.weight", (64,), "muon_adamw")


def test_log_line_counts_what_each_update_has_as_the_authors_do_at_140m():
    config = ModelConfig()
    shapes = canonical_shapes(config)
    line = describe((n, shapes[n], rule.kind) for n, rule in rules(config).items())
    # The authors count 576 gate elements more with Muon and less with AdamW.
    assert "Muon updates 36 matrices (42,467,328 parameters)" in line
    assert "AdamW 25 tensors (101,855,808 parameters)" in line
