"""What a model costs by either FLOP convention: joins the grid and the model's counters."""

from __future__ import annotations

from megaparcae.model.flops import (
    authors_flops_per_token,
    hardware_flops_per_token,
    unrolled_params,
)
from megaparcae.scaling.grid import Costs


def study_costs(convention: str) -> Costs:
    """The costs by the `authors` or the `hardware` convention."""
    match convention:
        case "authors":
            return Costs(convention, authors_flops_per_token, unrolled_params)
        case "hardware":
            return Costs(convention, hardware_flops_per_token, unrolled_params)
        case other:
            raise ValueError(f"convention={other!r}: choose authors or hardware")
