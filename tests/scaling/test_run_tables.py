from __future__ import annotations

import json

import pytest

from megaparcae.errors import UserError
from megaparcae.scaling.runs import final_losses, read_runs, runs_from_rows

ROW = {"budget": 1e18, "mu": 2, "tokens": 1e9, "loss": 3.2}


def test_csv_and_jsonl_give_the_same_table_and_t_defaults_to_mu(tmp_path):
    (tmp_path / "a.csv").write_text("budget,mu,tokens,loss\n1e18,2,1e9,3.2\n")
    (tmp_path / "a.jsonl").write_text(json.dumps(ROW) + "\n")
    a, b = read_runs(tmp_path / "a.csv"), read_runs(tmp_path / "a.jsonl")
    assert a.loss == b.loss == [3.2]
    assert a.num_loops == b.num_loops == [2]


def test_held_out_tables_need_no_budget():
    row = {k: v for k, v in ROW.items() if k != "budget"}
    assert len(runs_from_rows([row], "x", require_budget=False)) == 1
    with pytest.raises(UserError, match="lacks the columns budget"):
        runs_from_rows([row], "x")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"loss": "nan"}, "row 1: loss=nan must be a positive number"),
        ({"loss": "abc"}, "row 1: loss='abc' must be a number"),
        ({"tokens": -1}, "row 1: tokens=-1"),
        ({"mu": None}, "row 1: mu=nan"),
        ({"T": 0}, "row 1: T=0"),
    ],
)
def test_a_wrong_value_is_refused_with_its_row(change, message):
    with pytest.raises(UserError, match=message):
        runs_from_rows([{**ROW, **change}], "table.csv")


def test_empty_and_damaged_tables_are_refused(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(UserError, match="has no rows"):
        read_runs(empty)
    empty.write_text("3\n")
    with pytest.raises(UserError, match="line 1 is not a JSON object"):
        read_runs(empty)
    with pytest.raises(UserError, match="has no grid.jsonl"):
        read_runs(tmp_path)


def test_only_the_validation_after_the_last_step_counts(tmp_path):
    log = tmp_path / "log.jsonl"
    assert final_losses(log, 20) == {}
    early = {"kind": "validation", "step": 10, "loss": {"1": 4.0, "2": 3.9}}
    final = {"kind": "validation", "step": 20, "loss": {"1": 3.5, "2": 3.4}}
    train = {"kind": "train", "step": 20, "loss": 3.3}
    log.write_text(json.dumps(early) + '\n{"kind": "tra')
    assert final_losses(log, 20) == {}
    log.write_text("\n".join(json.dumps(record) for record in (early, train, final)))
    assert final_losses(log, 20) == {1: 3.5, 2: 3.4}
