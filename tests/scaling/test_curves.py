from __future__ import annotations

import json
import math

import pytest

from megaparcae.errors import UserError
from megaparcae.scaling.curves import fit_evaluations, read_evaluation


def evaluation(path, mu=8, loops=range(1, 25)):
    """What evaluate.py writes for a model whose loss is exactly exponential."""
    losses = [{"num_loops": T, "loss": 2.9 + 0.8 * math.exp(-0.7 * T)} for T in loops]
    report = {"model": f"runs/{path.stem}", "mean_recurrence": mu, "loss": losses}
    path.write_text(json.dumps(report))
    return path


def test_models_that_were_evaluated_are_fitted_and_drawn_without_any_budget(tmp_path):
    files = [evaluation(tmp_path / "a.json"), evaluation(tmp_path / "b.json")]
    report = fit_evaluations(files, tmp_path / "out").read_text()
    assert "| runs/a | 8 | 2.9000 | 0.8 | 0.7 |" in report and "| runs/b |" in report
    first, second = json.loads((tmp_path / "out" / "curves.json").read_text())
    assert first["fits"]["exponential"]["params"]["z"] == pytest.approx(0.7, rel=1e-3)
    assert first["fits"] == second["fits"] and len(first["fits"]) == 4
    beyond = first["extrapolated_huber_per_point"]
    assert min(beyond, key=beyond.get) == "exponential"
    assert (tmp_path / "out" / "curves.png").stat().st_size > 5000


def test_a_file_that_holds_no_curve_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(UserError, match="losses at 3 T, and a curve needs at least 4; write it"):
        read_evaluation(evaluation(tmp_path / "few.json", loops=(1, 2, 4)))
    for text in ("{", '{"model": "m", "loss": []}', "[1]"):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(UserError, match="does not hold the losses of a looped model"):
            read_evaluation(tmp_path / "other.json")
