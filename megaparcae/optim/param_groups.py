"""Which update each parameter gets, by its canonical name (paper, table 20).

Muon: the matrices of attention and MLP. AdamW: embedding, head, value-embedding tables and gates,
norms, biases, injection, readout.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Literal

Kind = Literal["muon", "adamw"]


@dataclass(frozen=True)
class ParameterRule:
    """How one parameter is updated."""

    kind: Kind
    decayed: bool
    """AdamW's weight decay applies (Muon's always does)."""


BLOCK = r"(?:prelude|core|coda|layers)\.\d+\."

# name pattern, table 20's optimizer, decayed when AdamW updates it
RULES: tuple[tuple[str, Kind, bool], ...] = (
    (BLOCK + r"attention\.[qkvo]_proj\.weight", "muon", True),
    (BLOCK + r"mlp\.(?:up|gate|down)_proj\.weight", "muon", True),
    (BLOCK + r"attention\.value_gate\.weight", "adamw", True),
    (BLOCK + r"attention\.[qk]_bias", "adamw", False),
    (BLOCK + r"(?:attention|mlp)(?:_post)?_norm\.weight", "adamw", False),
    (r"(?:prelude|final)_norm\.weight", "adamw", False),
    (r"injection\.(?:A_log|dt_bias|B|weight)", "adamw", False),
    (r"readout\.weight", "adamw", False),
    (r"(?:embedding|head)\.weight", "adamw", True),
    (r"value_embeddings\.\d+\.weight", "adamw", True),
)


def parameter_rule(
    name: str, shape: tuple[int, ...], optimizer: Literal["muon_adamw", "adamw", "adamw_rdm"]
) -> ParameterRule:
    """The rule of a canonical name and full shape under `optimizer.name`.

    Raises ValueError for a name without a rule and for a Muon weight that is no matrix.
    """
    matching = [(kind, decayed) for text, kind, decayed in RULES if re.fullmatch(text, name)]
    if not matching:
        raise ValueError(
            f"parameter {name!r} has no optimizer rule; add one to RULES in optim/param_groups.py"
        )
    kind, decayed = matching[0]
    if optimizer != "muon_adamw":
        return ParameterRule("adamw", decayed)
    if kind == "muon" and len(shape) != 2:
        raise ValueError(
            f"parameter {name!r} of shape {shape} is to be updated by Muon, which needs a matrix; "
            "use optimizer.name adamw"
        )
    return ParameterRule(kind, decayed)


def describe(parameters: Iterable[tuple[str, tuple[int, ...], Kind]]) -> str:
    """One line for the log: how many tensors and elements each update has."""
    numels: dict[Kind, list[int]] = {"muon": [], "adamw": []}
    for _, shape, kind in parameters:
        numels[kind].append(prod(shape))
    muon, adamw = numels["muon"], numels["adamw"]
    return (
        f"optimizer: Muon updates {len(muon)} matrices ({sum(muon):,} parameters), "
        f"AdamW {len(adamw)} tensors ({sum(adamw):,} parameters)"
    )
