"""The paper's scaling figures from a study's data, as PNG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from megaparcae.scaling.fit import Fit
from megaparcae.scaling.isoflop import IsoFlop, PowerLaw
from megaparcae.scaling.scale import LoopScale
from megaparcae.scaling.study import Study
from megaparcae.scaling.test_time import CurveFits

BLUE, ORANGE, GREY = "#2b6cb0", "#dd6b20", "#718096"


def draw_figures(study: Study, folder: Path) -> dict[str, Path]:
    """Write the figures the study has data for; their paths by title."""
    folder.mkdir(parents=True, exist_ok=True)
    drawings: list[tuple[str, str, bool, Callable[[Study], Figure]]] = [
        ("IsoFLOP parabolas (figure 4, right)", "isoflop_parabolas", True, _parabolas),
        ("Optimal recurrence and tokens (figure 5)", "optimal_power_laws",
         study.isoflop.mu_law is not None, _power_laws),
        ("IsoLoss contours (figures 4, left, and 25)", "isoloss_contours",
         study.training is not None, _contours),
        ("Test-time curves (figure 8)", "test_time_curves", study.test_time is not None, _curves),
        ("Held-out runs (figure 26)", "held_out", bool(study.held_out), _held_out),
    ]  # fmt: skip
    written = {}
    for title, name, available, draw in drawings:
        path = folder / f"{name}.png"
        path.unlink(missing_ok=True)  # an earlier report's figure must not pass for this one's
        if available:
            written[title] = path
            draw(study).savefig(path, dpi=130)
    return written


def _figure(columns: int, height: float = 3.6) -> tuple[Figure, list[Axes]]:
    """Axes side by side, without a display and without global state."""
    figure = Figure(figsize=(0.6 + 4.4 * columns, height), layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, columns))
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.2, linewidth=0.6)
        axis.tick_params(which="both", labelsize=8)
    return figure, list(axes)


def _colours(count: int) -> np.ndarray:
    return colormaps["viridis"](np.linspace(0.05, 0.85, count))


def _parabolas(study: Study) -> Figure:
    figure, (axis,) = _figure(1)
    parabolas = study.isoflop.parabolas
    for parabola, colour in zip(parabolas, _colours(len(parabolas)), strict=True):
        mu = np.geomspace(parabola.mu.min(), parabola.mu.max(), 100)
        axis.plot(parabola.mu, parabola.loss, "o", color=colour, markersize=4)
        axis.plot(
            mu, parabola.predict(mu), color=colour, linewidth=1.3, label=_flops(parabola.budget)
        )
        if parabola.status == "inside":
            best = parabola.best_mu
            axis.plot(best, parabola.predict(best), "*", color=ORANGE, markersize=9, zorder=3)
    _mu_axis(axis, np.unique(study.isoflop.parabolas[0].mu))
    axis.set_ylabel("validation loss")
    _legend_outside(axis, "FLOPs (★ minimum)")
    return figure


def _power_laws(study: Study) -> Figure:
    isoflop = study.isoflop
    assert isoflop.mu_law is not None and isoflop.tokens_law is not None
    figure, (left, right) = _figure(2)
    budgets = [p.budget for p in isoflop.usable]
    _power_law(left, budgets, [p.best_mu for p in isoflop.usable], isoflop.mu_law, "µ")
    _power_law(right, budgets, [isoflop.best_tokens(p) for p in isoflop.usable],
               isoflop.tokens_law, "D")  # fmt: skip
    left.set_ylabel("optimal mean recurrence µ*")
    right.set_ylabel("optimal tokens D*")
    _plain_ticks(left)
    return figure


def _power_law(axis: Axes, budgets: list[float], y: list[float], law: PowerLaw, name: str) -> None:
    line = np.geomspace(min(budgets) / 1.5, max(budgets) * 1.5, 50)
    axis.loglog(line, law.predict(line), color=BLUE, linewidth=1.3)
    axis.loglog(budgets, y, "o", color=ORANGE, markersize=5)
    span = f" [{law.interval[0]:.2f}, {law.interval[1]:.2f}]" if law.interval else ""
    axis.set_title(f"{name}* ∝ C^{law.exponent:.2f}{span}", fontsize=10)
    axis.set_xlabel("training FLOPs C")


def _contours(study: Study) -> Figure:
    assert study.training is not None
    figure, (axis,) = _figure(1)
    rows = study.runs.looped().at_training_depth()
    mu = np.geomspace(rows.mu.min() / 1.08, rows.mu.max() * 1.08, 500)
    tokens = np.geomspace(rows.tokens.min() / 1.3, rows.tokens.max() * 1.3, 120)
    loss = _training_loss(study.training, study.isoflop.scale, mu[:, None], tokens[None])
    levels = np.unique(np.quantile(loss, np.linspace(0.03, 0.97, 12)))
    lines = axis.contour(tokens, mu, loss, levels=levels, cmap="viridis_r", linewidths=1)
    axis.clabel(lines, fontsize=7, fmt="%.2f")
    axis.plot(rows.tokens, rows.mu, "o", color=GREY, markersize=3, label="runs")
    frontier = _frontier(study.training, study.isoflop, mu, tokens)
    if len(frontier[0]):
        axis.plot(*frontier, color=BLUE, linewidth=2, label="efficient frontier")
    axis.set_xscale("log")
    _mu_axis(axis, np.unique(rows.mu), vertical=True)
    axis.set_xlabel("training tokens D")
    axis.legend(fontsize=8, frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    return figure


def _training_loss(fit: Fit, scale: LoopScale, mu: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    return fit.predict({"N": scale.unrolled_params(mu), "D": tokens, "mu": mu, "T": mu})


def _frontier(
    fit: Fit, isoflop: IsoFlop, mu: np.ndarray, tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(D, mu) with the lowest loss at each budget, where that lies inside the plot."""
    cost = isoflop.scale.flops_fixed + 2 * isoflop.scale.flops_core * mu
    budgets = np.geomspace(tokens[0] * cost[0], tokens[-1] * cost[-1], 200)
    at = budgets[:, None] / cost  # [budgets, mu]
    best = _training_loss(fit, isoflop.scale, mu[None], at).argmin(1)
    d = at[np.arange(len(budgets)), best]
    inside = (best > 0) & (best < len(mu) - 1) & (d >= tokens[0]) & (d <= tokens[-1])
    return d[inside], mu[best][inside]


def _curves(study: Study) -> Figure:
    assert study.test_time is not None
    largest = max(float(c.runs.budget[0]) for c in study.test_time.curves)
    curves = sorted(
        (c for c in study.test_time.curves if c.runs.budget[0] == largest), key=lambda c: c.mu
    )
    budget = f"budget {_flops(largest)}, " if largest > 0 else ""
    return draw_curves(curves, [f"µ = {curve.mu:g}" for curve in curves], budget)


def draw_curves(curves: Sequence[CurveFits], labels: Sequence[str], title: str = "") -> Figure:
    """Losses against T and the exponential fits."""
    figure, (axis,) = _figure(1)
    for curve, label, colour in zip(curves, labels, _colours(len(curves)), strict=True):
        loops = np.linspace(curve.runs.num_loops.min(), curve.runs.num_loops.max(), 200)
        fit = curve.fits["exponential"]
        axis.plot(curve.runs.num_loops, curve.runs.loss, "o", color=colour, markersize=4)
        axis.plot(loops, fit.predict({"T": loops}), color=colour, linewidth=1.2, label=label)
    axis.set_xlabel("loops at test time T")
    axis.set_ylabel("validation loss")
    axis.set_title(f"{title}fits L∞ + Z exp(-zT)", fontsize=9)
    _legend_outside(axis, "trained with")
    return figure


def _held_out(study: Study) -> Figure:
    shown = study.held_out[:4]
    figure, axes = _figure(len(shown))
    for axis, item in zip(axes, shown, strict=True):
        loops = item.runs.num_loops
        axis.plot(loops, item.runs.loss, "o", color="black", markersize=4, label="measured")
        style = "-" if len(loops) > 1 else "s"
        axis.plot(loops, item.predicted, style, color=ORANGE, linewidth=1.4,
                  label=f"predicted ({item.error:.2%})")  # fmt: skip
        if item.oracle is not None:
            axis.plot(loops, item.oracle, style.replace("-", "--"), color=BLUE, linewidth=1.4,
                      label=f"oracle floor ({item.oracle_error:.2%})")  # fmt: skip
        axis.set_title(f"µ = {item.runs.mu[0]:g}, D = {item.runs.tokens[0]:.3g}", fontsize=9)
        axis.set_xlabel("loops at test time T")
        axis.legend(fontsize=8, frameon=False)
    axes[0].set_ylabel("validation loss")
    return figure


def _mu_axis(axis: Axes, ticks: np.ndarray, vertical: bool = False) -> None:
    """Logarithmic mu with the trained values as ticks."""
    which = axis.yaxis if vertical else axis.xaxis
    (axis.set_yscale if vertical else axis.set_xscale)("log")
    which.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    which.set_ticks([], minor=True)
    which.set_label_text("mean recurrence µ")


def _plain_ticks(axis: Axes) -> None:
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 4.0, 6.0, 8.0)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_locator(LogLocator(subs=(3.0, 5.0)))
    axis.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))


def _legend_outside(axis: Axes, title: str) -> None:
    axis.legend(title=title, fontsize=8, title_fontsize=8, frameon=False, loc="upper left",
                bbox_to_anchor=(1.0, 1.0))  # fmt: skip


def _flops(budget: float) -> str:
    return f"{budget:.2g}".replace("e+", "e")
