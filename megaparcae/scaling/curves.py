"""L(T) of finished models, from what tools/evaluate.py measured at many T: table 12 and figure 8.

Unlike a study this needs no budgets: one model is enough.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megaparcae.errors import UserError
from megaparcae.scaling.figures import draw_curves
from megaparcae.scaling.report import markdown_table, test_time_section
from megaparcae.scaling.runs import Runs
from megaparcae.scaling.test_time import MIN_POINTS, CurveFits, TestTimeStudy, fit_curve

REMEDY = "write it with tools/evaluate.py --num-loops 1,2,3,4,6,8,12,16,24 --json FILE"


def fit_evaluations(files: Sequence[Path], folder: Path) -> Path:
    """Fit the four forms to each file's losses; write curves.md, .json and .png into `folder`.

    Returns the path of the report. UserError for a file that is no evaluation at four T or more.
    """
    read = [read_evaluation(file) for file in files]
    names = [name for name, _ in read]
    study = TestTimeStudy([fit_curve(curve) for _, curve in read])
    folder.mkdir(parents=True, exist_ok=True)
    labels = [f"{name}, µ = {c.mu:g}" for name, c in zip(names, study.curves, strict=True)]
    draw_curves(study.curves, labels).savefig(folder / "curves.png", dpi=130)
    numbers = [_numbers(*pair) for pair in zip(names, study.curves, strict=True)]
    (folder / "curves.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    report = folder / "curves.md"
    parts = ("# Loss at T loops", _exponentials(names, study.curves), test_time_section(study))
    report.write_text("\n\n".join((*parts, "![curves](curves.png)\n")), encoding="utf-8")
    return report


def read_evaluation(file: Path) -> tuple[str, Runs]:
    """The model's folder and its losses by ascending T."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        losses = {int(one["num_loops"]): float(one["loss"]) for one in data["loss"]}
        name, mu = str(data["model"]), float(data["mean_recurrence"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{file} does not hold the losses of a looped model; {REMEDY}") from None
    if len(losses) < MIN_POINTS:
        raise UserError(
            f"{file} has losses at {len(losses)} T, and a curve needs at least {MIN_POINTS}; "
            f"{REMEDY}"
        )
    loops = np.array(sorted(losses), float)
    loss = np.array([losses[int(T)] for T in loops])
    unknown = np.full(len(loops), np.nan)
    return name, Runs(
        budget=np.zeros(len(loops)),
        mu=np.full(len(loops), mu),
        tokens=unknown,
        num_loops=loops,
        loss=loss,
        params=unknown,
    )


def _exponentials(names: Sequence[str], curves: Sequence[CurveFits]) -> str:
    rows = []
    for name, curve in zip(names, curves, strict=True):
        params = curve.fits["exponential"].params
        floor, size, rate = params["L_inf"], params["Z"], params["z"]
        rows.append((name, f"{curve.mu:g}", f"{floor:.4f}", f"{size:.4g}", f"{rate:.4g}"))
    return markdown_table(("model", "mu", "L_inf", "Z", "z of L_inf + Z exp(-z T)"), rows)


def _numbers(name: str, curve: CurveFits) -> dict[str, object]:
    return {
        "model": name,
        "mu": curve.mu,
        "T": curve.runs.num_loops.tolist(),
        "loss": curve.runs.loss.tolist(),
        "fits": {
            form: {"params": fit.params, "huber_per_point": fit.huber / fit.num_points}
            for form, fit in curve.fits.items()
        },
        "extrapolated_huber_per_point": curve.extrapolated,
    }
