"""What a suite found: tables for people, JSON for programs."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from megaparcae.bench.options import Options

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Report:
    """Tables of a suite by name; every row of a table is field -> value."""

    suite: str
    options: Options
    tables: Mapping[str, Sequence[Row]]

    def write(self, path: Path) -> None:
        """As JSON."""
        content = {
            "suite": self.suite,
            "options": asdict(self.options),
            "machine": machine(),
            "tables": self.tables,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")

    def show(self) -> None:
        """On the terminal."""
        console = Console()
        if not console.is_terminal:
            console = Console(width=120)
        facts = machine()
        console.print(
            f"[bold]{self.suite}[/bold]: {facts['processor']}, {facts['cores']} cores, "
            f"{facts['threads']} threads, {facts['device']}, torch {facts['torch']}",
            highlight=False,
        )
        for name, rows in self.tables.items():
            console.print(draw(name, rows))


def draw(name: str, rows: Sequence[Row]) -> Table:
    """One table; text on the left, numbers on the right."""
    table = Table(title=name, title_justify="left")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        is_text = any(isinstance(row.get(column), str) for row in rows)
        table.add_column(column.replace("_", " "), justify="left" if is_text else "right")
    for row in rows:
        table.add_row(*(shown(row.get(column)) for column in columns))
    return table


def shown(value: Any) -> str:
    """Three or four digits that matter."""
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        case _:
            return str(value)


def machine() -> dict[str, Any]:
    """What the figures belong to."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text() if info.is_file() else "")
    on_gpu = torch.cuda.is_available()
    return {
        "processor": found[1] if found else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
