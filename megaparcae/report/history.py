"""What happened in a run, from log.jsonl and config.yaml: series by step, events, where time went.

A process that resumes begins with a `start` record of the steps made. What its predecessor logged
beyond them was lost: those steps are made again, and the last record of a step counts. Fields that
are missing or of another type are left out, so that a damaged log still makes a page.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megaparcae.config.load import load_config
from megaparcae.config.schema import RunConfig
from megaparcae.errors import UserError
from megaparcae.log import read_records

Record = dict[str, Any]
Level = Literal["info", "good", "warn", "bad"]

FIGURES = ("start", "step", "validation", "health", "ranks")
"""Kinds of record that are more than an event."""


@dataclass(frozen=True)
class Event:
    """Something that happened once."""

    kind: str
    step: int
    time: float | None
    """Unix seconds."""
    level: Level
    text: str


@dataclass
class TimeSpent:
    """Seconds between the first and the last record."""

    kept: float = 0.0
    """Steps whose update is in the weights, or that were skipped."""
    repeated: float = 0.0
    """Steps that were lost and made again."""
    between: float = 0.0
    """Validation, saves, records of health."""
    down: float = 0.0
    """From the last record of a process to the start of the next one's work."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.kept + self.repeated + self.between + self.down


@dataclass
class History:
    """One run."""

    folder: Path
    config: RunConfig | None = None
    config_text: str = ""
    config_problem: str = ""
    """Why there is no config, or an empty string."""
    steps: dict[int, Record] = field(default_factory=dict)
    validation: dict[int, dict[int, float]] = field(default_factory=dict)
    """Step -> T -> loss."""
    health: dict[int, Record] = field(default_factory=dict)
    ranks: dict[int, Record] = field(default_factory=dict)
    """Step -> the slowest rank, compared with its peers."""
    starts: list[Record] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    time: TimeSpent = field(default_factory=TimeSpent)
    last_time: float | None = None
    num_lost_steps: int = 0
    num_damaged_lines: int = 0

    @property
    def last_step(self) -> int:
        """Steps made."""
        return max(self.steps, default=0)

    @property
    def num_steps(self) -> int | None:
        """Steps of the whole run, if known."""
        return self.config.train.num_steps if self.config else None

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of a field of the step records."""
        return _series(self.steps, name)

    def total(self, name: str) -> dict[str, float]:
        """Sum over all steps of a field that is a mapping."""
        sums: dict[str, float] = defaultdict(float)
        for record in self.steps.values():
            for key, value in numbers(record, name).items():
                sums[key] += value
        return sums

    def health_series(self, name: str, key: str | None = None) -> list[tuple[int, float]]:
        """(step, value) of a field of the health records, or of an entry of it."""
        if key is None:
            return _series(self.health, name)
        return _series({s: _mapping(r.get(name)) for s, r in self.health.items()}, key)


def read_history(run: Path) -> History:
    """Raises UserError when there is no log or no record in it."""
    path = run / "log.jsonl"
    if not path.is_file():
        raise UserError(f"{path} is missing; give the folder of a run (its checkpoint.dir)")
    records = read_records(path)
    if not records:
        raise UserError(f"{path} has no record yet; let the run go on for a while")
    history = History(run)
    num_lines = sum(bool(line.strip()) for line in path.read_bytes().splitlines())
    history.num_damaged_lines = num_lines - len(records)
    _read_config(history)
    for record in records:
        _take(history, record)
    _measure_time(history, records)
    return history


def _read_config(history: History) -> None:
    path = history.folder / "config.yaml"
    try:
        history.config_text = path.read_text(encoding="utf-8", errors="replace")
        history.config = load_config(path)
    except (OSError, ValueError) as error:
        history.config_problem = str(error)


def _take(history: History, record: Record) -> None:
    step, time = record["step"], number(record, "time")
    history.last_time = time or history.last_time
    match record["kind"]:
        case "start":
            lost = _forget_after(history, step)
            history.starts.append(record)
            history.events.append(_start_event(record, history, lost))
        case "step":
            before = history.steps.get(step - 1, {})
            history.steps[step] = record
            _note_skip(history, record, before)
        case "validation":
            losses = {int(t): x for t, x in numbers(record, "loss").items() if t.isdecimal()}
            history.validation[step] = losses
        case "health":
            history.health[step] = record
        case "ranks":
            history.ranks[step] = record
            _note_straggler(history, record)
    if record["kind"] not in FIGURES:
        history.events.append(describe(record))


def _forget_after(history: History, step: int) -> int:
    """Drop the records beyond the checkpoint that a process goes on from; the steps lost."""
    lost = [made for made in history.steps if made > step]
    history.num_lost_steps += len(lost)
    for series in (history.steps, history.validation, history.health, history.ranks):
        for made in [made for made in series if made > step]:
            del series[made]  # type: ignore[attr-defined]
    return len(lost)


def _note_skip(history: History, record: Record, before: Record) -> None:
    step, time = record["step"], number(record, "time")
    if (number(record, "skipped_steps") or 0) > (number(before, "skipped_steps") or 0) and before:
        text = "update skipped: " + (
            "the loss is a spike" if record.get("loss_spike") else "loss or gradient not finite"
        )
        history.events.append(Event("skip", step, time, "warn", text))
    elif record.get("loss_spike"):
        loss = number(record, "loss")
        text = f"loss spike: {loss:.4f}" if loss is not None else "loss spike"
        history.events.append(Event("spike", step, time, "warn", text))


def _note_straggler(history: History, record: Record) -> None:
    """A machine that is slow; that a rank drew deeper samples is no event."""
    if record.get("cause") in (None, "depth"):
        return
    slower = number(record, "slower") or math.nan
    text = (
        f"rank {record.get('slowest_rank', '?')} on {record.get('host', 'unknown host')} takes "
        f"{slower:.2f} times as long as its peers, though its samples are no deeper"
    )
    event = Event("straggler", record["step"], number(record, "time"), "warn", text)
    history.events.append(event)


def _start_event(record: Record, history: History, lost: int) -> Event:
    world = int(numbers(record, "layout").get("world", 1))
    where = f"{world} process{'es' if world > 1 else ''} on {record.get('host', 'unknown host')}"
    anew = "started anew" if len(history.starts) > 1 else "started"
    how = "resumed" if record["step"] else anew
    again = f"; {lost} step{'s' if lost > 1 else ''} to be made again" if lost else ""
    device = record.get("device", "unknown device")
    text = f"{how} with {where} ({device}){again}"
    return Event("start", record["step"], number(record, "time"), "info", text)


def describe(record: Record) -> Event:
    """A record that is no measurement, in words."""
    level: Level = "info"
    match record["kind"]:
        case "checkpoint":
            level, text = "good", "saved" + _describe_save(record)
        case "save_failed":
            level, text = "bad", f"save failed: {record.get('reason', 'no reason given')}"
        case "roll_back":
            level = "warn"
            text = f"rolled back to the weights of step {record.get('to_step', '?')}"
        case "stop":
            text = f"stopped: {record.get('reason', 'no reason given')}"
        case other:
            level = "warn"
            fields = {k: v for k, v in record.items() if k not in ("kind", "step", "time")}
            text = f"{other.replace('_', ' ')} " + ", ".join(f"{k} {v}" for k, v in fields.items())
    return Event(record["kind"], record["step"], number(record, "time"), level, text)


def _describe_save(record: Record) -> str:
    seconds, stall = number(record, "seconds"), number(record, "stall_seconds")
    if seconds is None or stall is None:
        return ""
    return f" in {seconds:.2g} s, training waited {stall:.2g} s"


def _measure_time(history: History, records: Sequence[Record]) -> None:
    """Seconds of the steps that count, of those that were lost, between steps and between runs."""
    times = [record for record in records if number(record, "time") is not None]
    counted = {id(record) for record in history.steps.values()}
    spent = history.time
    for record in times:
        seconds = number(record, "seconds") or 0.0
        if record["kind"] == "step":
            if id(record) in counted:
                spent.kept += seconds
            else:
                spent.repeated += seconds
    for before, after in itertools.pairwise(times):
        if after["kind"] == "start":
            spent.down += max(0.0, after["time"] - before["time"])
    if times:
        whole = times[-1]["time"] - times[0]["time"]
        spent.between = max(0.0, whole - spent.kept - spent.repeated - spent.down)


def number(record: Record, name: str) -> float | None:
    """A finite number, or None."""
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def numbers(record: Record, name: str) -> dict[str, float]:
    """The finite numbers of a mapping."""
    found = _mapping(record.get(name))
    return {key: x for key in found if (x := number(found, key)) is not None}


def _mapping(value: object) -> Record:
    return value if isinstance(value, dict) else {}


def _series(records: dict[int, Record], name: str) -> list[tuple[int, float]]:
    return [(s, x) for s in sorted(records) if (x := number(records[s], name)) is not None]
