#!/usr/bin/env python3
"""What a model costs, and with --gpus the best way to train it on a cluster.

Without --gpus: parameters by part and training FLOPs per token. `needed` FLOPs are the matrix
products of the model at the expected loop depth, with half of the attention scores (causal);
`executed` adds what activation checkpointing and fused attention compute twice. The authors'
convention is the one of the paper's isoFLOP budgets.

With --gpus: all legal layouts, with memory by part, step time by part and why the others lose;
refused (exit 2) with the nearest remedy when nothing fits. --output writes the run's YAML.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megaparcae.errors import run_command
from megaparcae.plan.options import add_cluster_options, read_cluster


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--preset", help="name of a preset, such as 140m or rdm_100m")
    source.add_argument("--config", type=Path, help="YAML of a run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change it")
    parser.add_argument("--json", action="store_true", help="plain numbers for programs")
    add_cluster_options(parser)
    return parser.parse_args()


def main() -> None:
    args = parse()
    from megaparcae.config.load import load_config, preset_config
    from megaparcae.plan import report
    from megaparcae.plan.run import make_plan
    from megaparcae.scaling.model_cost import cost_lines, model_costs

    load, source = (load_config, args.config) if args.config else (preset_config, args.preset)
    config = load(source, args.set)
    if args.gpus is None:
        numbers = model_costs(config)
        title, tables, width = str(source), cost_lines(numbers), 80
    else:
        cluster = read_cluster(args)
        plan = make_plan(config, cluster, tokens=args.tokens, keep=args.top, as_is=args.as_is)
        if args.output:
            Path(args.output).write_text(plan.run_yaml(), encoding="utf-8")
        numbers, tables, width = report.plan_numbers(plan), report.plan_tables(plan), 100
        title = f"{source} on {report.describe_cluster(cluster)}"
    print(json.dumps(numbers, indent=2)) if args.json else show(title, tables, width)


def show(title: str, tables: dict[str, list[tuple[str, ...]]], width: int) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=width)
    console.print(f"[bold]{title}[/bold]", highlight=False)
    for name, (heading, *rows) in tables.items():
        table = Table(title=name, title_justify="left", min_width=64)
        for i, column in enumerate(heading):
            text = column.startswith("why") or (i == 0 and name != "Whole run")
            table.add_column(column, justify="left" if text else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)


if __name__ == "__main__":
    run_command(main)
