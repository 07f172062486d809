"""A study as fit.json (numbers), report.md (reading) and PNG figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megaparcae.errors import UserError
from megaparcae.scaling.figures import draw_figures
from megaparcae.scaling.fit import Fit
from megaparcae.scaling.isoflop import IsoFlop, Parabola, PowerLaw
from megaparcae.scaling.laws import TEST_TIME_FORMS, UNIFIED_FORMS
from megaparcae.scaling.runs import read_runs
from megaparcae.scaling.study import Study, run_study
from megaparcae.scaling.test_time import TestTimeStudy

PART_NAMES = {
    "training": "Training law",
    "test_time": "Test-time curves",
    "unified": "Unified law",
}


def write_report(study: Study, folder: Path) -> Path:
    """Write fit.json, report.md and the figures into `folder`; the path of the report."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fit.json").write_text(json.dumps(as_dict(study), indent=1) + "\n")
    figures = draw_figures(study, folder)
    sections = [_head(study), _isoflop(study.isoflop), *_laws(study)]
    if study.test_time:
        sections.append(test_time_section(study.test_time))
    if study.held_out:
        sections.append(_held_out(study))
    sections += [
        f"## {PART_NAMES[part]}\n\nNot fitted: {why}." for part, why in study.skipped.items()
    ]
    sections.extend(f"![{title}]({path.name})" for title, path in figures.items())
    report = folder / "report.md"
    report.write_text("\n\n".join(sections) + "\n")
    return report


def fit_and_report(
    table: Path,
    held_out: Path | None,
    folder: Path,
    num_restarts: int,
    num_draws: int,
) -> Path:
    """Read the runs, fit everything they support, write the report; its path."""
    for option, value in (("--restarts", num_restarts), ("--draws", num_draws + 1)):
        if value < 1:
            raise UserError(f"{option} is too small; use 1000 restarts and 200 draws")
    unseen = read_runs(held_out, require_budget=False) if held_out else None
    study = run_study(read_runs(table), unseen, num_restarts=num_restarts, num_draws=num_draws)
    return write_report(study, folder)


def as_dict(study: Study) -> dict[str, object]:
    """All numbers of a study, ready for JSON."""
    predictor = study.predictor
    return {
        "num_rows": len(study.runs),
        "isoflop": {
            "mu_law": _law_dict(study.isoflop.mu_law),
            "tokens_law": _law_dict(study.isoflop.tokens_law),
            "budgets": [
                {"budget": p.budget, "status": p.status,
                 "best_mu": p.best_mu if p.status != "no minimum" else None,
                 "coefficients": p.coefficients.tolist()}
                for p in study.isoflop.parabolas
            ],
        },
        "training": study.training and _fit_dict(study.training),
        "unified": study.unified and {n: _fit_dict(f) for n, f in study.unified.items()},
        "test_time": study.test_time and {
            form.name: {"in_distribution": study.test_time.mean_huber(form.name),
                        "extrapolation": study.test_time.mean_extrapolated(form.name)}
            for form in TEST_TIME_FORMS
        },
        "held_out": [
            {"mu": float(h.runs.mu[0]), "tokens": float(h.runs.tokens[0]), "error": h.error,
             "oracle_error": h.oracle_error, "T": h.runs.num_loops.tolist(),
             "measured": h.runs.loss.tolist(), "predicted": h.predicted.tolist()}
            for h in study.held_out
        ],
        "skipped": study.skipped,
        "predictor": predictor and predictor.as_dict(),
    }  # fmt: skip


def _law_dict(law: PowerLaw | None) -> dict[str, object] | None:
    if law is None:
        return None
    return {"coefficient": law.coefficient, "exponent": law.exponent, "interval": law.interval}


def _fit_dict(fit: Fit) -> dict[str, object]:
    return {
        "formula": fit.law.formula,
        "params": fit.params,
        "intervals": {name: fit.interval(name) for name in fit.params},
        "huber": fit.huber,
        "mean_error": fit.mean_error,
        "num_points": fit.num_points,
    }


def _head(study: Study) -> str:
    runs = study.runs
    num_runs = len(np.unique(runs.run_ids()))
    return (
        f"# Scaling of looped models\n\n{num_runs} runs, {len(runs)} losses: budgets "
        f"{_list(runs.budget)} FLOPs, mean recurrence {_list(runs.mu)}, T {_list(runs.num_loops)}. "
        "Runs with mu = 1 are the fixed-depth baseline and enter no fit. Intervals are 90%."
    )


def _isoflop(isoflop: IsoFlop) -> str:
    rows = [(f"{p.budget:.3g}", *_minimum(isoflop, p), p.status) for p in isoflop.parabolas]
    table = markdown_table(("budget", "mu*", "D*", "loss", "minimum is"), rows)
    if isoflop.mu_law is None or isoflop.tokens_law is None:
        verdict = (
            "Fewer than two budgets have their minimum inside the measured mu, so there are no "
            "power laws: extend the range of mu or the budgets."
        )
    else:
        verdict = (
            f"mu* ∝ C^{_exponent(isoflop.mu_law)}, D* ∝ C^{_exponent(isoflop.tokens_law)} over "
            f"{len(isoflop.usable)} budgets (the paper: 0.40 and 0.78)."
        )
        if len(isoflop.usable) < 4:
            verdict += " So few budgets make this an indication, not a law."
    return f"## IsoFLOP\n\n{table}\n\n{verdict}"


def _minimum(isoflop: IsoFlop, parabola: Parabola) -> tuple[str, str, str]:
    """mu*, D* and loss as text; outside the measured mu only the side is known."""
    match parabola.status:
        case "inside":
            best = parabola.best_mu
            loss = float(parabola.predict(best))
            return f"{best:.2f}", f"{isoflop.best_tokens(parabola):.3g}", f"{loss:.4f}"
        case "outside" if parabola.best_mu < parabola.mu.min():
            return f"below {parabola.mu.min():g}", "-", "-"
        case "outside":
            return f"above {parabola.mu.max():g}", "-", "-"
        case _:
            return "-", "-", "-"


def _exponent(law: PowerLaw) -> str:
    span = f" [{law.interval[0]:.2f}, {law.interval[1]:.2f}]" if law.interval else ""
    return f"{law.exponent:.3f}{span}"


def _laws(study: Study) -> list[str]:
    sections = []
    if study.training:
        sections.append(f"## {PART_NAMES['training']}\n\n{_fit_text(study.training)}")
    if study.unified:
        rows = [
            (form.formula.split("Y D^-y + ")[1], f"{study.unified[form.name].huber:.6f}")
            for form in UNIFIED_FORMS
        ]
        sections.append(
            f"## {PART_NAMES['unified']}\n\n{_fit_text(study.unified['unified'])}\n\n"
            "Conditioning of the decay on mu, total Huber loss (table 14):\n\n"
            f"{markdown_table(('decay', 'Huber'), rows)}\n\nThe learned gamma is "
            f"{study.unified['unified_gamma'].params['gamma']:.3f}."
        )
    return sections


def _fit_text(fit: Fit) -> str:
    rows = []
    for name, value in fit.params.items():
        interval = fit.interval(name)
        rows.append((name, f"{value:.5g}",
                     f"{interval[0]:.4g} to {interval[1]:.4g}" if interval else "-"))  # fmt: skip
    return (
        f"`{fit.law.formula}`\n\n{markdown_table(('parameter', 'value', 'interval'), rows)}\n\n"
        f"{fit.num_points} points, Huber loss {fit.huber:.3g}, mean error {fit.mean_error:.2%}; "
        f"{fit.num_agreeing} of the best starts agree on it."
    )


def test_time_section(study: TestTimeStudy) -> str:
    """Tables 12 and 13 as Markdown."""
    rows = []
    for form in TEST_TIME_FORMS:
        beyond = study.mean_extrapolated(form.name)
        rows.append((form.formula, f"{study.mean_huber(form.name) * 1e7:.2f}",
                     "-" if beyond is None else f"{beyond * 1e7:.2f}"))  # fmt: skip
    floors = [c.floor_error for c in study.curves if c.floor_error is not None]
    text = f"{len(study.curves)} curves; mean Huber loss per point, × 1e-7 (table 12):"
    table = markdown_table(("form", "all T", "fitted at T ≤ mu, tested beyond"), rows)
    floor = (
        f"\n\nL_inf differs from the loss at T = mu by {np.mean(floors):.2%} on average, "
        f"{np.max(floors):.2%} at most (table 13)."
        if floors
        else ""
    )
    return f"## {PART_NAMES['test_time']}\n\n{text}\n\n{table}{floor}"


def _held_out(study: Study) -> str:
    rows = [
        (f"{h.runs.mu[0]:g}", f"{h.runs.tokens[0]:.3g}", str(len(h.runs)), f"{h.error:.2%}",
         "-" if h.oracle_error is None else f"{h.oracle_error:.2%}")
        for h in study.held_out
    ]  # fmt: skip
    return "## Held-out runs\n\n" + markdown_table(
        ("mu", "tokens", "points", "mean error", "with the measured floor"), rows
    )


def markdown_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A table without alignment."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _list(values: np.ndarray) -> str:
    return ", ".join(f"{value:.4g}".replace("e+", "e") for value in np.unique(values))
