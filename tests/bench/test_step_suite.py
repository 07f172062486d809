"""The suite `step` at the size of a unit test."""

from __future__ import annotations

import json

import pytest
import torch

from megaparcae.bench import step
from megaparcae.bench.masked import executed_flops, masked
from megaparcae.bench.options import StepOptions
from megaparcae.bench.shapes import run_config
from megaparcae.errors import UserError
from megaparcae.model.batch import Batch
from megaparcae.model.build import build_model
from megaparcae.model.init import initial_value
from megaparcae.model.loop_plan import LoopPlan
from megaparcae.train.batches import HostBatch

TINY = (
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_heads=2",
    "model.vocab_size=64",
    "model.sequence_length=16",
    "train.device=cpu",
)


def test_step_compares_both_ways_and_counts_their_work(tmp_path):
    options = StepOptions(
        parts=("step", "loss", "work", "scaling"), overrides=TINY, repeats=2, dtypes=("fp32",),
        rows=(4,), means=(4,), loss_vocab=128, loss_tokens=(32,), work_steps=2, threads=1,
        scale_rows=(2,), scale_lengths=(16,), scale_means=(2,), png=str(tmp_path / "scaling.png"),
    )  # fmt: skip
    report = step.run(options)
    theirs, ours = report.tables["step"]
    assert (theirs["variant"], ours["variant"]) == ("masked", "ours")
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert ours["predicted"] > 1
    assert ours["share"] == pytest.approx(ours["speedup"] / ours["predicted"], rel=0.5)
    assert ours["mfu"] > 0
    assert {row["variant"] for row in report.tables["loss"]} == {"full logits", "chunked"}
    executed, balanced, in_order = report.tables["work"]
    assert executed["value"] == 1.0
    assert balanced["value"] < 0.02 < in_order["value"]
    assert [row["axis"] for row in report.tables["scaling"]] == [
        "rows", "length", "mean", "ranks", "ranks",
    ]  # fmt: skip
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    report.write(tmp_path / "step.json")
    assert json.loads((tmp_path / "step.json").read_text())["suite"] == "step"


def test_masked_rows_keep_state_and_gradient():
    """Against a loop written down here: each row alone, as often as it is deep."""
    config = run_config(StepOptions(overrides=TINY), step.SHAPE).model
    model = build_model(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(config, seed=1, name=name, shape=tuple(parameter.shape)))
    depths = [5, 2, 0], [3, 3, 1]
    ids = torch.randint(64, (3, 17), generator=torch.Generator().manual_seed(1))
    start = torch.randn(3, 16, 32, generator=torch.Generator().manual_seed(2))

    def loss_and_gradient(rows: slice) -> tuple[float, torch.Tensor]:
        model.zero_grad()
        plan = LoopPlan.from_depths(*(d[rows] for d in depths))
        batch = Batch(
            ids=ids[rows, :-1], labels=ids[rows, 1:], plan=plan, start_state=lambda: start[rows]
        )
        loss = model(batch)
        loss.backward()
        return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])

    with masked(model.core):
        loss, gradient = loss_and_gradient(slice(0, 3))
    before = model.work.no_grad
    alone = [loss_and_gradient(slice(i, i + 1)) for i in range(3)]
    assert before == 4 * 5 * 3  # core layers, loops, rows: none dropped out
    assert loss == pytest.approx(sum(one for one, _ in alone), rel=1e-5)
    torch.testing.assert_close(gradient, sum(g for _, g in alone), rtol=1e-4, atol=1e-5)
    assert "run_units" not in vars(model.core)


def test_masking_executes_the_deepest_rows_loops_for_all():
    config = run_config(StepOptions(overrides=TINY), step.SHAPE)
    uneven = HostBatch(None, None, None, [6, 2], [2, 2])
    even = HostBatch(None, None, None, [6, 6], [2, 2])
    assert executed_flops(config, [uneven], masked=True) == executed_flops(
        config, [even], masked=False
    )
    assert executed_flops(config, [uneven], masked=False) < executed_flops(
        config, [uneven], masked=True
    )


def test_an_unknown_part_is_refused():
    with pytest.raises(UserError, match="--parts speed: choose among step, loss"):
        StepOptions(parts=("speed",))
