"""The head's loss: a few tokens at a time against all logits at once."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megaparcae.bench.measure import PeakMemory, take_turns, timed
from megaparcae.bench.options import StepOptions
from megaparcae.config.schema import ModelConfig
from megaparcae.engine.distributed import Process
from megaparcae.ops.cross_entropy import LMLoss, naive_cross_entropy


def loss_costs(process: Process, config: ModelConfig, options: StepOptions) -> list[dict[str, Any]]:
    """Memory and time, forward and backward, at the model's width. `logit_megabytes` is what the
    logits of all tokens take in fp32."""
    width, vocab = config.hidden_size, options.loss_vocab
    table = []
    for count in options.loss_tokens:
        torch.manual_seed(0)
        hidden = torch.randn(count, width, device=process.device, requires_grad=True)
        weight = torch.randn(vocab, width, device=process.device).mul_(width**-0.5)
        weight.requires_grad_()
        labels = torch.randint(vocab, (count,), device=process.device)
        works = {
            "full logits": partial(_full, hidden, weight, labels),
            "chunked": partial(_chunked, LMLoss(vocab), hidden, weight, labels),
        }
        peaks = {name: _peak(work, hidden, weight) for name, work in works.items()}
        timings = take_turns({n: timed(w) for n, w in works.items()}, options.repeats)
        table += [
            {"tokens": count}
            | row
            | {
                "peak_megabytes": peaks[row["variant"]] / 1e6,
                "logit_megabytes": 4 * count * vocab / 1e6,
            }
            for row in timings.rows("full logits", tokens=count)
        ]
    return table


def _full(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    naive_cross_entropy(hidden, weight, labels, vocab_size=len(weight))[0].backward()


def _chunked(loss: LMLoss, hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    loss(hidden[None], weight, labels[None])[0].backward()


def _peak(work: Callable[[], None], *leaves: Tensor) -> int:
    """Bytes, the gradients of the leaves included."""
    work()
    for leaf in leaves:
        leaf.grad = None
    gc.collect()
    memory = PeakMemory()
    work()
    return memory.bytes()
