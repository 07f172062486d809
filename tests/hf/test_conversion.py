"""Both directions: the authors' formats, exports, Llama-style models; byte-equal round trips."""

from __future__ import annotations

import dataclasses
import json
import weakref
from pathlib import Path

import pytest
import torch
from golden_models import hf_model, meta, tensors
from test_export import FP32, RDM, SMALL, lazy, random_weights

from megaparcae.checkpoint.model_tensors import (
    LazyTensors,
    read_model_tensors,
    read_run_config,
    write_model_tensors,
)
from megaparcae.config.schema import ModelConfig
from megaparcae.errors import UserError
from megaparcae.hf.config import from_hf_config, to_hf_config
from megaparcae.hf.convert import export_checkpoint, import_checkpoint
from megaparcae.hf.export import export_hf, export_official
from megaparcae.hf.load import load_folder
from megaparcae.hf.official import rotary_buffer
from megaparcae.hf.retrofit import Split, retrofit

AUTHORS = ("parcae_tiny", "gpt_tiny", "huginn_tiny")


def authors_folder(name: str, folder: Path, kind: str = "pytorch_model.bin") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(meta(name)["config"]))
    weights = tensors(name)
    match kind:
        case "model.safetensors":
            from safetensors.torch import save_file

            save_file(weights, folder / kind)
        case "model.pt":
            torch.save({"model": {f"_orig_mod.{k}": v for k, v in weights.items()}}, folder / kind)
        case _:
            torch.save(weights, folder / kind)
    return folder


@pytest.mark.parametrize("kind", ["pytorch_model.bin", "model.pt", "model.safetensors"])
@pytest.mark.parametrize("name", AUTHORS)
def test_the_authors_checkpoints_come_in_and_go_out_byte_equal(
    name: str, kind: str, tmp_path: Path
) -> None:
    loaded = load_folder(authors_folder(name, tmp_path / "theirs", kind))
    run = import_checkpoint(loaded, tmp_path / "run", force=False)
    out = export_checkpoint(run, tmp_path / "again", kind="official", tokenizer=None, options=FP32)
    theirs = tensors(name)
    theirs.setdefault("lm_head.weight", theirs["transformer.wte.weight"])
    ours = torch.load(out / "pytorch_model.bin", weights_only=True)
    assert set(ours) == set(theirs)
    for key, value in theirs.items():
        assert ours[key].view(torch.uint8).equal(value.contiguous().view(torch.uint8)), key
    config, original = json.loads((out / "config.json").read_text()), meta(name)["config"]
    free = {"name"} if name == "huginn_tiny" else {"name", "hf_config", "use_fused_head"}
    same = set(config) & set(original) - free
    assert {k: config[k] for k in same} == {k: original[k] for k in same}
    assert load_folder(out).config == loaded.config


@pytest.mark.parametrize("name", AUTHORS)
def test_an_authors_checkpoint_becomes_an_export_with_their_logits(
    name: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    loaded = load_folder(authors_folder(name, tmp_path / "theirs"))
    out = export_hf(loaded.tensors, loaded.config, None, tmp_path / "out", FP32)
    model = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True).eval()
    ids = tensors(f"{name}_forward")["input_ids"]
    with torch.no_grad():
        ours, direct = model(ids).logits, hf_model(meta(name)["config"], tensors(name))(ids).logits
    assert torch.equal(ours, direct)


@pytest.mark.parametrize("config", [SMALL, RDM, dataclasses.replace(SMALL, num_heads=8)])
def test_checkpoint_to_export_and_back_is_the_identity(config: ModelConfig, tmp_path: Path) -> None:
    weights = random_weights(config)
    loaded = load_folder(export_hf(weights, config, None, tmp_path / "out", FP32))
    assert loaded.config == config
    for name, tensor in loaded.tensors.items():
        rows = config.vocab_size if "embedding" in name or "head" in name else len(tensor)
        assert torch.equal(tensor[:rows], weights[name][:rows])
        assert tensor.shape == weights[name].shape
    again = export_hf(loaded.tensors, loaded.config, None, tmp_path / "again", FP32)
    first, second = (p / "model.safetensors" for p in (tmp_path / "out", again))
    assert first.read_bytes() == second.read_bytes()


def test_every_field_of_the_model_configuration_survives() -> None:
    changed = {
        "vocab_size": 1000, "vocab_multiple": 7, "sequence_length": 11, "hidden_size": 96,
        "intermediate_size": 5, "num_heads": 6, "num_kv_heads": 3, "num_prelude_layers": 3,
        "num_core_layers": 4, "num_coda_layers": 5, "num_layers": 9, "block": "sandwich",
        "mlp": "swiglu", "qk_norm": False, "qk_bias": True, "value_embeddings": False,
        "clip_qkv": 2.0, "logit_softcap": 3.0, "norm_eps": 0.1, "rope_theta": 7.0,
        "tie_embeddings": False, "scale_embeddings": True, "injection": "linear",
        "prelude_norm": False, "readout": False, "loop_norm": True, "state_init": "unit",
        "init": "scaled", "init_orthogonal": False, "residual_scale": 3.0,
    }  # fmt: skip
    recurrence = dataclasses.replace(ModelConfig().recurrence, mean_recurrence=9, sampler="fixed")
    config = ModelConfig(recurrence=recurrence, **changed)
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    assert fields - set(changed) <= {"architecture", "recurrence"}
    assert from_hf_config(to_hf_config(config)) == config


def test_a_wrong_rotary_base_is_noticed(tmp_path: Path) -> None:
    folder = authors_folder("parcae_tiny", tmp_path / "theirs")
    config = meta("parcae_tiny")["config"]
    config["rope_settings"] = config["rope_settings"] | {"rope_base": 10000}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="rope_base"):
        load_folder(folder)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"n_layers_in_coda": 1}, "unexpected"),
        ({"n_layers_in_coda": 3}, "missing"),
        ({"intermediate_size": 128}, "shape"),
        ({"nonsense": 1, "use_abacus": True}, "use_abacus"),
        ({"injection_type": "cubic"}, "injection_type='cubic'"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    folder = authors_folder("parcae_tiny", tmp_path / "theirs")
    (folder / "config.json").write_text(json.dumps(meta("parcae_tiny")["config"] | change))
    with pytest.raises(UserError, match=message):
        dict(load_folder(folder).tensors)


def test_what_the_authors_format_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="num_kv_heads"):
        export_official(random_weights(SMALL), SMALL, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_rotary_buffer_is_the_authors_bit_for_bit() -> None:
    config = load_config("parcae_tiny")
    assert torch.equal(rotary_buffer(config), tensors("parcae_tiny")["freqs_cis"])


def load_config(name: str) -> ModelConfig:
    from megaparcae.hf.official import model_config_from_official

    return model_config_from_official(meta(name)["config"])


def llama(tmp_path: Path, **changes: object):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, **changes,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.5 if parameter.ndim == 1 else 0.0, 0.2)
    model.save_pretrained(tmp_path / "llama")
    return model


@pytest.mark.parametrize("injection", ["diagonal", "linear", "additive"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_retrofitted_llama_equals_the_original_at_one_loop(
    injection: str, tied: bool, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    original = llama(tmp_path, tie_word_embeddings=tied)
    loaded = retrofit(tmp_path / "llama", Split(2, 2, 2), mean_recurrence=4, injection=injection)
    run = import_checkpoint(loaded, tmp_path / "run", force=False)
    config = read_run_config(run / "step_00000000").model
    weights = read_model_tensors(run / "step_00000000")
    out = export_hf(weights, config, None, tmp_path / "out", FP32)
    looped = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True).eval()
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        theirs = original(ids).logits
        assert (looped(ids, num_loops=1).logits - theirs).abs().max() <= 2e-5
        assert (looped(ids, num_loops=2).logits - theirs).abs().max() > 1e-3


def test_our_own_transformer_can_be_retrofitted(tmp_path: Path) -> None:
    folder = authors_folder("gpt_tiny", tmp_path / "gpt")
    loaded = retrofit(folder, Split(1, 1, 1), mean_recurrence=4)
    out = export_hf(loaded.tensors, loaded.config, None, tmp_path / "out", FP32)
    from transformers import AutoModelForCausalLM

    looped = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True).eval()
    data = tensors("gpt_tiny_forward")
    with torch.no_grad():
        logits = looped(data["input_ids"], num_loops=1).logits
    assert (logits - data["logits"]).abs().max() <= 2e-5


def test_retrofitting_says_when_layers_do_not_add_up(tmp_path: Path) -> None:
    llama(tmp_path)
    with pytest.raises(UserError, match="--drop-layers"):
        retrofit(tmp_path / "llama", Split(1, 2, 1), mean_recurrence=4)
    with pytest.raises(UserError, match="takes 9 layers"):
        retrofit(tmp_path / "llama", Split(3, 3, 3), mean_recurrence=4)
    loaded = retrofit(tmp_path / "llama", Split(1, 2, 1), mean_recurrence=4, drop_layers=True)
    assert set(dict(loaded.tensors)) == set(loaded.tensors.shapes)
    with pytest.raises(UserError, match="--retrofit"):
        load_folder(tmp_path / "llama")


def test_other_models_and_empty_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config.json is missing"):
        load_folder(tmp_path)
    (tmp_path / "config.json").write_text("{,")
    with pytest.raises(UserError, match="isn't JSON"):
        load_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(meta("gpt_tiny")["config"]))
    with pytest.raises(UserError, match="no weights"):
        load_folder(tmp_path)


def test_a_damaged_weight_file_is_named(tmp_path: Path) -> None:
    folder = authors_folder("gpt_tiny", tmp_path / "theirs")
    data = (folder / "pytorch_model.bin").read_bytes()
    (folder / "pytorch_model.bin").write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=r"pytorch_model.bin can't be read"):
        load_folder(folder)


def test_importing_onto_a_run_needs_force(tmp_path: Path) -> None:
    loaded = load_folder(authors_folder("gpt_tiny", tmp_path / "theirs"))
    import_checkpoint(loaded, tmp_path / "run", force=False)
    with pytest.raises(UserError, match="--force"):
        import_checkpoint(loaded, tmp_path / "run", force=False)
    import_checkpoint(loaded, tmp_path / "run", force=True)


def test_untied_and_tied_heads_must_fit_the_configuration(tmp_path: Path) -> None:
    folder = authors_folder("parcae_tiny", tmp_path / "theirs")
    weights = tensors("parcae_tiny")
    weights["lm_head.weight"] = weights["lm_head.weight"] + 1
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="tie_embeddings"):
        load_folder(folder)
    assert lazy(weights).shapes


@pytest.mark.parametrize("kind", ["hf", "official", "checkpoint"])
def test_no_more_than_one_tensor_and_its_copy_is_held(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megaparcae.hf.verify.RESIDENT_BYTES", 0)
    config = dataclasses.replace(SMALL, num_kv_heads=4, value_embeddings=True)
    weights, alive = random_weights(config), weakref.WeakSet()
    most = 0

    def load(name: str) -> torch.Tensor:
        nonlocal most
        tensor = weights[name].clone()
        alive.add(tensor)
        most = max(most, sum(t.numel() for t in alive))
        return tensor

    counted = LazyTensors(weights.shapes, load)
    match kind:
        case "hf":
            export_hf(counted, config, None, tmp_path / "out", FP32)
        case "official":
            export_official(counted, config, tmp_path / "out", FP32)
        case _:
            write_model_tensors(tmp_path / "out", counted)
    largest = max(w.numel() for w in weights.values())
    assert most <= 2 * largest
