#!/usr/bin/env python3
"""What a model costs: parameters by part and training FLOPs per token.

`needed` FLOPs are the matrix products of the model at the expected loop depth, with half of the
attention scores (causal). `executed` adds what activation checkpointing and fused attention compute
twice. The authors' convention is the one of the paper's isoFLOP budgets.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megaparcae.errors import run_command


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--preset", help="name of a preset, such as 140m or rdm_100m")
    source.add_argument("--config", type=Path, help="YAML of a run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change it")
    parser.add_argument("--json", action="store_true", help="plain numbers for programs")
    return parser.parse_args()


def main() -> None:
    args = parse()
    from megaparcae.config.load import load_config, preset_config
    from megaparcae.scaling.model_cost import cost_lines, model_costs

    config = (
        load_config(args.config, args.set) if args.config else preset_config(args.preset, args.set)
    )
    costs = model_costs(config)
    if args.json:
        print(json.dumps(costs, indent=2))
    else:
        show(args.preset or str(args.config), cost_lines(costs))


def show(title: str, tables: dict[str, list[tuple[str, ...]]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=80)
    console.print(f"[bold]{title}[/bold]", highlight=False)
    for name, (heading, *rows) in tables.items():
        table = Table(title=name, title_justify="left", min_width=64)
        for i, column in enumerate(heading):
            table.add_column(column, justify="right" if i or name == "Whole run" else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)


if __name__ == "__main__":
    run_command(main)
