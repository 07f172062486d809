"""A plan as tables of 100 columns and as plain numbers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from megaparcae.config.load import config_tree
from megaparcae.config.schema import ParallelConfig
from megaparcae.model.flops import Recompute, expected_flops
from megaparcae.plan.machines import GIB, Cluster
from megaparcae.plan.run import Plan
from megaparcae.plan.search import Layout, Rejected, why_slower

Table = list[tuple[str, ...]]
MOST_OTHERS = 14
"""Rows of the table of what lost."""

TIME_NAMES = {
    "needed": "arithmetic of the model",
    "recomputed": "computed twice",
    "overhead": "starting kernels",
    "waiting": "waiting for stages and ranks",
    "tensor": "between tp ranks and stages",
    "data": "gradients out, weights back",
    "update": "weights in memory, update",
}


def plan_tables(plan: Plan) -> dict[str, Table]:
    """By title; the first row is the heading, all cells are text."""
    best = plan.best
    tables = {
        "Layouts that fit, fastest first": _layouts(plan),
        f"{best.name}: GiB of the fullest GPU": _memory(best, plan.cluster),
        f"{best.name}: one step": _step(best),
    }
    if plan.ranking.rejected:
        shown = {(x.batch.tp, x.batch.pp) for x in plan.ranking.best}
        others = [r for r in plan.ranking.rejected if (r.tp, r.pp) not in shown]
        if others:
            tables["The others"] = _others(others)
    tables["Whole run"] = _run(plan)
    return tables


def describe_cluster(cluster: Cluster) -> str:
    """What is assumed, in one line."""
    machine = cluster.machine
    return (
        f"{cluster.gpus} x {cluster.name}, {cluster.per_node} a node: {machine.memory:.0f} GiB "
        f"({cluster.reserve:.0%} left free), {machine.peak:.0f} TFLOP/s at {cluster.mfu:.0%}, "
        f"links {machine.intra:.0f} and {machine.inter:.0f} GB/s at {cluster.link_share:.0%}"
    )


def _layouts(plan: Plan) -> Table:
    rows: Table = [("layout", "rows", "recomputed", "GiB", "s/step", "days", "why slower")]
    shown = [(layout, "") for layout in plan.ranking.best]
    own = plan.own
    if own is not None and own.config.parallel != plan.best.config.parallel:
        shown.append((own, "as configured: "))
    for layout, prefix in shown:
        first = layout is plan.best
        rows.append(
            (
                layout.name,
                f"{layout.batch.micro_batch} x {layout.batch.accumulation}",
                recomputed(layout.config.parallel),
                f"{layout.memory.total / GIB:.1f}",
                f"{layout.time.total:.3f}",
                f"{plan.days(layout):.2f}",
                prefix + ("best" if first else why_slower(layout.time, plan.best.time)),
            )
        )
    return rows


def recomputed(parallel: ParallelConfig) -> str:
    """What checkpointing computes again."""
    outside, core = parallel.recompute_prelude, parallel.recompute_core
    if outside == core == "none":
        return "-"
    if outside == "none":
        return f"core {core}"
    return f"core {core}, rest {outside}" if core != outside else f"all {core}"


def _memory(layout: Layout, cluster: Cluster) -> Table:
    parts = {k.replace("_", " "): v for k, v in asdict(layout.memory).items() if v}
    names, numbers = (
        (*parts, "total", "may be filled"),
        (
            *parts.values(),
            layout.memory.total,
            cluster.usable,
        ),
    )
    return [tuple(names), tuple(f"{number / GIB:.2f}" for number in numbers)]


def _step(layout: Layout) -> Table:
    rows: Table = [("part", "ms", "share", "sent per GPU, GB")]
    traffic = layout.traffic
    sent = {
        "data": traffic.gradients + traffic.weights + traffic.tied,
        "tensor": traffic.tensor + traffic.pipeline,
    }
    for part, seconds in asdict(layout.time).items():
        if seconds:
            gigabytes = f"{sent[part] / 1e9:.2f}" if part in sent else ""
            share = f"{seconds / layout.time.total:.1%}"
            rows.append((TIME_NAMES[part], f"{1e3 * seconds:.1f}", share, gigabytes))
    return rows


def _others(rejected: list[Rejected]) -> Table:
    """The best of every other (tp, pp), or why there is none."""
    groups: dict[tuple[int, int], Rejected] = {}
    for other in rejected:
        key = (other.tp, other.pp)
        before = groups.get(key)
        if before is None or (other.seconds or 1e9) < (before.seconds or 1e9):
            groups[key] = other
    rows: Table = [("layout", "s/step, at least", "why not")]
    for key in sorted(groups):
        other = groups[key]
        seconds = f"{other.seconds:.3f}" if other.seconds else "-"
        rows.append((other.name, seconds, other.reason))
    if len(rows) > MOST_OTHERS + 1:
        left = len(rows) - MOST_OTHERS - 1
        rows = [*rows[: MOST_OTHERS + 1], (f"{left} more", "", "--json lists all")]
    return rows


def _run(plan: Plan) -> Table:
    days, best = plan.days(plan.best), plan.best
    hours = 24 * days * plan.cluster.gpus
    flops = plan.tokens * expected_flops(best.config.model).total
    mfu = best.time.needed * plan.cluster.mfu / best.time.total
    heading = ["tokens", "steps", "FLOPs needed", "MFU overall", "days", "GPU-hours"]
    row = [
        f"{plan.tokens:,}",
        f"{plan.steps:,}",
        f"{flops:.3e}",
        f"{mfu:.1%}",
        f"{days:.2f}",
        f"{hours:,.0f}",
    ]
    if plan.cluster.dollars is not None:
        heading.append("dollars")
        row.append(f"{hours * plan.cluster.dollars:,.0f}")
    return [tuple(heading), tuple(row)]


def plan_numbers(plan: Plan) -> dict[str, Any]:
    """Everything, for programs: bytes, seconds, FLOPs."""
    cluster = plan.cluster
    return {
        "cluster": {**asdict(cluster), "usable_bytes": cluster.usable},
        "run": {
            "tokens": plan.tokens,
            "steps": plan.steps,
            "days": plan.days(plan.best),
            "gpu_hours": 24 * plan.days(plan.best) * cluster.gpus,
            "dollars": None
            if cluster.dollars is None
            else 24 * plan.days(plan.best) * cluster.gpus * cluster.dollars,
        },
        "layouts": [_layout_numbers(plan, layout) for layout in plan.ranking.best],
        "as_configured": None if plan.own is None else _layout_numbers(plan, plan.own),
        "rejected": [asdict(other) for other in plan.ranking.rejected],
    }


def _layout_numbers(plan: Plan, layout: Layout) -> dict[str, Any]:
    tree = config_tree(layout.config)
    model = layout.config.model
    return {
        "name": layout.name,
        "parallel": tree["parallel"],
        "batch": asdict(layout.batch),
        "memory_bytes": {**asdict(layout.memory), "total": layout.memory.total},
        "step_seconds": {**asdict(layout.time), "total": layout.time.total},
        "sent_bytes": asdict(layout.traffic),
        "flops_per_token": {
            "needed": expected_flops(model).total,
            "executed": expected_flops(model, executed=Recompute.of(layout.config.parallel)).total,
        },
        "days": plan.days(layout),
        "why_slower": why_slower(layout.time, plan.best.time),
    }
