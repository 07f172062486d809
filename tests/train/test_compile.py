"""torch.compile of the blocks: few versions for all row counts, and the same gradients.

Dynamo traces and guards as ever; the graphs then run uncompiled, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from megaparcae.config.schema import ModelConfig
from megaparcae.errors import UserError
from megaparcae.model.batch import Batch
from megaparcae.model.build import build_model
from megaparcae.model.init import initialize
from megaparcae.model.loop_plan import LoopPlan
from megaparcae.train.build import check_compiler, compile_blocks

S, D = 8, 32
CONFIG = ModelConfig(
    vocab_size=64,
    sequence_length=S,
    hidden_size=D,
    intermediate_size=64,
    num_heads=2,
    num_prelude_layers=0,
    num_core_layers=2,
    num_coda_layers=1,
    init="scaled",
)


@pytest.fixture
def dynamo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Switched on, for other tests have no use for it, and with nothing compiled yet."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8):  # what compile_blocks changes
        yield
    torch._dynamo.reset()


def gradients(model: nn.Module, n: list[int], k: list[int]) -> list[Tensor]:
    """The loss and all gradients of rows with these depths."""
    draw = torch.Generator().manual_seed(len(n))
    ids = torch.randint(64, (len(n), S + 1), generator=draw)
    state = torch.randn(len(n), S, D, generator=draw)
    plan = LoopPlan.from_depths(n, k)
    model.zero_grad()
    loss = model(Batch(ids=ids[:, :-1], labels=ids[:, 1:], plan=plan, start_state=lambda: state))
    loss.backward()
    return [loss, *(p.grad.clone() for p in model.parameters())]


def test_blocks_are_not_compiled_again_for_other_row_counts(dynamo):
    compiled = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        compiled.append(graph)
        return graph.forward

    model = build_model(CONFIG)
    initialize(model, CONFIG, seed=0)
    depths = [([3, 2, 1, 0], [2, 2, 1, 1]), ([2, 2, 2], [2, 2, 2]), ([1], [2])]
    others = [([5, 4, 3, 3, 2, 1, 0], [4] * 7), ([2, 2], [3, 1]), ([3] * 9, [1] * 9)]
    expected = [gradients(model, n, k) for n, k in depths + others]
    compile_blocks(model, backend)
    found = [gradients(model, n, k) for n, k in depths]
    first = len(compiled)
    found += [gradients(model, n, k) for n, k in others]
    assert 0 < first <= 20
    assert len(compiled) == first
    for some, same in zip(found, expected, strict=True):
        torch.testing.assert_close(some, same)


def test_a_machine_without_a_compiler_is_refused_before_the_first_step(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    check_compiler(torch.device("cuda"))
    with pytest.raises(UserError, match="train.compile=true needs a C.. compiler .* install"):
        check_compiler(torch.device("cpu"))
    (tmp_path / "clang++").touch(mode=0o755)
    check_compiler(torch.device("cpu"))
