"""The exported model gives the logits of the authors' code, in every dialect."""

from __future__ import annotations

import pytest
import torch
from golden_models import canonical, hf_model, meta, tensors

TOLERANCE = 2e-5


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert (ours - theirs).abs().max().item() <= tolerance


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("num_loops", [1, 2, 4, 8])
def test_parcae_gives_the_golden_logits_at_every_depth(num_loops: int, attention: str) -> None:
    model = hf_model(meta("parcae_tiny")["config"], tensors("parcae_tiny"))
    model.set_attn_implementation(attention)
    data = tensors("parcae_tiny_forward")
    with torch.no_grad():
        out = model(data["input_ids"], num_loops=num_loops, h0=data["h0"])
    close(out.logits, data[f"logits_T{num_loops}"])


@pytest.mark.parametrize("name", ["swiglu_linear", "add_takase"])
@pytest.mark.parametrize("num_loops", [1, 3])
def test_variants_give_the_golden_logits(name: str, num_loops: int) -> None:
    data = tensors("parcae_variants", f"{name}.")
    weights = tensors("parcae_variants", f"{name}.weights/")
    model = hf_model(meta("parcae_variants")[name]["config"], weights)
    with torch.no_grad():
        out = model(data["input_ids"], num_loops=num_loops, h0=data["h0"])
    close(out.logits, data[f"logits_T{num_loops}"])


def test_transformer_gives_the_golden_logits() -> None:
    model = hf_model(meta("gpt_tiny")["config"], tensors("gpt_tiny"))
    data = tensors("gpt_tiny_forward")
    with torch.no_grad():
        close(model(data["input_ids"]).logits, data["logits"])


def test_grouped_query_transformer_gives_the_golden_logits() -> None:
    shape = {"n_embd": 32, "num_key_value_heads": 2, "n_layer": 2, "vocab_size": 64}
    shape |= {"padded_vocab_size": 64, "block_size": 32, "intermediate_size": 64}
    config = meta("gpt_tiny")["config"] | shape
    model = hf_model(config, tensors("gpt_tiny_forward", "gqa.weights/"))
    data = tensors("gpt_tiny_forward", "gqa.")
    with torch.no_grad():
        close(model(data["input_ids"]).logits, data["logits"])


@pytest.mark.parametrize("num_loops", [1, 4, 8])
def test_huginn_gives_the_golden_logits(num_loops: int) -> None:
    model = hf_model(meta("huginn_tiny")["config"], tensors("huginn_tiny"))
    data = tensors("huginn_tiny_forward")
    with torch.no_grad():
        out = model(data["input_ids"], num_loops=num_loops, h0=data["h0"])
    close(out.logits, data[f"logits_T{num_loops}"])


def test_loops_without_gradient_come_first() -> None:
    official = tensors("huginn_tiny")
    model = hf_model(meta("huginn_tiny")["config"], official)
    data = tensors("huginn_tiny_forward")
    labels = torch.nn.functional.pad(data["labels"], (1, 0), value=-100)  # ours are shifted inside
    ids = torch.nn.functional.pad(data["input_ids"], (0, 1))
    h0 = torch.nn.functional.pad(data["h0"], (0, 0, 0, 1))
    loss = model(ids, labels=labels, num_loops=7, num_grad_loops=4, h0=h0).loss
    assert abs(loss.item() - meta("huginn_tiny_forward")["train_n3_k4"]["loss"]) <= 3e-6
    loss.backward()
    grads = {f"model.{k}": v for k, v in canonical_gradients(model, data).items()}
    parameters = dict(model.named_parameters())
    for name, theirs in grads.items():
        ours = parameters[name].grad
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm(), name


def canonical_gradients(model, data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    grads = {k.removeprefix("grad_n3_k4/"): v for k, v in data.items() if k.startswith("grad")}
    from megaparcae.hf.config import from_hf_config

    return canonical(from_hf_config(model.config), grads | {"transformer.h.attn.Wqkv.weight": None})


def test_states_between_loops_are_the_golden_states() -> None:
    model = hf_model(meta("parcae_tiny")["config"], tensors("parcae_tiny"))
    data = tensors("parcae_tiny_forward")
    with torch.no_grad():
        out = model(data["input_ids"], num_loops=4, h0=data["h0"], output_hidden_states=True)
    for loop in range(1, 5):
        close(out.hidden_states[2 + 2 * loop], data[f"T4.h_{loop}"], 3e-5)
    close(out.hidden_states[-1], data["T4.ln_f_out"], 3e-5)
