"""Other optimizers, models and precisions than the table's, in some layouts each."""

from __future__ import annotations

from typing import Any

import pytest
from comparison import assert_same_run, one_process, run_layout
from tiny import merged

MUON = {"optimizer": {"name": "muon_adamw", "muon_dtype": "fp32", "muon_lr": 2e-3}}
RDM = {
    "model": {
        "block": "sandwich",
        "injection": "linear",
        "loop_norm": True,
        "scale_embeddings": True,
        "norm_eps": 1e-6,
        "mlp": "swiglu",
        "qk_bias": True,
        "value_embeddings": False,
        "prelude_norm": False,
        "readout": False,
        "recurrence": {"draw_per": "batch", "sampler": "lognormal_poisson"},
    },
}
TRANSFORMER = {"model": {"architecture": "transformer", "num_layers": 4}}
VARIANTS: dict[str, dict[str, Any]] = {
    "muon": MUON,
    "rdm optimizer": {"optimizer": {"name": "adamw_rdm", "weight_decay": 0.1}},
    "rdm model": RDM,
    "transformer": TRANSFORMER,
    "untied head": {"model": {"tie_embeddings": False}},
    "grouped queries": {"model": {"num_kv_heads": 2}},
    "no value embeddings": {"model": {"value_embeddings": False}},
    "document masks": {"data": {"document_mask": True}},
    "additive injection": {"model": {"injection": "additive", "logit_softcap": 15.0}},
    "backprop through one loop": {
        "model": {"recurrence": {"mean_recurrence": 3, "backprop_depth": 1}}
    },
    "backprop through all loops": {"model": {"recurrence": {"sampler": "poisson_full"}}},
    "undealt": {"parallel": {"deal": "none"}},
    "tiny clip": {"optimizer": {"grad_clip": 0.01}},
    "no clip": {"optimizer": {"grad_clip": 0.0}},
}


def case(variant: str, world: int, recompute: str = "none", **parallel: Any) -> Any:
    sizes = [f"{name}={value}" for name, value in parallel.items()]
    parallel = {"recompute_core": recompute, **parallel}
    mark = (pytest.mark.slow,) if world == 8 else ()
    name = "-".join([variant, f"world={world}", *sizes])
    return pytest.param(variant, world, parallel, id=name, marks=mark)


CASES = [
    case("muon", 2),
    case("muon", 4),
    case("muon", 2, tp=2),
    case("muon", 4, tp=4, sequence_parallel=True),
    case("muon", 4, tp=2),
    case("muon", 2, pp=2),
    case("muon", 4, pp=4),
    case("muon", 4, pp=2),
    case("muon", 4, tp=2, sequence_parallel=True, pp=2),
    case("muon", 8, tp=2, pp=2),
    case("rdm optimizer", 4, pp=2),
    case("rdm model", 4, tp=2, pp=2),
    case("rdm model", 4, "loop", tp=2, sequence_parallel=True, zero_stage=3),
    case("transformer", 4, tp=2, sequence_parallel=True, pp=2),
    case("untied head", 4, tp=2, pp=2),
    case("untied head", 2, zero_stage=3),
    case("grouped queries", 2, tp=2),
    case("no value embeddings", 4, tp=2, sequence_parallel=True, pp=2),
    case("document masks", 4, "selective", tp=2, pp=2),
    case("additive injection", 4, tp=2, pp=2),
    # Checkpointing meets states without gradient in front of the loops with one.
    case("backprop through one loop", 2, "block", pp=2),
    case("backprop through one loop", 2, "loop", tp=2),
    case("backprop through one loop", 3, "loop", pp=3, zero_stage=1),
    case("backprop through all loops", 2, "loop", pp=2),
    case("backprop through all loops", 2, "block", zero_stage=2),
    case("undealt", 4, pp=2),
    # A global norm, tied weights counted once.
    case("tiny clip", 2, tp=2),
    case("tiny clip", 2, pp=2, zero_stage=1),
    case("tiny clip", 4, tp=2, sequence_parallel=True, pp=2),
    case("no clip", 4, pp=2, zero_stage=1),
    # Stages that hold little: the embedding alone, coda and head only, the core cut inside a loop.
    case("muon", 2, pp=2, pipeline_layout="embedding | prelude,core,coda,head"),
    case("no clip", 2, pp=2, zero_stage=1, pipeline_layout="embedding | prelude,core,coda"),
    case("muon", 2, pp=2, pipeline_layout="prelude,core | coda,head"),
    case("tiny clip", 3, pp=3, zero_stage=1, pipeline_layout="prelude | core | coda,head"),
    case("untied head", 3, pp=3, pipeline_layout="prelude,core:0.25 | core:0.5 | core,coda"),
]


@pytest.mark.parametrize("variant, world, parallel", CASES)
def test_variants_train_alike_in_one_process_and_in_layouts(variant, world, parallel):
    changes = VARIANTS[variant]
    split = {"train": {"micro_batch_size": 2}, "parallel": parallel}
    worst = assert_same_run(run_layout(world, merged(changes, split)), one_process(changes))
    print(f"{variant} {world} {parallel}: {worst.name} {worst.largest:.1e}")


BF16 = {"train": {"precision": "bf16"}}
BF16_LOSS, BF16_WEIGHTS = 1e-2, 5e-2
"""In bf16 the order of sums shows in the third digit; a norm is a sum over everything."""


@pytest.mark.parametrize(
    "world, parallel",
    [
        (2, {"tp": 2}),
        (2, {"tp": 2, "sequence_parallel": True}),
        (2, {"pp": 2}),
        (2, {"zero_stage": 1}),
        (2, {"zero_stage": 2}),
        (2, {"zero_stage": 3, "recompute_core": "loop"}),
        (4, {"tp": 2, "sequence_parallel": True, "pp": 2, "zero_stage": 1}),
    ],
)
def test_bf16_stays_within_its_tolerance_of_one_process(world, parallel):
    ranks = run_layout(world, {**BF16, "parallel": parallel})
    want = one_process(BF16)
    worst = assert_same_run(ranks, want, loss=BF16_LOSS, weights=BF16_WEIGHTS)
    print(f"{parallel}: {worst.name} {worst.largest:.1e}")
    assert want["steps"] != one_process()["steps"], "bf16 changed nothing"
