"""bf16 autocast: types along the way, and gradients close to those of fp32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from golden_data import CONFIGS, golden_model, meta, relative, tensors
from megaparcae.model.batch import Batch, fixed_depth
from megaparcae.model.build import build_model
from megaparcae.model.init import initialize
from megaparcae.model.loop_plan import LoopPlan, depth_order

DATA = tensors("parcae_tiny_forward")
GOLDEN = meta("parcae_tiny_forward")["bf16_autocast"]
DEPTHS = {"with loops without gradient": ([0, 1, 7], [2, 4, 4]), "without": ([0] * 3, [2, 4, 4])}


def training_batch(n: list[int], k: list[int]) -> Batch:
    order = depth_order(n, k)
    return Batch(
        ids=DATA["input_ids"][order],
        labels=DATA["labels"][order],
        plan=LoopPlan.from_depths([n[i] for i in order], [k[i] for i in order]),
        start_state=lambda: DATA["h0"][order],
    )


def gradients(model: nn.Module, batch: Batch, bf16: bool) -> dict[str, Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = model(batch) / batch.labels.numel()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("recompute", ["none", "block", "loop", "selective"])
@pytest.mark.parametrize("depths", DEPTHS)
def test_every_weight_gets_its_gradient_close_to_that_of_fp32(depths, recompute):
    """Weights cast while gradients are off must not serve the loops whose gradients are on."""
    model, batch = golden_model("parcae"), training_batch(*DEPTHS[depths])
    expected = gradients(model, batch, bf16=False)
    outside = "none" if recompute == "loop" else recompute
    model.set_recompute(prelude=outside, core=recompute, coda=outside)
    found = gradients(model, batch, bf16=True)
    for name, gradient in expected.items():
        assert found[name] is not None, name
        assert found[name].dtype == torch.float32
        assert relative(found[name], gradient) < 0.06, name


def test_validation_before_a_step_leaves_its_gradients_alone():
    """Under one autocast region, as a trainer may have it."""
    model, batch = golden_model("parcae"), training_batch([0, 1, 7], [2, 4, 4])
    expected = gradients(model, batch, bf16=True)
    expected = {name: gradient.clone() for name, gradient in expected.items()}
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            model(fixed_depth(DATA["input_ids"], 4, DATA["h0"], labels=DATA["labels"]))
        (model(batch) / batch.labels.numel()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert relative(parameter.grad, expected[name]) < 1e-6, name


def test_logits_and_loss_move_as_little_as_the_authors():
    model = golden_model("parcae")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = model(fixed_depth(DATA["input_ids"], 8, DATA["h0"]))
        batch = fixed_depth(DATA["input_ids"], 8, DATA["h0"], labels=DATA["labels"])
        loss = model(batch) / DATA["labels"].numel()
    assert str(logits.dtype) == GOLDEN["logits_dtype"]
    assert relative(logits, DATA["logits_T8"]) < 1.3 * GOLDEN["logits_T8_relative_l2_vs_fp32"]
    assert abs(loss.item() - meta("parcae_tiny_forward")["loss"]["T8"]) < 2e-3


def test_types_along_the_way_are_the_authors():
    model, types = golden_model("parcae"), {}

    def note(name: str, module: nn.Module, is_input: bool = False) -> None:
        def keep(_module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            types.setdefault(name, str((args[0] if is_input else out).dtype))

        module.register_forward_hook(keep)

    note("e", model.prelude_norm)
    note("injection output", model.core["0"], is_input=True)
    note("block norm output", model.core["0"].mlp_norm)
    note("attention output", model.core["0"].attention)
    note("MLP output", model.core["0"].mlp)
    note("state h", model.core["1"])
    note("C output", model.readout)
    note("coda output", model.coda["1"])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(fixed_depth(DATA["input_ids"], 2, DATA["h0"]))
    assert types == GOLDEN["dtypes"]


class CountCasts(TorchDispatchMode):
    """How often each weight is copied to another type."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {p.data_ptr(): name for name, p in model.named_parameters()}
        self.casts = dict.fromkeys(self.names.values(), 0)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.names:
            self.casts[self.names[args[0].data_ptr()]] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("injection", ["diagonal", "linear"])
def test_weights_are_cast_once_per_micro_batch_and_phase_not_once_per_loop(injection):
    config = replace(CONFIGS["parcae"], injection=injection)
    model = build_model(config)
    initialize(model, config, seed=0)
    batch, casts = training_batch([0, 3, 7], [2, 4, 4]), CountCasts(model)
    with torch.autocast("cpu", torch.bfloat16), casts:
        model(batch)
    inputs = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "value_gate.weight")
    matrices = (*inputs, "o_proj.weight", "up_proj.weight", "down_proj.weight")
    core = {n: c for n, c in casts.casts.items() if n.startswith("core.") and n.endswith(matrices)}
    assert len(core) == 2 * 6 + 1
    for name, count in core.items():
        assert count == (1 if name.endswith(inputs) else 2), name
    if injection == "linear":
        assert casts.casts["injection.weight"] <= 2
