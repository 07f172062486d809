"""Rows, documents and pieces: what must not change a result does not change it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from golden_data import CONFIGS, relative
from megaparcae.config.layout import Part, whole
from megaparcae.config.schema import ModelConfig
from megaparcae.model.batch import Batch, fixed_depth
from megaparcae.model.build import build_model
from megaparcae.model.loop_plan import LoopPlan
from megaparcae.model.looped_lm import LoopedLM

SMALL = ModelConfig(
    vocab_size=96,
    sequence_length=24,
    hidden_size=32,
    intermediate_size=64,
    num_heads=4,
    num_prelude_layers=1,
    num_core_layers=3,
    num_coda_layers=2,
)
LAYOUTS = {
    "1/1/1": replace(SMALL, num_core_layers=1, num_coda_layers=1),
    "1/3/2": SMALL,
    "2/2/2": replace(SMALL, num_prelude_layers=2, num_core_layers=2),
    "grouped query": replace(SMALL, num_kv_heads=2),
    "one kv head, 1/1/1": replace(SMALL, num_kv_heads=1, num_core_layers=1, num_coda_layers=1),
    "huginn": replace(CONFIGS["huginn"], sequence_length=24),
    "additive, no coda": replace(SMALL, injection="additive", num_coda_layers=0),
    "no prelude": replace(SMALL, num_prelude_layers=0),
}


def random_model(config: ModelConfig, seed: int = 0) -> nn.Module:
    """Every parameter matters: nothing is zero or the identity, as it would be at the start."""
    model, generator = build_model(config), torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        norm = name.split(".")[-2].endswith("norm")
        noise = torch.randn(parameter.shape, generator=generator)
        scale = 0.3 if parameter.dim() < 2 else parameter.shape[-1] ** -0.5
        parameter.data = (1 + 0.2 * noise) if norm else scale * noise
    return model


def tokens(rows: int, config: ModelConfig, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (rows, config.sequence_length), generator=generator)


def states(rows: int, config: ModelConfig, seed: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, config.sequence_length, config.hidden_size, generator=generator)


def batch_of(config: ModelConfig, n: list[int], k: list[int], **options: Tensor) -> Batch:
    ids, h0 = tokens(len(n), config), states(len(n), config)
    labels = tokens(len(n), config, seed=3)
    plan = LoopPlan.from_depths(n, k)
    return Batch(ids=ids, labels=labels, plan=plan, start_state=lambda: h0, **options)


def only_row(batch: Batch, row: int, n: int, k: int) -> Batch:
    h0 = batch.start_state()[row : row + 1]
    return Batch(
        ids=batch.ids[row : row + 1],
        labels=batch.labels[row : row + 1],
        plan=LoopPlan.from_depths([n], [k]),
        start_state=lambda: h0,
    )


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_is_the_same_alone_and_among_deeper_and_shallower_rows(layout):
    config = LAYOUTS[layout]
    model, n, k = random_model(config), [5, 2, 0], [3, 3, 1]
    batch = batch_of(config, n, k)
    together = model(batch)
    alone = [model(only_row(batch, i, n[i], k[i])) for i in range(3)]
    torch.testing.assert_close(together, sum(alone), rtol=1e-6, atol=1e-5)
    expected = gradients(model, sum(alone))
    for name, gradient in gradients(model, together).items():
        assert relative(gradient, expected[name]) < 2e-5, name


def test_logits_of_a_row_do_not_depend_on_the_others():
    model, ids, h0 = random_model(SMALL), tokens(3, SMALL), states(3, SMALL)
    with torch.no_grad():
        logits = model(fixed_depth(ids, 4, h0))
        others = ids.clone()
        others[1:] = (ids[1:] + 7) % SMALL.vocab_size
        changed = model(fixed_depth(others, 4, h0))
    torch.testing.assert_close(changed[0], logits[0], rtol=0, atol=1e-6)
    assert not torch.allclose(changed[1], logits[1], atol=1e-2)


def test_logits_do_not_depend_on_later_tokens():
    model, ids, h0 = random_model(SMALL), tokens(1, SMALL), states(1, SMALL)
    changed = ids.clone()
    changed[:, 10:] = (ids[:, 10:] + 1) % SMALL.vocab_size
    with torch.no_grad():
        a, b = model(fixed_depth(ids, 3, h0)), model(fixed_depth(changed, 3, h0))
    torch.testing.assert_close(a[:, :10], b[:, :10], rtol=0, atol=1e-5)
    assert not torch.allclose(a[:, 10:], b[:, 10:], atol=1e-2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_parameter_gets_a_gradient(layout):
    model = random_model(LAYOUTS[layout])
    gradients(model, model(batch_of(LAYOUTS[layout], [2, 0], [2, 1])))
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_counted_work_is_the_sum_of_the_depths():
    model, n, k = random_model(SMALL), [5, 2, 0], [3, 3, 1]
    model(batch_of(SMALL, n, k)).backward()
    assert model.work.no_grad == sum(n) * SMALL.num_core_layers
    outside = 3 * (SMALL.num_prelude_layers + SMALL.num_coda_layers)
    assert model.work.grad == sum(k) * SMALL.num_core_layers + outside


def test_checkpointing_the_loop_repeats_the_loops_with_gradient_only():
    model, n, k = random_model(SMALL), [5, 2, 0], [3, 3, 1]
    model.set_recompute(prelude="none", core="loop", coda="none")
    model(batch_of(SMALL, n, k)).backward()
    assert model.work.no_grad == sum(n) * SMALL.num_core_layers
    outside = 3 * (SMALL.num_prelude_layers + SMALL.num_coda_layers)
    assert model.work.grad == 2 * sum(k) * SMALL.num_core_layers + outside


def packed_rows() -> tuple[Tensor, list[list[slice]]]:
    """Numbers of the documents [2, S], and where each document lies."""
    lengths = [[7, 1, 16], [24]]
    documents = torch.tensor([[i for i, n in enumerate(row) for _ in range(n)] for row in lengths])
    pieces = [[slice(sum(row[:i]), sum(row[: i + 1])) for i in range(len(row))] for row in lengths]
    return documents, pieces


@pytest.mark.parametrize("layout", ["1/3/2", "grouped query", "huginn"])
def test_documents_of_a_row_equal_the_documents_alone(layout):
    config = LAYOUTS[layout]
    model, (documents, pieces) = random_model(config), packed_rows()
    ids, h0 = tokens(2, config), states(2, config)
    with torch.no_grad():
        packed = model(fixed_depth(ids, 3, h0, documents=documents))
        for row, places in enumerate(pieces):
            for at in places:
                alone = model(fixed_depth(ids[row : row + 1, at], 3, h0[row : row + 1, at]))
                torch.testing.assert_close(packed[row, at], alone[0], rtol=1e-5, atol=2e-5)
        unmasked = model(fixed_depth(ids, 3, h0))
    torch.testing.assert_close(packed[1], unmasked[1], rtol=1e-5, atol=2e-5)
    assert not torch.allclose(packed[0, 8:], unmasked[0, 8:], atol=1e-2)


def test_documents_keep_their_gradients_apart():
    model, (documents, pieces) = random_model(SMALL), packed_rows()
    batch = batch_of(SMALL, [2, 0], [2, 1], documents=documents)
    first = batch.labels.clone()
    first[0, pieces[0][0].stop :] = -100
    first[1] = -100
    seen = {}
    model.prelude_norm.register_full_backward_hook(lambda _m, _i, out: seen.update(e=out[0]))
    model(replace(batch, labels=first)).backward()
    assert seen["e"][0, : pieces[0][0].stop].abs().sum() > 0
    assert not seen["e"][0, pieces[0][0].stop :].any()


def pieces_of(config: ModelConfig, borders: tuple[float, ...]) -> list[Part]:
    """Embedding and half of the prelude | shares of the loop | half of the coda and the head."""
    p, c = config.num_prelude_layers, config.num_coda_layers
    empty = range(0)
    parts = [Part(embedding=True, prelude=range(p // 2), loop=None, coda=empty, head=False)]
    for i, share in enumerate(itertools.pairwise(borders)):
        prelude = range(p // 2, p) if i == 0 else empty
        coda = range(c // 2) if share[1] == 1.0 else empty
        parts.append(Part(embedding=False, prelude=prelude, loop=share, coda=coda, head=False))
    last = Part(embedding=False, prelude=empty, loop=None, coda=range(c // 2, c), head=True)
    return [*parts, last]


BORDERS = [(0.0, 1.0), (0.0, 0.5, 1.0), (0.0, 0.05, 0.4, 0.75, 1.0), (0.0, 0.9, 1.0)]


@pytest.mark.parametrize("borders", BORDERS, ids=str)
@pytest.mark.parametrize("layout", ["1/1/1", "1/3/2", "2/2/2", "huginn"])
@pytest.mark.parametrize("recompute", ["none", "loop"])
def test_pieces_one_after_the_other_are_the_whole(layout, borders, recompute):
    config = LAYOUTS[layout]
    model = random_model(config)
    model.set_recompute(prelude="none", core=recompute, coda="none")
    batch = batch_of(config, [5, 2, 0], [3, 3, 1])
    loss = model(batch)
    expected = gradients(model, loss)
    x = None
    for part in pieces_of(config, borders):
        x = model(batch, part, x)
    torch.testing.assert_close(x, loss, rtol=1e-6, atol=1e-6)
    found = gradients(model, x)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert relative(gradient, expected[name]) < 1e-5, name


@pytest.mark.parametrize("layout", ["1/3/2", "huginn"])
def test_a_stage_needs_no_weights_but_those_it_keeps(layout):
    config = LAYOUTS[layout]
    batch = batch_of(config, [5, 2, 0], [3, 3, 1])
    model = random_model(config)
    x, kept = None, set()
    for part in pieces_of(config, (0.0, 0.4, 1.0)):
        stage = random_model(config)
        stage.keep(part)
        kept |= {name for name, _ in stage.named_parameters()}
        x = stage(batch, part, x)
    torch.testing.assert_close(x, model(batch), rtol=1e-6, atol=1e-6)
    assert kept == {name for name, _ in model.named_parameters()}


def test_a_transformer_in_two_pieces_is_the_whole():
    config = replace(SMALL, architecture="transformer", num_layers=3)
    model = random_model(config)
    batch = Batch(ids=tokens(2, config), labels=tokens(2, config, seed=3))
    all_of_it = whole(config)
    first = replace(all_of_it, prelude=range(1), head=False)
    second = replace(all_of_it, embedding=False, prelude=range(1, 3))
    loss = model(batch, second, model(batch, first))
    torch.testing.assert_close(loss, model(batch), rtol=1e-6, atol=1e-6)


def test_a_stage_without_gradient_loops_passes_the_state_and_no_gradient_to_its_core():
    model = random_model(SMALL)
    assert isinstance(model, LoopedLM)
    batch = batch_of(SMALL, [9, 9], [1, 1])
    share = 0.5 * sum(batch.plan.no_grad) / batch.plan.work()
    begin, middle, end = pieces_of(SMALL, (0.0, share, 1.0))[:3]
    carry = model(batch, middle, model(batch, begin))
    before = model.work.grad
    carry = carry.detach().requires_grad_()
    model(batch, end, carry).sum().backward()
    h, e = carry.grad.chunk(2, dim=-1)
    assert not h.any()
    assert e.abs().sum() > 0
    assert model.work.grad > before
