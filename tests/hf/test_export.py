"""Exported folders: their content, that they load anywhere, and that failures leave nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from golden_models import canonical, meta, tensors
from safetensors import safe_open

from megaparcae.checkpoint.model_tensors import (
    LazyTensors,
    read_model_tensors,
    write_model_tensors,
)
from megaparcae.checkpoint.names import canonical_shapes
from megaparcae.config.schema import ModelConfig
from megaparcae.errors import UserError
from megaparcae.hf.export import ExportOptions, export_hf
from megaparcae.hf.official import model_config_from_official

FP32 = ExportOptions(dtype=torch.float32)


def lazy(weights: dict[str, torch.Tensor]) -> LazyTensors:
    return LazyTensors({k: tuple(v.shape) for k, v in weights.items()}, weights.__getitem__)


def random_weights(config: ModelConfig, seed: int = 0) -> LazyTensors:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda shape: torch.randn(shape, generator=generator) * 0.2  # noqa: E731
    return lazy({name: draw(shape) for name, shape in canonical_shapes(config).items()})


def parcae_tiny() -> tuple[ModelConfig, LazyTensors]:
    config = model_config_from_official(meta("parcae_tiny")["config"])
    return config, lazy(canonical(config, tensors("parcae_tiny")))


SMALL = ModelConfig(
    vocab_size=259,
    vocab_multiple=128,
    sequence_length=32,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    num_prelude_layers=1,
    num_core_layers=1,
    num_coda_layers=1,
)
RDM = dataclasses.replace(
    SMALL,
    block="sandwich",
    mlp="swiglu",
    qk_norm=False,
    qk_bias=True,
    value_embeddings=False,
    injection="linear",
    prelude_norm=False,
    readout=False,
    loop_norm=True,
    scale_embeddings=True,
    tie_embeddings=False,
    norm_eps=0.1,
)
VARIANTS = {
    "grouped query, padded vocabulary": SMALL,
    "RDM, untied": RDM,
    "additive, soft cap, clamp": dataclasses.replace(
        SMALL, injection="additive", logit_softcap=5.0, clip_qkv=1.0, residual_scale=2.0
    ),
    "transformer": dataclasses.replace(SMALL, architecture="transformer", num_layers=3),
    "no prelude, no coda": dataclasses.replace(SMALL, num_prelude_layers=0, num_coda_layers=0),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_kind_of_model_is_exported_with_equal_logits(name: str, tmp_path: Path) -> None:
    export_hf(random_weights(VARIANTS[name]), VARIANTS[name], None, tmp_path / "out", FP32)
    assert (tmp_path / "out" / "README.md").exists()


@pytest.mark.parametrize("name", VARIANTS)
def test_models_larger_than_memory_are_checked_block_by_block(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megaparcae.hf.verify.RESIDENT_BYTES", 0)
    export_hf(random_weights(VARIANTS[name]), VARIANTS[name], None, tmp_path / "out", FP32)


@pytest.mark.parametrize("tied", [True, False])
def test_padded_rows_are_cut_and_tied_weights_are_written_once(tied: bool, tmp_path: Path) -> None:
    config = dataclasses.replace(SMALL, tie_embeddings=tied)
    export_hf(random_weights(config), config, None, tmp_path / "out", FP32)
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == 259
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        assert file.get_slice("model.embedding.weight").get_shape() == [259, 32]
        assert file.get_slice("model.value_embeddings.2.weight").get_shape()[0] == 259
        assert ("lm_head.weight" in file.keys()) == (not tied)  # noqa: SIM118


def test_kept_padding_is_counted_and_never_generated(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    options = dataclasses.replace(FP32, keep_padding=True)
    out = export_hf(random_weights(SMALL), SMALL, None, tmp_path / "out", options)
    model = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    assert model.config.vocab_size == 384
    ids = model.generate(torch.tensor([[1, 2]]), max_new_tokens=20, do_sample=True, top_k=0)
    assert ids.max() < 259


def test_shards_are_small_and_load_together(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config, weights = parcae_tiny()
    options = dataclasses.replace(FP32, shard_bytes=200_000)
    out = export_hf(weights, config, None, tmp_path / "out", options)
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 5
    assert all(file.stat().st_size < 210_000 for file in files)
    model = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name.removeprefix("model.")])


def test_a_device_map_may_leave_layers_on_disk(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM

    config, weights = parcae_tiny()
    out = export_hf(weights, config, None, tmp_path / "out", FP32)
    load = AutoModelForCausalLM.from_pretrained
    whole = load(out, trust_remote_code=True, device_map="cpu")
    places = {f"model.{name}": "cpu" for name, _ in whole.model.named_children()}
    places |= {"lm_head": "cpu", "model.core": "disk", "model.coda": "disk"}
    spread = load(out, trust_remote_code=True, device_map=places, offload_folder=tmp_path / "disk")
    assert next(spread.model.core.parameters()).is_meta
    ids = torch.arange(24).view(2, 12)
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(spread.generate(ids, **options), whole.generate(ids, **options))


def test_wrong_weights_never_get_the_folders_name(tmp_path: Path) -> None:
    config, weights = parcae_tiny()
    calls = {"B": 0}

    def load(name: str) -> torch.Tensor:
        calls["B"] += name == "injection.B"
        wrong = name == "injection.B" and calls["B"] == 1
        return weights[name] * (1.01 if wrong else 1.0)

    with pytest.raises(UserError, match="logits differ"):
        export_hf(LazyTensors(weights.shapes, load), config, None, tmp_path / "out", FP32)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_refused_and_replaced_by_force(tmp_path: Path) -> None:
    config, weights = parcae_tiny()
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").touch()
    with pytest.raises(UserError, match="--force"):
        export_hf(weights, config, None, out, FP32)
    assert (out / "mine").exists()
    export_hf(weights, config, None, out, dataclasses.replace(FP32, force=True))
    assert not (out / "mine").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_missing_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    config, weights = parcae_tiny()
    changed = {("readout.wieght" if k == "readout.weight" else k): v for k, v in weights.items()}
    with pytest.raises(UserError, match=r"'readout.weight' \(is it 'readout.wieght'\?\)"):
        export_hf(lazy(changed), config, None, tmp_path / "out", FP32)


FRESH = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM, pipeline
folder, copy, logits = sys.argv[1:]
assert AutoConfig.from_pretrained(folder, trust_remote_code=True).model_type == "parcae"
model, report = AutoModelForCausalLM.from_pretrained(
    folder, trust_remote_code=True, output_loading_info=True
)
assert not any(report.values()), report
assert not any(name.startswith("megaparcae") for name in sys.modules)
ids = torch.arange(24).view(2, 12)
with torch.no_grad():
    out = {t: model(ids, num_loops=t).logits for t in (1, 2, 4, 8)}
torch.save(out, logits)
plain = model.generate(ids, max_new_tokens=8, use_cache=False, do_sample=False)
assert torch.equal(plain, model.generate(ids, max_new_tokens=8, do_sample=False))
model.get_input_embeddings().weight.data[0] += 1
assert torch.equal(model.lm_head.weight, model.get_input_embeddings().weight)
model.save_pretrained(copy)
again = AutoModelForCausalLM.from_pretrained(copy, trust_remote_code=True)
for name, value in model.state_dict().items():
    assert torch.equal(value, again.state_dict()[name]), name
"""


@pytest.mark.slow
def test_a_fresh_offline_process_loads_generates_and_saves_again(tmp_path: Path) -> None:
    from golden_models import hf_model

    config, weights = parcae_tiny()
    out = export_hf(weights, config, None, tmp_path / "out", FP32)
    command = [sys.executable, "-W", "error::FutureWarning", "-c", FRESH]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    paths = [str(out), str(tmp_path / "copy"), str(tmp_path / "logits.pt")]
    done = subprocess.run(
        command + paths, env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    model = hf_model(meta("parcae_tiny")["config"], tensors("parcae_tiny"))
    ids = torch.arange(24).view(2, 12)
    for num_loops, theirs in torch.load(tmp_path / "logits.pt").items():
        with torch.no_grad():
            ours = model(ids, num_loops=num_loops).logits
        assert (ours - theirs).abs().max() <= 1e-5


def test_bf16_exports_hold_the_rounded_weights(tmp_path: Path) -> None:
    config, weights = parcae_tiny()
    out = export_hf(weights, config, None, tmp_path / "out")
    with safe_open(out / "model.safetensors", "pt") as file:
        stored = file.get_tensor("model.readout.weight")
    assert torch.equal(stored, weights["readout.weight"].bfloat16())


def test_weights_go_through_a_checkpoint_folder_unchanged(tmp_path: Path) -> None:
    _, weights = parcae_tiny()
    write_model_tensors(tmp_path / "step_00000000", weights)
    again = read_model_tensors(tmp_path / "step_00000000")
    assert again.shapes == weights.shapes
    assert all(torch.equal(again[name], weights[name]) for name in weights)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="isn't a checkpoint"):
        read_model_tensors(tmp_path)
