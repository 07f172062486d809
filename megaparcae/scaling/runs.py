"""A table of finished runs: what every fit reads, from jsonl, csv or the folders of a grid."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megaparcae.errors import UserError
from megaparcae.log import read_records

REQUIRED = ("budget", "mu", "tokens", "loss")
OPTIONAL = ("T", "params")

Row = Mapping[str, object]


@dataclass(frozen=True)
class Runs:
    """One row per (run, number of loops at evaluation); all arrays [rows], float64."""

    budget: np.ndarray
    """Training FLOPs of the run; 0 where it is unknown (held-out runs)."""
    mu: np.ndarray
    """Mean recurrence the run was trained with."""
    tokens: np.ndarray
    """Training tokens D."""
    num_loops: np.ndarray
    """Loops T at which the loss was taken (column `T`; mu where the table has no such column)."""
    loss: np.ndarray
    """Validation loss in nats per token."""
    params: np.ndarray
    """Parameters N(mu) of the unrolled model; NaN where the table has no such column."""

    def __len__(self) -> int:
        return len(self.loss)

    def select(self, mask: np.ndarray) -> Runs:
        """The rows where `mask` holds."""
        return Runs(**{name: column[mask] for name, column in vars(self).items()})

    def at_training_depth(self) -> Runs:
        """One row per run: its loss at T = mu, which is what the training law describes."""
        return self.select(self.num_loops == self.mu)

    def looped(self) -> Runs:
        """Without the fixed-depth baselines (mu = 1), which the paper keeps out of every fit."""
        return self.select(self.mu > 1)

    def run_ids(self) -> np.ndarray:
        """[rows] the same integer for the rows of one run."""
        keys = np.stack([self.budget, self.mu, self.tokens], axis=1)
        return np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)

    def columns(self) -> dict[str, np.ndarray]:
        """What laws are functions of: N, D, T and mu."""
        return {"N": self.params, "D": self.tokens, "T": self.num_loops, "mu": self.mu}


def read_runs(path: Path, require_budget: bool = True) -> Runs:
    """Rows from a .csv, a .jsonl, or a grid folder (its grid.jsonl and the runs' log.jsonl)."""
    if path.is_dir():
        return runs_from_rows(_grid_rows(path), str(path), require_budget)
    text = path.read_text()
    if path.suffix == ".csv":
        rows: list[Row] = list(csv.DictReader(text.splitlines()))
    else:
        rows = [_parse_line(path, i, line) for i, line in enumerate(text.splitlines(), 1) if line]
    return runs_from_rows(rows, str(path), require_budget)


def runs_from_rows(rows: Iterable[Row], source: str, require_budget: bool = True) -> Runs:
    """Checked columns of a list of records; UserError names the column or row that is wrong."""
    rows = list(rows)
    if not rows:
        raise UserError(f"{source} has no rows; give at least one finished run per budget and mu")
    required = REQUIRED if require_budget else REQUIRED[1:]
    missing = [name for name in required if name not in rows[0]]
    if missing:
        raise UserError(
            f"{source} lacks the columns {', '.join(missing)}; a table needs "
            f"{', '.join(required)} and may have {', '.join(OPTIONAL)}"
        )
    column = {
        name: np.array([_number(source, i, row, name) for i, row in enumerate(rows, 1)])
        for name in (*REQUIRED, *OPTIONAL)
    }
    column["T"] = np.where(np.isnan(column["T"]), column["mu"], column["T"])
    column["budget"] = np.nan_to_num(column["budget"])
    for name in (*required, "T"):
        bad = np.flatnonzero(~(column[name] > 0) | ~np.isfinite(column[name]))
        if len(bad):
            raise UserError(
                f"{source} row {bad[0] + 1}: {name}={column[name][bad[0]]:g} must be a positive "
                "number; drop runs that diverged"
            )
    return Runs(num_loops=column.pop("T"), **column)


def final_losses(log: Path, num_steps: int) -> dict[int, float]:
    """Loss by number of loops of the validation after step `num_steps`; empty before that.

    Reads records {"kind": "validation", "step": s, "loss": {"<T>": nats per token}} of log.jsonl;
    a last line that a running trainer has not finished is ignored.
    """
    if not log.exists():
        return {}
    losses: dict[int, float] = {}
    for record in read_records(log):
        if record["kind"] == "validation" and record["step"] >= num_steps:
            losses = {int(loops): float(loss) for loops, loss in record["loss"].items()}
    return losses


def _grid_rows(folder: Path) -> list[Row]:
    index = folder / "grid.jsonl"
    if not index.exists():
        raise UserError(f"{folder} has no grid.jsonl; give a folder that `grid` wrote, or a table")
    rows: list[Row] = []
    for number, line in enumerate(index.read_text().splitlines(), 1):
        entry = dict(_parse_line(index, number, line))
        log = Path(str(entry["dir"])) / "log.jsonl"
        losses = final_losses(log, int(str(entry["num_steps"])))
        rows += [{**entry, "T": loops, "loss": loss} for loops, loss in losses.items()]
    if not rows:
        raise UserError(f"none of the runs of {index} has finished yet; `run` them first")
    return rows


def _parse_line(path: Path, number: int, line: str) -> Row:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        record = None
    if not isinstance(record, dict):
        raise UserError(f"{path} line {number} is not a JSON object; write one record per line")
    return record


def _number(source: str, row_number: int, row: Row, name: str) -> float:
    value = row.get(name)
    if value is None or value == "":
        return math.nan
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise UserError(
            f"{source} row {row_number}: {name}={value!r} must be a number; correct or drop the row"
        ) from None
