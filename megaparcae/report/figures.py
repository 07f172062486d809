"""Which charts a run's history makes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from megaparcae.report.chart import Chart, Line, Point, ramp, render_bar, smoothed
from megaparcae.report.history import History, number, numbers

MARKED = {"start": "resumed", "roll_back": "rolled back", "skip": "skipped", "spike": "loss spike"}
"""Kinds of event that are marked in the loss chart."""


def marks(history: History) -> list[tuple[float, str]]:
    """Vertical lines for what may explain a bend in a curve."""
    found = [e for e in history.events if e.kind in MARKED and (e.kind != "start" or e.step)]
    return [(e.step, f"{MARKED[e.kind]} (step {e.step})") for e in found[-200:]]


def loss_chart(history: History) -> Chart:
    """Training loss, and validation at the deepest T."""
    points = history.series("loss")
    lines = [
        Line("training, each step", points, "faint", "var(--s1)"),
        Line("training, smoothed", smoothed(points), "line", "var(--s1)"),
    ]
    depths = sorted({t for losses in history.validation.values() for t in losses})
    if depths:
        deepest = depths[-1]
        dots = [(s, x[deepest]) for s, x in sorted(history.validation.items()) if deepest in x]
        lines.append(Line(f"validation, T = {deepest}", dots, "dots", "var(--s2)"))
    return Chart(
        title="Training and validation",
        unit="nats per token",
        lines=lines,
        marks=marks(history),
        wide=True,
        skip_first=0.01,
        note="Vertical lines: restarts, skipped steps, spikes, roll-backs." * bool(marks(history)),
    )


def validation_chart(history: History) -> Chart:
    """Validation loss over the steps, a line for each T."""
    depths = sorted({t for losses in history.validation.values() for t in losses})
    lines = [
        Line(
            f"T = {t}",
            [(s, x[t]) for s, x in sorted(history.validation.items()) if t in x],
            "line",
            ramp(i, len(depths)),
        )
        for i, t in enumerate(depths)
    ]
    return Chart(title="Validation at fixed depths", unit="nats per token", lines=lines)


def test_time_chart(history: History) -> Chart:
    """Validation loss over T, now and earlier."""
    found = [(s, x) for s, x in sorted(history.validation.items()) if len(x) > 1]
    chosen = found[-1:] if len(found) < 3 else [found[len(found) // 2], found[-1]]
    lines = [
        Line(f"after step {s}", sorted(x.items()), "line", f"var(--s{2 - i})")
        for i, (s, x) in enumerate(reversed(chosen))
    ]
    return Chart(
        title="What more loops buy at test time",
        unit="validation loss, nats per token",
        x_name="T",
        lines=lines[::-1],
    )


def depth_loss_chart(history: History) -> Chart:
    """Training loss of the sequences of each drawn depth, early and late in the run."""
    steps = sorted(history.health)
    third = max(1, len(steps) // 3)
    parts = [("first third", steps[:third]), ("last third", steps[-third:])]
    lines = [
        Line(f"{name} of the run", _mean_by_depth(history, part), "line", f"var(--s{2 - i})")
        for i, (name, part) in enumerate(parts if len(steps) > 1 else parts[1:])
    ]
    return Chart(
        title="Training loss by depth drawn",
        unit="nats per token",
        x_name="T",
        lines=lines,
        note=f"Means over {len(steps)} steps with a health record, weighted by sequences.",
    )


def _mean_by_depth(history: History, steps: Sequence[int]) -> list[Point]:
    sums: dict[int, float] = defaultdict(float)
    counts: dict[int, float] = defaultdict(float)
    for step in steps:
        drawn = numbers(history.health[step], "depths")
        for depth, loss in numbers(history.health[step], "loss_by_depth").items():
            if depth.isdecimal():
                sums[int(depth)] += loss * drawn.get(depth, 1.0)
                counts[int(depth)] += drawn.get(depth, 1.0)
    return [(t, sums[t] / counts[t]) for t in sorted(sums) if counts[t]]


def health_charts(history: History) -> list[Chart]:
    """What tells a stable loop from one that is about to explode."""

    def line(name: str, field: str, i: int = 1, key: str | None = None) -> Line:
        return Line(name, history.health_series(field, key), "line", f"var(--s{i})")

    blocks = sorted(
        {k for r in history.health.values() for k in numbers(r, "prelude_norms")}, key=_as_int
    )
    return [
        Chart(
            title="Decay of the loop",
            unit="spectral norm of Ā; below 1 it contracts",
            lines=[line("ρ(Ā)", "rho_A", 1), line("mean decay", "decay_mean", 2)],
        ),
        Chart(
            title="Change in the last loop",
            unit="|h_T − h_(T−1)| / |h_T|",
            lines=[line("residual ratio", "residual_ratio", 3)],
            from_zero=True,
        ),
        Chart(
            title="State norm",
            unit="|h_T|",
            lines=[line("mean", "state_norm", 1), line("largest token", "state_norm_max", 4)],
            from_zero=True,
        ),
        Chart(
            title="Injection and readout",
            unit="spectral norm",
            lines=[line("B̄", "B_norm", 1), line("C", "C_norm", 2)],
            from_zero=True,
        ),
        Chart(
            title="Residual stream before the loop",
            unit="token norm after each block",
            lines=[
                Line(f"block {b}", history.health_series("prelude_norms", b), "line",
                     ramp(i, len(blocks)))
                for i, b in enumerate(blocks)
            ],
            from_zero=True,
        ),
        Chart(
            title="Update norm",
            unit="of all weights in a step",
            lines=[line("|Δw|", "update_norm", 5)],
            log_y=True,
        ),
    ]  # fmt: skip


def _as_int(text: str) -> int:
    return int(text) if text.isdecimal() else -1


def optimizer_charts(history: History) -> list[Chart]:
    """Gradient norm and learning rate."""
    norm = history.series("grad_norm")
    return [
        Chart(
            title="Gradient norm",
            unit="before clipping",
            lines=[
                Line("each step", norm, "faint", "var(--s4)"),
                Line("smoothed", smoothed(norm), "line", "var(--s4)"),
            ],
            log_y=True,
            marks=marks(history),
        ),
        Chart(
            title="Learning rate",
            unit="factor of the optimizer's rates",
            lines=[Line("factor", history.series("lr_factor"), "line", "var(--s3)")],
            from_zero=True,
        ),
    ]


def speed_charts(history: History) -> list[Chart]:
    """Tokens and FLOPs per second, loops and balance."""
    speed, mfu = _steady(history, "tokens_per_second"), _steady(history, "mfu")
    tflops = _steady(history, "tflops_per_device")
    work = [(s, 100 * x) for s, x in balance(history)]
    ranks = history.ranks
    rate = Chart(
        title="MFU" if mfu else "Arithmetic per device",
        unit="share of the device's peak" if mfu else "TFLOP/s that the model needs",
        lines=_raw_and_smooth(mfu or tflops, 3),
        from_zero=True,
    )
    return [
        Chart(
            title="Throughput",
            unit="tokens per second, whole run",
            lines=_raw_and_smooth(speed, 1),
            from_zero=True,
        ),
        rate,
        Chart(
            title="Loops per sequence",
            unit="mean T of a step",
            lines=_raw_and_smooth(history.series("mean_loops"), 2),
        ),
        Chart(
            title="Balance of loop work",
            unit="rank 0, % of an even share",
            lines=_raw_and_smooth(work, 6),
        ),
        Chart(
            title="Efficiency of the loop",
            unit="core FLOPs needed, % of executed",
            lines=_raw_and_smooth([(s, 100 * x) for s, x in history.series("efficiency")], 4),
        ),
        Chart(
            title="Slowest rank",
            unit="times the median of its peers",
            lines=[
                Line("forward time", [(s, x) for s, r in sorted(ranks.items())
                                      if (x := number(r, "slower")) is not None], "line",
                     "var(--s5)"),
                Line("depth drawn", [(s, x) for s, r in sorted(ranks.items())
                                     if (x := number(r, "deeper")) is not None], "line",
                     "var(--s1)"),
            ],
        ),
    ]  # fmt: skip


def _raw_and_smooth(points: list[tuple[int, float]], color: int) -> list[Line]:
    return [
        Line("each step", points, "faint", f"var(--s{color})"),
        Line("smoothed", smoothed(points), "line", f"var(--s{color})"),
    ]


def _steady(history: History, name: str) -> list[tuple[int, float]]:
    """Without the first step after each start, which warms up."""
    first = {record["step"] + 1 for record in history.starts}
    return [(step, x) for step, x in history.series(name) if step not in first]


def balance(history: History) -> list[tuple[int, float]]:
    """Loop work of rank 0 as a multiple of an even share over the dp ranks."""
    dp = numbers(history.starts[-1], "layout").get("dp") if history.starts else None
    mine, whole = dict(history.series("rank0_loop_work")), dict(history.series("loop_work"))
    if not dp or dp == 1:
        return []
    return [(s, mine[s] * dp / whole[s]) for s in sorted(mine) if whole.get(s)]


FLOP_PARTS = {
    "prelude": "prelude",
    "core_no_grad": "loops without gradient",
    "core_grad": "loops with gradient",
    "coda": "coda",
    "head": "head and loss",
    "projections": "injection and readout",
}
"""Names in the log, and for people."""


def flops_bar(history: History) -> str:
    """FLOPs per token that the depths drawn needed, by part."""
    tokens = history.series("tokens")
    if not tokens:
        return ""
    needed, again = history.total("flops_needed"), history.total("flops_recomputed")
    num_tokens = tokens[-1][1] * len(history.steps) / tokens[-1][0]
    parts = [(name, needed.get(part, 0.0) / num_tokens) for part, name in FLOP_PARTS.items()]
    share = sum(again.values()) / (sum(needed.values()) or 1.0)
    note = (
        f"{share:.1%} more is computed a second time: attention scores in the backward pass, and "
        "activation checkpointing where it is on."
    )
    return render_bar("FLOPs by part", "{} FLOP per token", parts, note)


def time_bar(history: History) -> str:
    """Where the time since the first record went."""
    spent = history.time
    parts = [
        ("steps that count", spent.kept),
        ("validation, saves, checks", spent.between),
        ("steps that were lost and made again", spent.repeated),
        ("between two starts", spent.down),
    ]
    return render_bar("Time", "{} s", parts)
