"""Named starting points: a model and the recipe it is trained with.

A preset is a plain mapping in the shape of a run's YAML. It lists only what differs from the
schema's defaults, so that an override such as mean_recurrence=4 takes its dependants along.
"""

from __future__ import annotations

from typing import Any

Tree = dict[str, Any]

TOKENS_PER_STEP = 256 * 2048
"""Every run of tables 18 to 21: 256 sequences of 2,048 tokens."""


def _steps(tokens: float) -> int:
    """Optimizer steps that see at least so many tokens."""
    return -int(-tokens // TOKENS_PER_STEP)


# Tables 18 and 21; micro-batches are the authors' for one 80 GB GPU.
_TRANSFORMER_SETUP = {
    "140m": {"layers": 6, "d": 768, "heads": 6, "lr": 8e-3, "tokens": 11.2e9, "micro": 32},
    "370m": {"layers": 12, "d": 1024, "heads": 8, "lr": 8e-3, "tokens": 29.6e9, "micro": 16},
    "770m": {"layers": 18, "d": 1280, "heads": 10, "lr": 6e-3, "tokens": 61.6e9, "micro": 8},
    "1p3b": {"layers": 24, "d": 1536, "heads": 12, "lr": 6e-3, "tokens": 104e9, "micro": 8},
}


def _transformer_setup(size: str, *, looped: bool) -> Tree:
    """Parcae or its fixed-depth baseline in the Transformer setup (section 5.1, appendix P.2)."""
    row = _TRANSFORMER_SETUP[size]
    layers = int(row["layers"])
    third = layers // 3
    blocks: Tree = (
        {"num_prelude_layers": third, "num_core_layers": third, "num_coda_layers": third}
        if looped
        else {"architecture": "transformer", "num_layers": layers}
    )
    return {
        "model": {
            **blocks,
            "hidden_size": row["d"],
            "intermediate_size": 4 * int(row["d"]),
            "num_heads": row["heads"],
        },
        "optimizer": {"name": "muon_adamw", "lr": row["lr"]},
        "schedule": {"kind": "trapezoid", "cooldown_fraction": 0.5},
        "train": {
            "num_steps": _steps(float(row["tokens"])),
            "global_batch_size": 256,
            "micro_batch_size": row["micro"],
        },
        "validation": {"interval": 500, "num_sequences": 512},
        "checkpoint": {"interval": 1000},
    }


def _rdm_setup(size: str, *, parcae: bool) -> Tree:
    """RDM or Parcae in the RDM setup (table 17, appendices P.1 and Q.1).

    The paper gives no head size (128 here), no batch and no number of tokens (256 x 2,048 and 21
    billion here), and two learning rates: the recipe's 4e-3 and 2e-3, taken here, and a tenth of
    that as the winners of the sweep. Its counts of Parcae-350M leave no room for a readout and a
    prelude norm.
    """
    small = size == "100m"
    variant: Tree = (
        {"block": "pre_norm", "injection": "diagonal"}
        if parcae
        else {
            "block": "sandwich",
            "injection": "linear",
            "loop_norm": True,
            "norm_eps": 1e-6,
            "scale_embeddings": True,
        }
    )
    recurrence: Tree = {"mean_recurrence": 16 if small else 8}
    if not parcae:
        recurrence["draw_per"] = "batch"
    return {
        "model": {
            **variant,
            "vocab_size": 65536,
            "hidden_size": 1024 if small else 2048,
            "intermediate_size": 3520 if small else 7040,
            "num_heads": 8 if small else 16,
            "num_prelude_layers": 1,
            "num_core_layers": 1 if small else 2,
            "num_coda_layers": 1,
            "mlp": "swiglu",
            "qk_norm": False,
            "value_embeddings": False,
            "readout": False,
            "prelude_norm": False,
            "init": "scaled",
            "init_orthogonal": False,
            "recurrence": recurrence,
        },
        "optimizer": {
            "name": "adamw_rdm",
            "lr": 4e-3 if small else 2e-3,
            "betas": [0.9, 0.95],
            "weight_decay": 1e-4,  # Huginn's
        },
        "schedule": {"kind": "trapezoid", "warmup_steps": 4096, "cooldown_steps": 4096},
        "train": {
            "num_steps": 40000,
            "global_batch_size": 256,
            "micro_batch_size": 16 if small else 8,
        },
        "validation": {
            "interval": 500,
            "num_sequences": 512,
            "num_loops": [1, 4, 8, 16] if small else [1, 2, 4, 8],
        },
        "checkpoint": {"interval": 1000},
    }


_TINY: Tree = {
    # Learns English in minutes on two CPU cores, 2.5 million tokens. Small batches (16 beats 32 at
    # equal tokens) and fp32: CPUs without AMX are slower in bf16.
    "model": {
        "vocab_size": 2048,
        "sequence_length": 128,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_heads": 2,
        "num_prelude_layers": 1,
        "num_core_layers": 1,
        "num_coda_layers": 1,
        "recurrence": {"mean_recurrence": 4},
    },
    "data": {"validation_fraction": 0.03},
    "optimizer": {"name": "muon_adamw"},
    "train": {
        "num_steps": 1200,
        "global_batch_size": 16,
        "micro_batch_size": 8,
        "precision": "fp32",
    },
    "validation": {"interval": 200, "num_sequences": 128, "num_loops": [1, 2, 4, 8]},
    "checkpoint": {"interval": 400},
}

PRESETS: dict[str, Tree] = {
    "tiny": _TINY,
    **{size: _transformer_setup(size, looped=True) for size in _TRANSFORMER_SETUP},
    **{f"transformer_{s}": _transformer_setup(s, looped=False) for s in _TRANSFORMER_SETUP},
    **{f"parcae_{size}": _rdm_setup(size, parcae=True) for size in ("100m", "350m")},
    **{f"rdm_{size}": _rdm_setup(size, parcae=False) for size in ("100m", "350m")},
}
"""By name: tiny; 140m to 1p3b (Parcae) and transformer_* in the Transformer setup; parcae_* and
rdm_* in the RDM setup."""
