"""The paper's stability comparisons as small grids of runs: which configs, and what each row is.

table2   learning rates x {additive or linear injection without a norm, RDM with its residual
         norms, Parcae}: what diverges, how large the state gets, and the final loss
table4   from RDM to Parcae in three steps, validated at T = 1, 4, 8
table8   one depth per batch against one per sequence, validated at T = 1 to 16

Sizes are for two CPU cores and minutes, so only the direction can be compared with the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass

from megaparcae.config.yaml_text import Tree

SIZE: Tree = {
    "sequence_length": 64,
    "hidden_size": 64,
    "num_heads": 2,
    "num_prelude_layers": 1,
    "num_core_layers": 1,
    "num_coda_layers": 1,
    "recurrence": {"mean_recurrence": 8},
}
"""Of every model here."""
BATCH_SIZE = 16
RDM_RATES = (4e-3, 8e-3, 1.6e-2, 3.2e-2)
"""table2's learning rates. The paper's are 2e-4 to 1e-3 at width 1024; a narrow model needs more
before anything breaks."""

# Tables 2, 17: the RDM setup, narrow; depth and recipe as in the preset rdm_100m.
_RDM_SETUP: Tree = {
    "model": {
        "mlp": "swiglu",
        "intermediate_size": 176,
        "qk_norm": False,
        "value_embeddings": False,
        "readout": False,
        "prelude_norm": False,
        "init": "scaled",
        "init_orthogonal": False,
    },
    "optimizer": {"name": "adamw_rdm", "betas": [0.9, 0.95], "weight_decay": 1e-4},
}
_RDM_SAMPLING: Tree = {"scale_embeddings": True, "recurrence": {"draw_per": "batch"}}

# Tables 4, 18: the Transformer setup, narrow.
_TRANSFORMER_SETUP: Tree = {
    "model": {"intermediate_size": 256},
    "optimizer": {"name": "muon_adamw"},
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One row of a table."""

    name: str
    label: str
    model: Tree
    """Options that differ from the suite's base."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    """One table of the paper."""

    name: str
    title: str
    base: Tree
    variants: tuple[Variant, ...]
    num_steps: int
    depths: tuple[int, ...]
    """T at which the trained model is validated."""
    paper: str
    """What the paper found at its own scale."""
    rates: tuple[float, ...] = ()
    """Learning rates to try; empty takes the base's."""


SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            name="table2",
            title="Learning rates (table 2): final loss, state norm, divergence",
            base=_RDM_SETUP,
            rates=RDM_RATES,
            num_steps=100,
            depths=(8,),
            paper="at width 1024 the base (no norm) diverges from 4e-4 on, RDM with residual norm "
            "from 6e-4 on, Parcae at none of 2e-4 to 1e-3.",
            variants=(
                Variant(
                    name="additive",
                    label="additive, no norm",
                    model={"injection": "additive", **_RDM_SAMPLING},
                ),
                Variant(
                    name="linear",
                    label="linear, no norm",
                    model={"injection": "linear", **_RDM_SAMPLING},
                ),
                Variant(
                    name="rdm",
                    label="RDM (residual norm)",
                    model={
                        "injection": "linear",
                        "block": "sandwich",
                        "loop_norm": True,
                        **_RDM_SAMPLING,
                    },
                ),
                Variant(name="parcae", label="Parcae", model={}),
                Variant(
                    name="parcae_norm", label="Parcae + prelude norm", model={"prelude_norm": True}
                ),
            ),
        ),
        Suite(
            name="table4",
            title="From RDM to Parcae (table 4): validation loss at T loops",
            base=_TRANSFORMER_SETUP,
            num_steps=200,
            depths=(1, 4, 8),
            paper="RDM diverges; constrained A 8.99, 3.15, 2.97; per-sequence 3.38, 3.01, 2.98; "
            "prelude norm 3.28, 2.97, 2.95 (140M parameters).",
            variants=(
                Variant(
                    name="rdm",
                    label="RDM",
                    model={
                        "injection": "linear",
                        "readout": False,
                        "prelude_norm": False,
                        "recurrence": {"draw_per": "batch"},
                    },
                ),
                Variant(
                    name="constrained",
                    label="+ constrained A",
                    model={"prelude_norm": False, "recurrence": {"draw_per": "batch"}},
                ),
                Variant(
                    name="per_sequence",
                    label="+ per-sequence depth",
                    model={"prelude_norm": False},
                ),
                Variant(name="prelude_norm", label="+ prelude norm", model={}),
            ),
        ),
        Suite(
            name="table8",
            title="One depth per batch or per sequence (table 8): validation loss at T loops",
            base=_TRANSFORMER_SETUP,
            num_steps=200,
            depths=(1, 2, 3, 4, 6, 8, 12, 16),
            paper="one depth per sequence is far better at few loops and costs next to nothing at "
            "the mean (its table 4: 8.99 to 3.38 at T = 1, 2.97 to 2.98 at T = 8).",
            variants=(
                Variant(
                    name="batch",
                    label="one depth per batch",
                    model={"recurrence": {"draw_per": "batch"}},
                ),
                Variant(name="sequence", label="one depth per sequence", model={}),
            ),
        ),
    )
}
