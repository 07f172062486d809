"""What a run's model costs, part by part: parameters and FLOPs, per token and over the run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from megaparcae.config.schema import RunConfig
from megaparcae.model.flops import (
    Flops,
    Recompute,
    authors_flops_per_token,
    count_parameters,
    expected_flops,
    expected_loops,
    unrolled_params,
)

Costs = dict[str, Any]

_NAMES = {
    "embedding": "embedding",
    "value_embeddings": "value-embedding tables",
    "prelude": "prelude",
    "core": "core (once)",
    "coda": "coda",
    "injection": "injection",
    "readout": "readout C",
    "norms": "norms",
    "head": "head",
    "core_no_grad": "core, loops without gradient",
    "core_grad": "core, loops with gradient",
    "projections": "injection of e, readout",
}


def model_costs(config: RunConfig) -> Costs:
    """Plain numbers: parameters, loops, FLOPs per token, and of the run if the batch is given."""
    model, recompute = config.model, Recompute.of(config.parallel)
    parameters = count_parameters(model)
    no_grad, grad = expected_loops(model.recurrence)
    costs: Costs = {
        "architecture": model.architecture,
        "parameters": {**asdict(parameters), "total": parameters.total},
        "unrolled_parameters": unrolled_params(model),
        "flops_per_token": {
            "authors": authors_flops_per_token(model),
            "authors_head_not_tables": authors_flops_per_token(model, head_not_tables=True),
            "needed": _parts(expected_flops(model)),
            "executed": _parts(expected_flops(model, executed=recompute)),
        },
    }
    if model.architecture == "looped":
        costs["loops"] = {
            "mean_recurrence": model.recurrence.mean_recurrence,
            "expected_no_grad": no_grad,
            "expected_grad": grad,
        }
    if config.train.global_batch_size:
        tokens = config.train.num_steps * config.train.global_batch_size * model.sequence_length
        per_token = costs["flops_per_token"]
        costs["run"] = {
            "tokens": tokens,
            "flops_authors": tokens * per_token["authors"],
            "flops_executed": tokens * per_token["executed"]["total"],
        }
    return costs


def _parts(flops: Flops) -> dict[str, float]:
    return {**asdict(flops), "total": flops.total}


def cost_lines(costs: Costs) -> dict[str, list[tuple[str, ...]]]:
    """Tables of the costs by title; the first row is the heading, all cells are text."""
    parameters, per_token = costs["parameters"], costs["flops_per_token"]
    total = parameters["total"]
    names = _NAMES | ({"prelude": "layers"} if costs["architecture"] == "transformer" else {})
    rows: list[tuple[str, ...]] = [("part", "parameters", "share")]
    rows += [
        (names.get(part, part), f"{n:,}", f"{n / total:.1%}") for part, n in parameters.items() if n
    ]
    if costs["unrolled_parameters"] != total:
        mu = costs["loops"]["mean_recurrence"]
        rows.append((f"unrolled, N({mu})", f"{costs['unrolled_parameters']:,}", ""))
    flops: list[tuple[str, ...]] = [("FLOPs per token", "needed", "executed")]
    flops += [
        (names.get(part, part), _giga(n), _giga(per_token["executed"][part]))
        for part, n in per_token["needed"].items()
        if n
    ]
    flops += [
        ("authors' convention", _giga(per_token["authors"]), ""),
        ("  head instead of tables", _giga(per_token["authors_head_not_tables"]), ""),
    ]
    tables = {"Parameters": rows, "Training FLOPs per token": flops}
    if "run" in costs:
        run = costs["run"]
        tables["Whole run"] = [
            ("tokens", "FLOPs, authors'", "FLOPs, executed"),
            (f"{run['tokens']:,}", f"{run['flops_authors']:.3e}", f"{run['flops_executed']:.3e}"),
        ]
    return tables


def _giga(flops: float) -> str:
    """One G is a thousand million."""
    return f"{flops / 1e9:.4g} G"
