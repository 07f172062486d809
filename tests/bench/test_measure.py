"""Turns, ratios, peaks and the processes of the benchmarks."""

from __future__ import annotations

import argparse
import json
import os

import numpy as np
import pytest

from megaparcae.bench.measure import PeakMemory, Timings, in_processes, take_turns
from megaparcae.bench.options import (
    SUITES,
    LoaderOptions,
    StepOptions,
    add_options,
    from_arguments,
)
from megaparcae.bench.report import Report, shown
from megaparcae.errors import UserError


def test_variants_take_turns_and_warm_up_rounds_do_not_count():
    order: list[str] = []

    def variant(name: str, seconds: float):
        def run() -> float:
            order.append(name)
            return seconds * len(order)

        return run

    timings = take_turns({"a": variant("a", 1.0), "b": variant("b", 1.0)}, repeats=2)
    assert order == ["a", "b"] * 3
    assert timings.seconds == {"a": [3.0, 5.0], "b": [4.0, 6.0]}


def test_a_speedup_compares_the_runs_of_one_turn():
    """The machine becomes ten times slower in the last turn: the ratio does not move."""
    timings = Timings({"old": [2.0, 2.2, 20.0], "new": [1.0, 1.0, 10.0]})
    assert timings.speedup("new", "old").median == 2.0
    assert timings.speedup("new", "old").high == 2.2
    first, second = timings.rows("old", things=4)
    assert (first["speedup"], second["speedup"]) == (1.0, 2.0)
    assert second["things_per_second"] == 4.0
    assert second["spread"] == 9.0


def test_peak_memory_counts_what_was_given_back():
    memory = PeakMemory()
    np.ones(8 << 20)  # 64 MiB
    assert 60e6 < memory.bytes() < 80e6


def pid_and(number: int) -> tuple[int, int]:
    if number < 0:
        raise UserError("a negative number")
    return os.getpid(), number


def test_functions_run_in_processes_of_their_own_and_their_errors_come_back():
    (first, one), (second, two) = in_processes(pid_and, [(1,), (2,)])
    assert (one, two) == (1, 2)
    assert len({first, second, os.getpid()}) == 3
    with pytest.raises(UserError, match="a negative number"):
        in_processes(pid_and, [(-1,)])


def test_a_report_is_json_with_machine_and_options(tmp_path):
    report = Report("loader", LoaderOptions(rows=3), {"t": [{"a": 1, "b": 0.5}, {"a": 2}]})
    report.write(tmp_path / "new" / "out.json")
    read = json.loads((tmp_path / "new" / "out.json").read_text())
    assert read["options"]["rows"] == 3
    assert read["tables"]["t"][0] == {"a": 1, "b": 0.5}
    assert read["machine"]["cores"] == os.cpu_count()


@pytest.mark.parametrize(
    "value, text",
    [(None, ""), (True, "yes"), (12345, "12,345"), (0.123456, "0.1235"), (1e6, "1,000,000")],
)
def test_numbers_are_shown_with_the_digits_that_matter(value, text):
    assert shown(value) == text


def test_an_option_out_of_range_is_named():
    with pytest.raises(UserError, match="--repeats=0 must be at least 1"):
        LoaderOptions(repeats=0)
    with pytest.raises(UserError, match="--tokenizer-model is missing"):
        SUITES["preprocess"](input="x.jsonl")


def test_lists_are_given_once_and_changes_of_the_run_add_up():
    parser = argparse.ArgumentParser()
    add_options(parser, StepOptions)
    given = parser.parse_args(["--rows", "1", "2", "--set", "a.b=1", "--set", "c.d=2", "e.f=3"])
    options = from_arguments(StepOptions, given)
    assert isinstance(options, StepOptions)
    assert options.rows == (1, 2)
    assert options.overrides == ("a.b=1", "c.d=2", "e.f=3")
    assert options.means == StepOptions().means
