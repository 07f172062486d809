"""The page: head figures, charts, events, configuration; nothing is loaded from elsewhere."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable
from html import escape
from pathlib import Path

from megaparcae.model.flops import count_parameters
from megaparcae.report.chart import Chart, render, short
from megaparcae.report.figures import (
    balance,
    depth_loss_chart,
    flops_bar,
    health_charts,
    loss_chart,
    optimizer_charts,
    speed_charts,
    test_time_chart,
    time_bar,
    validation_chart,
)
from megaparcae.report.history import Event, History, numbers, read_history

HERE = Path(__file__).parent
MOST_EVENTS = 400
"""Rows of the table of events; of more, the latest."""
SYMBOLS = {"info": "●", "good": "✓", "warn": "▲", "bad": "✕"}


def write_report(run: Path, output: Path) -> None:
    """The report of a run's folder. Raises UserError when there is nothing to report."""
    page = render_page(read_history(run))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page, encoding="utf-8")


def render_page(history: History) -> str:
    """The whole document."""
    name = history.config.name if history.config else history.folder.resolve().name
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            '<link rel="icon" href="data:,">',
            f"<title>{escape(name)}: training report</title>",
            f"<style>{(HERE / 'page.css').read_text(encoding='utf-8')}</style></head><body>",
            _header(history, name),
            "<main>",
            _tiles(history),
            _section("Loss", render(loss_chart(history))),
            _section("Depth", *map(render, _depth_charts(history))),
            _section("Loop health", *map(render, health_charts(history))),
            _section("Optimizer", *map(render, optimizer_charts(history))),
            _section("Speed", *map(render, speed_charts(history))),
            _section("Where it goes", flops_bar(history), time_bar(history)),
            _events(history),
            _traced(history),
            _about(history),
            "</main>",
            f"<footer>Written {escape(_clock(time.time()))} by tools/report.py</footer>",
            f"<script>{(HERE / 'page.js').read_text(encoding='utf-8')}</script>",
            "</body></html>",
        ]
    )


def _depth_charts(history: History) -> list[Chart]:
    return [validation_chart(history), test_time_chart(history), depth_loss_chart(history)]


def _header(history: History, name: str) -> str:
    status, kind = _status(history)
    done, whole = history.last_step, history.num_steps
    progress = ""
    if whole:
        share = min(1.0, done / whole)
        progress = (
            f'<div class="progress" role="progressbar" aria-label="steps made" aria-valuemin="0" '
            f'aria-valuemax="{whole}" aria-valuenow="{done}">'
            f'<i style="width:{share:.1%}"></i></div>'
        )
    of = f" of {whole:,}" if whole else ""
    last = f", last record {_clock(history.last_time)}" if history.last_time else ""
    return (
        f'<header><div class="title"><h1>{escape(name)}</h1>'
        f'<span class="status {kind}">{escape(status)}</span></div>'
        f"<p>{escape(_summary(history))}</p>{progress}"
        f'<p class="fine">step {done:,}{of}{escape(last)}</p></header>'
    )


def _status(history: History) -> tuple[str, str]:
    if history.num_steps and history.last_step >= history.num_steps:
        return "complete", "good"
    if history.events and history.events[-1].kind == "stop":
        return "stopped", "warn"
    return "unfinished", "info"


def _summary(history: History) -> str:
    """What is trained, in a line."""
    config = history.config
    if config is None:
        return f"The configuration can't be read: {history.config_problem}"
    model = config.model
    parts = [f"{short(count_parameters(model).total)} parameters"]
    if model.architecture == "looped":
        layers = f"{model.num_prelude_layers} + {model.num_core_layers} + {model.num_coda_layers}"
        loops = model.recurrence
        parts += [
            f"prelude, core and coda of {layers} blocks",
            f"mean recurrence {loops.mean_recurrence} (gradient through {loops.backprop_depth})",
        ]
    else:
        parts.append(f"Transformer of {model.num_layers} blocks")
    parts += [
        f"width {model.hidden_size}",
        f"sequences of {model.sequence_length}",
        config.optimizer.name,
        config.train.precision,
    ]
    return ", ".join(parts)


def _tiles(history: History) -> str:
    """The head figures."""
    tiles: list[tuple[str, str, str]] = []
    losses = history.series("loss")
    if losses:
        recent = [x for _, x in losses[-max(1, len(losses) // 50) :]]
        mean = sum(recent) / len(recent)
        tiles.append(
            ("training loss", f"{mean:.3f}", f"mean of the last {_count(len(recent), 'step')}")
        )
    if history.validation:
        step, by_depth = max(history.validation.items())
        if by_depth:
            best = min(by_depth, key=by_depth.__getitem__)
            tiles.append(
                ("validation loss", f"{by_depth[best]:.3f}", f"best T = {best}, step {step:,}")
            )
    tokens = history.series("tokens")
    if tokens:
        tiles.append(
            ("tokens", short(tokens[-1][1]), f"{short(tokens[-1][1] / tokens[-1][0])} a step")
        )
    speed = sorted(x for _, x in history.series("tokens_per_second"))
    if speed:
        tiles.append(("tokens per second", short(speed[len(speed) // 2]), "median step"))
    if history.time.total:
        share = history.time.kept / history.time.total
        tiles.append(("useful time", f"{share:.0%}", f"of {_duration(history.time.total)}"))
    efficiency = [x for _, x in history.series("efficiency")]
    if efficiency:
        mean = sum(efficiency) / len(efficiency)
        note = "FLOPs needed of executed"
        uneven = [abs(x - 1) for _, x in balance(history)]
        if uneven:
            note += f"; rank 0 even to {max(uneven):.1%}"
        tiles.append(("loop efficiency", f"{mean:.1%}", note))
    tiles.append(_safety_tile(history))
    items = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for label, value, note in tiles
    )
    return f'<dl class="tiles">{items}</dl>'


def _safety_tile(history: History) -> tuple[str, str, str]:
    counts = Counter(event.kind for event in history.events)
    restarts = max(0, counts["start"] - 1)
    note = (
        f"{_count(counts['checkpoint'], 'save')}, {_count(counts['skip'], 'skip')}, "
        f"{_count(history.num_lost_steps, 'step')} made twice"
    )
    return "restarts", str(restarts), note


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _section(title: str, *figures: str) -> str:
    shown = [figure for figure in figures if figure]
    if not shown:
        return ""
    columns = {1: "one", 2: "two", 4: "two"}.get(len(shown), "three")
    anchor = re.sub(r"[^a-z]+", "-", title.lower())
    return (
        f'<section aria-labelledby="{anchor}"><h2 id="{anchor}">{escape(title)}</h2>'
        f'<div class="grid {columns}">{"".join(shown)}</div></section>'
    )


def _events(history: History) -> str:
    if not history.events:
        return ""
    saves = [e for e in history.events if e.kind == "checkpoint"]
    others = [e for e in history.events if e.kind != "checkpoint"]
    shown = others[-MOST_EVENTS:]
    parts = [
        _event_table(shown, "Restarts, slow machines, skipped steps, spikes, roll-backs, stops")
    ]
    if len(shown) < len(others):
        parts.append(f'<p class="note">The latest {len(shown):,} of {len(others):,}.</p>')
    if saves:
        parts.append(
            f"<details><summary>{_count(len(saves), 'save')}</summary>"
            f"{_event_table(saves[-MOST_EVENTS:], 'Saves')}</details>"
        )
    if history.num_damaged_lines:
        damaged = _count(history.num_damaged_lines, "damaged line")
        parts.append(f'<p class="note">{damaged} of log.jsonl left out.</p>')
    return (
        '<section aria-labelledby="events"><h2 id="events">Events</h2>'
        f'<div class="card">{"".join(parts)}</div></section>'
    )


def _event_table(events: Iterable[Event], title: str) -> str:
    rows = "".join(
        f'<tr><td class="{e.level}"><span aria-label="{e.level}">{SYMBOLS[e.level]}</span></td>'
        f"<td>{e.step:,}</td><td>{escape(_clock(e.time))}</td><td>{escape(e.text)}</td></tr>"
        for e in events
    )
    if not rows:
        return ""
    return (
        f'<div class="scroll"><table class="events"><caption>{escape(title)}</caption><thead><tr>'
        '<th scope="col"><span class="hidden">kind</span></th><th scope="col">step</th>'
        '<th scope="col">time</th><th scope="col">what</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _traced(history: History) -> str:
    """What profile.steps has measured."""
    try:
        text = (history.folder / "profile" / "summary.txt").read_text("utf-8", errors="replace")
    except OSError:
        return ""
    return (
        '<section aria-labelledby="traced"><h2 id="traced">Traced steps</h2>'
        f'<div class="card"><pre tabindex="0">{escape(text)}</pre></div></section>'
    )


def _about(history: History) -> str:
    parts = []
    if history.starts:
        parts.append(_rows("Last start", _environment(history)))
    if history.config is not None:
        parts.append(_rows("Run", _run_facts(history)))
    tables = f'<div class="grid">{"".join(parts)}</div>' if parts else ""
    text = (
        "<details class=card><summary>config.yaml</summary>"
        f'<pre tabindex="0">{escape(history.config_text)}</pre></details>'
        if history.config_text
        else ""
    )
    if history.config_problem:
        text = f'<p class="note">{escape(history.config_problem)}</p>' + text
    if not tables and not text:
        return ""
    return (
        '<section aria-labelledby="about"><h2 id="about">Configuration</h2>'
        f"{tables}{text}</section>"
    )


def _environment(history: History) -> list[tuple[str, str]]:
    record = history.starts[-1]
    layout = {k: int(v) for k, v in numbers(record, "layout").items()}
    versions = record.get("versions")
    rows = [("host", str(record.get("host", "?"))), ("device", str(record.get("device", "?")))]
    rows += [("layout", ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in layout.items()))]
    if isinstance(versions, dict):
        rows += [(str(name), str(version)) for name, version in versions.items()]
    return rows


def _run_facts(history: History) -> list[tuple[str, str]]:
    config = history.config
    assert config is not None
    sets = ", ".join(Path(dataset.prefix).name for dataset in config.data.train)
    schedule = config.schedule
    return [
        ("preset", config.preset or "none"),
        ("training data", sets or "none"),
        ("packing", config.data.packing.replace("_", " ")),
        ("learning rate", f"{config.optimizer.lr:g}"),
        ("schedule", f"{schedule.kind}, warm-up {schedule.warmup_steps} steps"),
        ("gradient clipping", f"{config.optimizer.grad_clip:g}"),
        ("depth sampler", config.model.recurrence.sampler),
        ("injection", config.model.injection),
        ("seed", str(config.train.seed)),
        ("folder", str(history.folder)),
    ]


def _rows(title: str, rows: Iterable[tuple[str, str]]) -> str:
    cells = "".join(
        f'<tr><th scope="row">{escape(k)}</th><td>{escape(v)}</td></tr>' for k, v in rows
    )
    return f'<div class="card"><h3>{escape(title)}</h3><table class="facts">{cells}</table></div>'


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return ""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return ""


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
