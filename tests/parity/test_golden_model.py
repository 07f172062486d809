"""Logits, states, losses and gradients of the authors' models, at the golden tolerances.

Not covered: their per-token depths, an option that we do not have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from golden_data import (
    canonical,
    golden_model,
    largest,
    meta,
    official_gradients,
    relative,
    tensors,
)
from megaparcae.model.batch import Batch, fixed_depth
from megaparcae.model.loop_plan import LoopPlan, depth_order

LOGITS, STATES, LOSS, GRADIENT = 2e-5, 3e-5, 3e-6, 1e-5
LOOPED = {  # model: file of its inputs, prefix there, depths with golden logits
    "parcae": ("parcae_tiny_forward", "", (1, 2, 4, 8)),
    "swiglu_linear": ("parcae_variants", "swiglu_linear.", (1, 3)),
    "add_takase": ("parcae_variants", "add_takase.", (1, 3)),
    "huginn": ("huginn_tiny_forward", "", (1, 4, 8)),
}
MODES = ("none", "block", "loop", "selective")


def inputs_of(model: str) -> dict[str, Tensor]:
    file, prefix, _ = LOOPED[model]
    return tensors(file, prefix)


def training_batch(
    data: dict[str, Tensor], n: Sequence[int], k: Sequence[int], labels: str = "labels"
) -> tuple[Batch, list[int]]:
    """Rows with their own depths, deepest first, and the order that did it."""
    order = depth_order(n, k)
    batch = Batch(
        ids=data["input_ids"][order],
        labels=data[labels][order],
        plan=LoopPlan.from_depths([n[i] for i in order], [k[i] for i in order]),
        start_state=lambda: data["h0"][order],
    )
    return batch, order


def backward(module: nn.Module, batch: Batch) -> float:
    """Mean loss over the labels that count; gradients are left in the parameters."""
    module.zero_grad()
    loss = module(batch) / (batch.labels != -100).sum()
    loss.backward()
    return loss.item()


def assert_gradients(module: nn.Module, expected: dict[str, Tensor]) -> None:
    found = {name: p.grad for name, p in module.named_parameters()}
    assert set(expected) == set(found)
    wrong = {n: relative(found[n], g) for n, g in expected.items()}
    assert not {n: e for n, e in wrong.items() if e >= GRADIENT}


def assert_norms(model: str, module: nn.Module, expected: dict[str, float]) -> None:
    found = official_gradients(model, module)
    assert set(expected) == set(found)
    for name, norm in expected.items():
        assert found[name].norm().item() == pytest.approx(norm, rel=GRADIENT), name


class Recorder:
    """Keeps the outputs of modules, call by call, and the inputs of some."""

    def __init__(self) -> None:
        self.values: dict[str, list[Tensor]] = {}

    def outputs(self, name: str, module: nn.Module) -> None:
        module.register_forward_hook(lambda _m, _i, out: self.keep(name, out))

    def inputs(self, name: str, module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda _m, args: self.keep(name, args[0]))

    def keep(self, name: str, value: Tensor) -> None:
        self.values.setdefault(name, []).append(value.detach())


@pytest.mark.parametrize(
    ("model", "loops"), [(m, loops) for m, (_, _, depths) in LOOPED.items() for loops in depths]
)
def test_logits_at_a_fixed_depth_are_the_authors(model, loops):
    data = inputs_of(model)
    with torch.no_grad():
        logits = golden_model(model)(fixed_depth(data["input_ids"], loops, data["h0"]))
    assert largest(logits, data[f"logits_T{loops}"]) < LOGITS


@pytest.mark.parametrize("model", ["gpt", "gqa"])
def test_logits_loss_and_gradients_of_the_transformer_are_the_authors(model):
    data = tensors("gpt_tiny_forward", "gqa." if model == "gqa" else "")
    info = meta("gpt_tiny_forward")
    module = golden_model(model)
    with torch.no_grad():
        logits = module(Batch(ids=data["input_ids"]))
    assert largest(logits, data["logits"]) < LOGITS
    loss = backward(module, Batch(ids=data["input_ids"], labels=data["labels"]))
    assert abs(loss - (info["gqa"] if model == "gqa" else info)["loss"]) < LOSS
    if model == "gqa":
        assert_gradients(module, canonical(model, tensors("gpt_tiny_forward", "gqa.grad/")))
    else:
        assert_gradients(module, canonical(model, tensors("gpt_tiny_grad")))
        assert_norms(model, module, meta("gpt_tiny_grad")["grad_norm_per_parameter"])


@pytest.mark.parametrize("labels", ["labels", "labels_masked"])
@pytest.mark.parametrize("loops", [1, 2, 4, 8])
def test_losses_at_a_fixed_depth_are_the_authors(loops, labels):
    data = inputs_of("parcae")
    batch = fixed_depth(data["input_ids"], loops, data["h0"], labels=data[labels])
    with torch.no_grad():
        loss = golden_model("parcae")(batch) / (data[labels] != -100).sum()
    expected = meta("parcae_tiny_forward")["loss" + labels.removeprefix("labels")]
    assert abs(loss.item() - expected[f"T{loops}"]) < LOSS


@pytest.mark.parametrize("loops", [1, 4, 8])
def test_huginns_losses_and_normalised_states_are_the_authors(loops):
    data = inputs_of("huginn")
    module, seen = golden_model("huginn"), Recorder()
    seen.outputs("final_norm", module.final_norm)
    batch = fixed_depth(data["input_ids"], loops, data["h0"], labels=data["labels"])
    with torch.no_grad():
        loss = module(batch) / data["labels"].numel()
    assert abs(loss.item() - meta("huginn_tiny_forward")["loss"][f"T{loops}"]) < LOSS
    assert largest(seen.values["final_norm"][0], data[f"latent_T{loops}"]) < STATES


def test_every_state_on_the_way_is_the_authors():
    data = tensors("parcae_tiny_forward", "T4.")
    inputs = inputs_of("parcae")
    module, seen = golden_model("parcae"), Recorder()
    for i in range(2):
        seen.outputs(f"prelude_block{i}_out", module.prelude[str(i)])
    seen.outputs("e", module.prelude_norm)
    seen.inputs("u", module.core["0"])
    seen.outputs("h", module.core["1"])
    seen.outputs("C_out", module.readout)
    seen.outputs("coda_out", module.coda["1"])
    seen.outputs("ln_f_out", module.final_norm)
    with torch.no_grad():
        module(fixed_depth(inputs["input_ids"], 4, inputs["h0"]))
    found = {name: values[0] for name, values in seen.values.items() if name not in "uh"}
    found["u_1"] = seen.values["u"][0]
    found |= {f"h_{t}": h for t, h in enumerate(seen.values["h"], start=1)}
    expected = {name: value for name, value in data.items() if "attn" not in name}
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert largest(found[name], value) < STATES, name


def test_huginns_states_are_the_authors():
    data = inputs_of("huginn")
    module, seen = golden_model("huginn"), Recorder()
    seen.outputs("e", module.prelude["0"])
    seen.inputs("u", module.core["0"])
    seen.outputs("h", module.core["1"])
    with torch.no_grad():
        module(fixed_depth(data["input_ids"], 4, data["h0"]))
    assert largest(seen.values["e"][0], data["T4.e"]) < STATES
    assert largest(seen.values["u"][0], data["T4.u_1"]) < STATES
    for t, h in enumerate(seen.values["h"], start=1):
        assert largest(h, data[f"T4.h_{t}"]) < STATES


def test_queries_keys_values_and_outputs_of_attention_are_the_authors(monkeypatch):
    data = tensors("parcae_tiny_forward", "T4.prelude")
    inputs = inputs_of("parcae")
    calls = []
    attend = F.scaled_dot_product_attention

    def record(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        calls.append((q, k, v, attend(q, k, v, **options)))
        return calls[-1][-1]

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    with torch.no_grad():
        golden_model("parcae")(fixed_depth(inputs["input_ids"], 4, inputs["h0"]))
    for layer in range(2):
        for name, value in zip("qkvo", calls[layer], strict=True):
            row = value[0].transpose(0, 1)  # [S, H, hd]
            assert largest(row, data[f"{layer}.attn.{name}_row0"]) < STATES, (layer, name)


@pytest.mark.parametrize("labels", ["labels", "labels_masked"])
def test_gradients_with_a_depth_per_sequence_are_the_authors(labels):
    data, info = inputs_of("parcae"), meta("parcae_tiny_grad_perseq")
    module, seen = golden_model("parcae"), Recorder()
    seen.inputs("h_final", module.readout)
    batch, order = training_batch(data, info["n_no_grad"], info["k_grad"], labels)
    loss = backward(module, batch)
    masked = labels.removeprefix("labels")
    assert abs(loss - info["loss" + masked]) < LOSS
    assert largest(seen.values["h_final"][0], data["perseq.h_final"][order]) < STATES
    norms = "grad_norm_per_parameter" + ("_labels_masked" if masked else "")
    assert_norms("parcae", module, info[norms])
    if not masked:
        assert_gradients(module, canonical("parcae", tensors("parcae_tiny_grad_perseq")))
        total = math.sqrt(sum(p.grad.square().sum().item() for p in module.parameters()))
        assert total == pytest.approx(info["global_grad_norm"], rel=GRADIENT)


def test_gradients_with_one_depth_for_the_batch_are_the_authors():
    data, info = inputs_of("parcae"), meta("parcae_tiny_grad_perbatch")
    module, seen = golden_model("parcae"), Recorder()
    seen.inputs("h_final", module.readout)
    batch, _ = training_batch(data, [info["n_no_grad"]] * 3, [info["k_grad"]] * 3)
    assert abs(backward(module, batch) - info["loss"]) < LOSS
    assert largest(seen.values["h_final"][0], data["perbatch.h_final"]) < STATES
    assert_gradients(module, canonical("parcae", tensors("parcae_tiny_grad_perbatch")))
    assert_norms("parcae", module, info["grad_norm_per_parameter"])


def test_gradients_through_every_loop_are_the_authors():
    info = meta("parcae_tiny_forward")["perbatch_full_backprop_T7"]
    module = golden_model("parcae")
    batch, _ = training_batch(inputs_of("parcae"), [0] * 3, [7] * 3)
    assert abs(backward(module, batch) - info["loss"]) < LOSS
    assert_norms("parcae", module, info["grad_norm_per_parameter"])


@pytest.mark.parametrize("model", ["swiglu_linear", "add_takase"])
def test_gradients_of_the_variants_are_the_authors(model):
    info, data = meta("parcae_variants")[model], inputs_of(model)
    module = golden_model(model)
    batch, _ = training_batch(data, info["n"], info["k"])
    assert abs(backward(module, batch) - info["loss_perseq"]) < LOSS
    assert_norms(model, module, info["grad_norm_per_parameter"])
    if model == "swiglu_linear":  # of the other there are norms only
        assert_gradients(module, canonical(model, tensors("parcae_variants", f"{model}.grad/")))


def test_gradients_of_huginn_are_the_authors():
    data, info = inputs_of("huginn"), meta("huginn_tiny_forward")["train_n3_k4"]
    module = golden_model("huginn")
    rows = len(data["input_ids"])
    batch, _ = training_batch(data, [3] * rows, [4] * rows)
    assert abs(backward(module, batch) - info["loss"]) < LOSS
    assert_norms("huginn", module, info["grad_norm_per_parameter"])
    found = official_gradients("huginn", module)
    for name, gradient in tensors("huginn_tiny_forward", "grad_n3_k4/").items():
        assert relative(found[name], gradient) < GRADIENT, name


@pytest.mark.parametrize("model", [*LOOPED, "gpt"])
def test_activation_checkpointing_changes_neither_loss_nor_gradients(model):
    module = golden_model(model)
    if model == "gpt":
        data = tensors("gpt_tiny_forward")
        batch = Batch(ids=data["input_ids"], labels=data["labels"])
    else:
        data = inputs_of(model)
        rows = len(data["input_ids"])
        batch, _ = training_batch(data, [0, 4, 5][:rows], [1, 2, 2][:rows])
    results = {}
    for mode in MODES:
        outside = "none" if mode == "loop" else mode
        module.set_recompute(prelude=outside, core=mode, coda=outside)
        loss = backward(module, batch)
        results[mode] = loss, {n: p.grad.clone() for n, p in module.named_parameters()}
    loss, gradients = results.pop("none")
    for mode, (other, found) in results.items():
        assert other == loss, mode
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-9, msg=name)
