"""What early exit costs: perplexity against mean loops per token, beside fixed numbers of loops.

Text is read token by token through the cache, as in generation: a token that stops early leaves
keys and values of its last loop behind, and later tokens attend to these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megaparcae.errors import UserError
from megaparcae.hf.cache_parcae import ParcaeCache
from megaparcae.hf.early_exit_parcae import DEFAULT_THRESHOLDS
from megaparcae.hf.modeling_parcae import ParcaeForCausalLM
from megaparcae.log import logger

# B rows, S positions

FACTORS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Thresholds that are measured, in units of the rule's default."""


@dataclass(frozen=True, kw_only=True)
class ExitPoint:
    """One setting on one text."""

    rule: str
    """kl, entropy or state; `fixed` runs the same number of loops for every token."""
    threshold: float | None
    """None with fixed loops."""
    loops: float
    """Mean per token."""
    loss: float
    """Mean -log p in nats per token."""
    perplexity: float
    num_tokens: int


def parse_rules(text: str) -> list[str]:
    """The rules of --early-exit, from names with commas."""
    rules = text.split(",")
    for rule in rules:
        if rule not in DEFAULT_THRESHOLDS:
            raise UserError(f"--early-exit={text}: choose from {', '.join(DEFAULT_THRESHOLDS)}")
    return rules


@torch.inference_mode()
def exit_curve(
    model: ParcaeForCausalLM,
    rows: Sequence[np.ndarray],
    rules: Sequence[str],
    *,
    factors: Sequence[float] = FACTORS,
    batch_tokens: int = 16384,
) -> list[ExitPoint]:
    """Points of `fixed` 1 ... T loops, then of every rule at its thresholds, small to large.

    `rows` hold inputs and, one further, labels. T is the model's default number of loops.
    """
    if not model.config.is_looped:
        raise UserError("--early-exit: this model has no loop; leave the option out")
    rows = sorted(rows, key=len)
    size = max(1, batch_tokens // max(map(len, rows)))
    batches = [_padded(rows[i : i + size], model.device) for i in range(0, len(rows), size)]
    points = [_fixed(model, batches, loops) for loops in range(1, model.config.num_loops + 1)]
    for rule in rules:
        for factor in factors:
            points.append(_early(model, batches, rule, DEFAULT_THRESHOLDS[rule] * factor))
            logger.info("%s", describe(points[-1]))
    return points


Batch = tuple[Tensor, Tensor]
"""Ids [B, S + 1], and whether a label counts [B, S]."""


def _padded(rows: Sequence[np.ndarray], device: torch.device) -> Batch:
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    counts = torch.zeros(len(rows), width - 1, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.from_numpy(np.asarray(row, np.int64))
        counts[i, : len(row) - 1] = True
    return ids.to(device), counts.to(device)


def _fixed(model: ParcaeForCausalLM, batches: Sequence[Batch], loops: int) -> ExitPoint:
    nats = []
    for ids, counts in batches:
        logits = model(ids[:, :-1], num_loops=loops, use_cache=False).logits
        nats.append(_losses(logits, ids[:, 1:])[counts])
    return _point("fixed", None, torch.cat(nats), torch.full((1,), float(loops)))


def _early(
    model: ParcaeForCausalLM, batches: Sequence[Batch], rule: str, threshold: float
) -> ExitPoint:
    nats, used = [], []
    for ids, counts in batches:
        cache = ParcaeCache(max_length=ids.shape[1] - 1)
        options = {"cache": cache, "early_exit": rule, "exit_threshold": threshold}
        steps = [
            _losses(model(ids[:, t : t + 1], use_cache=True, **options).logits, ids[:, t + 1, None])
            for t in range(ids.shape[1] - 1)
        ]
        nats.append(torch.cat(steps, dim=1)[counts])
        used.append(cache.loops_used[counts].float())
    return _point(rule, threshold, torch.cat(nats), torch.cat(used))


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    """-log p of labels [B, S] in nats, fp32."""
    return F.cross_entropy(logits.float().transpose(1, 2), labels, reduction="none")


def _point(rule: str, threshold: float | None, nats: Tensor, used: Tensor) -> ExitPoint:
    loss = nats.double().mean().item()
    return ExitPoint(
        rule=rule,
        threshold=threshold,
        loops=used.double().mean().item(),
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)),
        num_tokens=len(nats),
    )


def describe(point: ExitPoint) -> str:
    """One line."""
    shown = "" if point.threshold is None else f"{point.threshold:.1e}"
    return f"{point.rule:<8} {shown:>10} {point.loops:>8.3f} {point.loss:>10.4f} " + (
        f"{point.perplexity:>12.3f}"
    )


def exit_table(points: Sequence[ExitPoint]) -> str:
    """For the terminal."""
    head = f"{'rule':<8} {'threshold':>10} {'loops':>8} {'loss':>10} {'perplexity':>12}"
    return "\n".join([head, *map(describe, points), f"{points[0].num_tokens} tokens"])


def draw_exit_curve(points: Sequence[ExitPoint], path: Path, title: str) -> None:
    """PNG (or SVG, PDF by the name's ending): perplexity against mean loops per token."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for rule, some in _by_rule(points).items():
        line = sorted((point.loops, point.perplexity) for point in some)
        style = "--" if rule == "fixed" else "-"
        axes.plot(*zip(*line, strict=True), marker="o", ms=4, ls=style, label=rule)
    axes.set(xlabel="mean loops per token", ylabel="perplexity", title=title)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _by_rule(points: Sequence[ExitPoint]) -> Mapping[str, list[ExitPoint]]:
    found: dict[str, list[ExitPoint]] = {}
    for point in points:
        found.setdefault(point.rule, []).append(point)
    return found
