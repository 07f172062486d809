"""What the ablation runs say: a Markdown table, a figure and the numbers of each suite."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megaparcae.train.ablation import Outcome
from megaparcae.train.ablation_suites import Suite, Variant

COLOURS = ("#718096", "#dd6b20", "#805ad5", "#2b6cb0", "#38a169")
"""Of the variants, in order."""
Cells = dict[tuple[str, float], list[Outcome]]
"""(variant, learning rate or depth T) -> the runs with different seeds."""


def write_report(suite: Suite, outcomes: Sequence[Outcome], level: float, folder: Path) -> str:
    """{suite}.md, .png and .json in `folder`; the Markdown text.

    `level` is the entropy of single tokens, above which a run has not converged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(9.5 if suite.rates else 5.6, 3.6), layout="constrained")
    if suite.rates:
        cells: Cells = {}
        for o in outcomes:
            cells.setdefault((o.job.variant, o.job.rate or 0.0), []).append(o)
        table = _table(suite, "learning rate", suite.rates, cells, _rate_cell)
        _draw_rates(suite, cells, level, figure)
    else:
        cells = {
            (v.name, depth): [o for o in outcomes if o.job.variant == v.name]
            for v in suite.variants
            for depth in suite.depths
        }
        table = _table(suite, "T", suite.depths, cells, _depth_cell)
        table += f"\n\nDifference from {suite.variants[0].label}, seed by seed:\n\n"
        table += _table(suite, "T", suite.depths, cells, partial(_paired_cell, outcomes))
        _draw_depths(suite, cells, figure)
    figure.savefig(folder / f"{suite.name}.png", dpi=130)
    rows = [_row(outcome) for outcome in outcomes]
    (folder / f"{suite.name}.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    setting = _setting(outcomes, level)
    picture = f"![{suite.name}]({suite.name}.png)\n"
    text = "\n\n".join((f"# {suite.title}", setting, table, f"Paper: {suite.paper}", picture))
    (folder / f"{suite.name}.md").write_text(text, encoding="utf-8")
    return text


def _setting(outcomes: Sequence[Outcome], level: float) -> str:
    config = outcomes[0].job.config()
    model, train = config.model, config.train
    seeds = len({outcome.job.seed for outcome in outcomes})
    tokens = train.num_steps * (train.global_batch_size or 0) * model.sequence_length
    return (
        f"Width {model.hidden_size}, {model.num_prelude_layers}/{model.num_core_layers}/"
        f"{model.num_coda_layers} layers, vocabulary {model.vocab_size}, mean recurrence "
        f"{model.recurrence.mean_recurrence}; {train.num_steps} steps, {tokens / 1e6:.2g} M "
        f"tokens, fp32. Mean ± standard deviation of {seeds} seeds; losses in nats per token of "
        f"{config.validation.num_sequences} held-out sequences. ✗: runs that did not converge, "
        f"that is were stopped for non-finite steps or ended above {level:.2f}, the entropy of "
        "single tokens, for which no context is needed. ‖h‖: largest norm of a token's state. A "
        "seed also chooses the held-out text, which is most of the spread."
    )


def _table(
    suite: Suite,
    head: str,
    columns: Sequence[float],
    cells: Cells,
    show: Callable[[list[Outcome], float], str],
) -> str:
    lines = [f"| {head} | " + " | ".join(f"{c:g}" for c in columns) + " |"]
    lines.append("|" + " --- |" * (len(columns) + 1))
    for variant in suite.variants:
        found = [cells.get((variant.name, column)) for column in columns]
        shown = [show(f, c) if f else "-" for f, c in zip(found, columns, strict=True)]
        lines.append(f"| {variant.label} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _rate_cell(found: list[Outcome], _rate: float) -> str:
    """Loss at the deepest T, how many did not converge, the largest norm of a state."""
    norms = [outcome.max_state_norm for outcome in found]
    return f"{_loss_cell(found, _deepest)}, ‖h‖ {max(norms, key=_or_infinite):.2g}"


def _depth_cell(found: list[Outcome], depth: float) -> str:
    return _loss_cell(found, lambda outcome: outcome.validation.get(int(depth), math.nan))


def _paired_cell(outcomes: Sequence[Outcome], found: list[Outcome], depth: float) -> str:
    """Loss less that of the first variant with the same seed, and so the same held-out text."""
    first = {o.job.seed: o.validation for o in outcomes if o.job.variant == outcomes[0].job.variant}
    apart = [
        o.validation[int(depth)] - first[o.job.seed][int(depth)]
        for o in found
        if depth in o.validation and depth in first.get(o.job.seed, {})
    ]
    return _spread(apart) if apart else "-"


def _loss_cell(found: list[Outcome], loss_of: Callable[[Outcome], float]) -> str:
    losses = [loss for loss in map(loss_of, found) if math.isfinite(loss)]
    diverged = sum(outcome.diverged for outcome in found)
    mark = f" ✗ {diverged}/{len(found)}" if diverged else ""
    return (_spread(losses) if losses else "no loss") + mark


def _spread(values: list[float]) -> str:
    mean = statistics.fmean(values)
    return f"{mean:.3f} ± {statistics.stdev(values):.3f}" if len(values) > 1 else f"{mean:.3f}"


def _deepest(outcome: Outcome) -> float:
    """Validation loss at the largest T; NaN for a run that was stopped."""
    return outcome.validation[max(outcome.validation)] if outcome.validation else math.nan


def _or_infinite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _row(outcome: Outcome) -> dict[str, object]:
    return {
        "variant": outcome.job.variant,
        "lr": outcome.job.rate,
        "seed": outcome.job.seed,
        "diverged": outcome.diverged,
        "validation": outcome.validation,
        "max_state_norm": _finite(outcome.max_state_norm),
        "train_loss": [_finite(loss) for loss in outcome.losses],
    }


def _finite(value: float) -> float | None:
    return round(value, 5) if math.isfinite(value) else None


def _draw_rates(suite: Suite, cells: Cells, level: float, figure: Figure) -> None:
    """Loss and state norm against the learning rate; crosses where a run did not converge."""
    loss, norm = figure.subplots(1, 2)
    for variant, colour in zip(suite.variants, COLOURS, strict=False):
        found = [(rate, o) for rate in suite.rates for o in cells.get((variant.name, rate), [])]
        _points(loss, variant, colour, [(rate, _deepest(o)) for rate, o in found])
        _points(norm, variant, colour, [(rate, o.max_state_norm) for rate, o in found])
        bad = [(rate, _deepest(o)) for rate, o in found if o.diverged]
        loss.plot([x for x, _ in bad], [y for _, y in bad], "x", color=colour, markersize=7)
    loss.axhline(level, color="black", linestyle=":", linewidth=1)
    _dress(loss, "learning rate", f"loss at T = {max(suite.depths)}; dotted: single tokens")
    _dress(norm, "learning rate", "largest state norm")
    for axis in (loss, norm):
        axis.set_xscale("log", base=2)
        axis.set_xticks(suite.rates, [f"{rate:g}" for rate in suite.rates])
    norm.set_yscale("log")
    norm.legend(frameon=False, fontsize=8)


def _draw_depths(suite: Suite, cells: Cells, figure: Figure) -> None:
    axis = figure.subplots()
    for variant, colour in zip(suite.variants, COLOURS, strict=False):
        points = [
            (depth, o.validation[depth])
            for depth in suite.depths
            for o in cells[(variant.name, depth)]
            if depth in o.validation
        ]
        _points(axis, variant, colour, points)
    _dress(axis, "loops T", "validation loss")
    axis.set_xscale("log", base=2)
    axis.set_xticks(suite.depths, [str(depth) for depth in suite.depths])
    axis.legend(frameon=False, fontsize=8)


def _points(
    axis: Axes, variant: Variant, colour: str, points: Sequence[tuple[float, float]]
) -> None:
    """Every run as a dot, a line through the means."""
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    axis.plot([x for x, _ in finite], [y for _, y in finite], ".", color=colour, alpha=0.5)
    means = {x: statistics.fmean(y for at, y in finite if at == x) for x, _ in finite}
    axis.plot(list(means), list(means.values()), "-", color=colour, label=variant.label)


def _dress(axis: Axes, x: str, y: str) -> None:
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.2, linewidth=0.6)
