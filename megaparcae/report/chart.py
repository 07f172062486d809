"""Line charts and bars as HTML: a stretched SVG for the lines, HTML for every word.

Text is never inside the SVG, so it keeps its size on a phone; lines keep their width by
`vector-effect`. Colours are CSS variables, which the page sets for light and dark.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

Point = tuple[float, float]
Style = Literal["line", "faint", "dots"]

MOST_POINTS = 500
"""Of one line; more are averaged in groups."""
FEW_POINTS = 16
"""So few are also drawn as dots."""


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    name: str
    points: Sequence[Point]
    style: Style = "line"
    color: str = "var(--s1)"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure; without points it is left out."""

    title: str
    unit: str
    lines: Sequence[Line]
    note: str = ""
    x_name: str = "step"
    log_y: bool = False
    from_zero: bool = False
    marks: Sequence[tuple[float, str]] = ()
    """Vertical lines: (x, what happened)."""
    whole_x: bool = True
    wide: bool = False
    skip_first: float = 0.0
    """Share of the x range, from the left, that does not decide the y range."""


def ramp(index: int, count: int) -> str:
    """Colour of the index-th of `count` ordered lines."""
    share = round(100 * index / (count - 1)) if count > 1 else 100
    return f"color-mix(in oklab, var(--ramp-b) {share}%, var(--ramp-a))"


def smoothed(points: Sequence[Point], share: float = 0.04) -> list[Point]:
    """Centred mean over about `share` of the points; symmetric at the start, where a loss falls
    fast, and one-sided at the end."""
    half = int(share * len(points) / 2)
    sums = [0.0, *itertools.accumulate(y for _, y in points)]
    result = []
    for i, (x, _) in enumerate(points):
        reach = min(half, i)
        end = min(i + reach + 1, len(points))
        result.append((x, (sums[end] - sums[i - reach]) / (end - i + reach)))
    return result


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most `most` points: means of neighbours, the first and the last as they are."""
    if len(points) <= most:
        return list(points)
    inner, groups = points[1:-1], most - 2
    borders = [round(i * len(inner) / groups) for i in range(groups + 1)]
    means = [
        (sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group))
        for a, b in itertools.pairwise(borders)
        if (group := inner[a:b])
    ]
    return [points[0], *means, points[-1]]


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers within [low, high]."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 and their like within [low, high]; only the powers of ten when there are many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if math.log10(high / low) < 2.5 else (1,)
    ticks = [f * 10.0**d for d in decades for f in factors]
    return [t for t in ticks if low <= t <= high] or [low, high]


def short(value: float) -> str:
    """A number for people: 1.2M, 4,000, 0.031."""
    size = abs(value)
    if size >= 1e15 or (size and size < 1e-4):
        return f"{value:.1e}"
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            unit = 1e3 if suffix == "k" else limit
            return f"{value / unit:.4g}{suffix}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


@dataclass(frozen=True)
class _Scale:
    """Data to percent of the plot, from the left or the bottom."""

    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        """Position of a value; outside the plot for one that is out of the scale."""
        low, high = self.low, self.high
        if self.log:
            value, low, high = (math.log(max(x, 1e-300)) for x in (value, low, high))
        return 100 * (value - low) / (high - low)


def _y_scale(chart: Chart, xs: list[float]) -> _Scale:
    begin = min(xs) + chart.skip_first * (max(xs) - min(xs))
    values = [y for line in chart.lines for x, y in line.points if x >= begin]
    if chart.log_y and min(values) > 0:
        low, high = min(values) / 1.15, max(values) * 1.15
        return _Scale(low, high, log=True)
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or max(abs(high), 1e-9) * 0.1
    return _Scale(0.0 if chart.from_zero else low - room, high + room)


def render(chart: Chart) -> str:
    """The figure; an empty string when no line has a point."""
    lines = [line for line in chart.lines if line.points]
    xs = [x for line in lines for x, _ in line.points]
    if not xs:
        return ""
    x_scale = _Scale(min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1)
    y_scale = _y_scale(chart, xs)
    ticks = log_ticks if y_scale.log else nice_ticks
    y_ticks = ticks(y_scale.low, y_scale.high)
    x_ticks = nice_ticks(x_scale.low, x_scale.high, 6 if chart.wide else 4)
    if chart.whole_x:
        x_ticks = [x for x in x_ticks if x == int(x)]
    drawn = [(line, thinned(line.points)) for line in lines]
    marks = [
        f'<i class="mark" style="left:{x_scale.at(x):.2f}%" title="{escape(what)}"></i>'
        for x, what in chart.marks
        if x_scale.low <= x <= x_scale.high
    ]
    return "\n".join(
        [
            f'<figure class="chart{" wide" if chart.wide else ""}">',
            f"<figcaption><h3>{escape(chart.title)}</h3>"
            f'<span class="unit">{escape(chart.unit)}</span></figcaption>',
            _legend(lines),
            '<div class="area">',
            *(_y_label(y, y_scale) for y in y_ticks),
            f'<div class="plot" role="img" tabindex="0" aria-label="{escape(_spoken(chart))}">',
            *(f'<i class="rule" style="bottom:{y_scale.at(y):.2f}%"></i>' for y in y_ticks),
            *marks,
            '<svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">',
            *(_path(line, points, x_scale, y_scale) for line, points in drawn),
            "</svg></div>",
            *(_x_label(x, x_scale) for x in x_ticks),
            f'<span class="x-name">{escape(chart.x_name)}</span></div>',
            f'<p class="note">{escape(chart.note)}</p>' if chart.note else "",
            _table(chart, drawn),
            _data(chart, drawn, x_scale, y_scale),
            "</figure>",
        ]
    )


def _legend(lines: Sequence[Line]) -> str:
    items = (
        f'<li class="{line.style}" style="--c:{line.color}">{escape(line.name)}</li>'
        for line in lines
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _y_label(y: float, scale: _Scale) -> str:
    return f'<span class="y" style="--at:{scale.at(y) / 100:.4f}">{short(y)}</span>'


def _x_label(x: float, scale: _Scale) -> str:
    at = scale.at(x)
    side = " first" if at < 4 else " last" if at > 96 else ""
    return f'<span class="x{side}" style="--at:{at / 100:.4f}">{short(x)}</span>'


def _path(line: Line, points: Sequence[Point], x_scale: _Scale, y_scale: _Scale) -> str:
    at = [f"{x_scale.at(x):.2f} {100 - y_scale.at(y):.2f}" for x, y in points]
    shapes: list[tuple[Style, str]] = []
    if line.style != "dots" and len(at) > 1:
        shapes.append((line.style, "M" + "L".join(at)))
    if line.style == "dots" or len(at) <= FEW_POINTS:
        shapes.append(("dots", "".join(f"M{p}h0" for p in at)))
    return "".join(
        f'<path class="{style}" style="--c:{line.color}" d="{d}"/>' for style, d in shapes
    )


def _spoken(chart: Chart) -> str:
    parts = []
    for line in chart.lines:
        if line.points and line.style != "faint":
            (first, begin), (last, end) = line.points[0], line.points[-1]
            parts.append(
                f"{line.name}: {short(begin)} at {chart.x_name} {short(first)}, "
                f"{short(end)} at {chart.x_name} {short(last)}"
            )
    return f"{chart.title}, {chart.unit}. " + "; ".join(parts)


def _table(chart: Chart, drawn: Sequence[tuple[Line, list[Point]]]) -> str:
    """A dozen rows for those who do not see the picture."""
    shown = [(line, points) for line, points in drawn if line.style != "faint"]
    every = sorted({x for _, points in shown for x, _ in points})
    chosen = (
        [every[round(i * (len(every) - 1) / 11)] for i in range(12)] if len(every) > 12 else every
    )
    head = "".join(f'<th scope="col">{escape(line.name)}</th>' for line, _ in shown)
    values = [dict(points) for _, points in shown]
    rows = (
        f'<tr><th scope="row">{short(round(x) if chart.whole_x else x)}</th>'
        + "".join(f"<td>{short(v[x]) if x in v else ''}</td>" for v in values)
        + "</tr>"
        for x in chosen
    )
    return (
        "<details><summary>Numbers</summary><div class=scroll><table><thead><tr>"
        f'<th scope="col">{escape(chart.x_name)}</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></details>"
    )


def _data(
    chart: Chart, drawn: Sequence[tuple[Line, list[Point]]], x_scale: _Scale, y_scale: _Scale
) -> str:
    """What the script shows under the pointer."""
    lines = [
        {
            "name": line.name,
            "color": line.color,
            "points": [
                [float(f"{x:.6g}"), float(f"{y:.5g}"), round(x_scale.at(x), 2),
                 round(y_scale.at(y), 2)]
                for x, y in points
            ],
        }
        for line, points in drawn
    ]  # fmt: skip
    marks = [[round(x_scale.at(x), 2), what] for x, what in chart.marks]
    text = json.dumps({"x": chart.x_name, "lines": lines, "marks": marks}, separators=(",", ":"))
    return f'<script type="application/json">{text.replace("<", chr(92) + "u003c")}</script>'


def render_bar(title: str, unit: str, parts: Sequence[tuple[str, float]], note: str = "") -> str:
    """One bar that is divided into parts, with a legend that has their shares."""
    total = sum(size for _, size in parts)
    shown = [(name, size) for name, size in parts if size > 0]
    if not shown:
        return ""
    pieces, items = [], []
    for i, (name, size) in enumerate(shown):
        share = size / total
        color = f"var(--s{i % 6 + 1})"
        pieces.append(f'<i style="flex-grow:{share:.4f};--c:{color}"></i>')
        items.append(
            f'<tr><th scope="row" style="--c:{color}"><i class="swatch"></i>{escape(name)}</th>'
            f"<td>{share:.1%}</td><td>{escape(unit.format(short(size)))}</td></tr>"
        )
    return (
        f'<figure class="chart"><figcaption><h3>{escape(title)}</h3></figcaption>'
        f'<div class="bar" aria-hidden="true">{"".join(pieces)}</div>'
        f'<table class="parts"><tbody>{"".join(items)}</tbody></table>'
        + (f'<p class="note">{escape(note)}</p>' if note else "")
        + "</figure>"
    )
