"""The planner's list of weights is the model's."""

from __future__ import annotations

import pytest
import torch

from megaparcae.config.load import preset_config
from megaparcae.model.build import build_model
from megaparcae.parallel.apply import _holders
from megaparcae.parallel.mesh import Axis, Mesh
from megaparcae.parallel.shard import spec_of
from megaparcae.parallel.tensor import apply_tp
from megaparcae.plan.weights import stage_items
from megaparcae.train.pipeline_report import plan_stages

SMALL = ["model.hidden_size=64", "model.intermediate_size=128", "model.num_heads=2"]


@pytest.mark.parametrize(
    ("preset", "options"),
    [
        ("140m", ["parallel.pp=3"]),
        ("140m", ["parallel.sequence_parallel=true", "model.tie_embeddings=false"]),
        ("rdm_350m", ["parallel.pp=2", "model.qk_bias=true"]),
        ("transformer_140m", ["parallel.pp=2", "model.num_kv_heads=2"]),
    ],
)
def test_names_shapes_and_splits_are_those_of_the_built_model(preset, options):
    config = preset_config(preset, [*SMALL, "parallel.tp=2", *options])
    stages = plan_stages(config)
    items = stage_items(config, stages)
    none = Axis(size=1, index=0, group=None, ranks=(0,))
    mesh = Mesh(
        pp=none, dp=none, tp=Axis(size=2, index=0, group=None, ranks=(0, 1)), rank=0, world_size=2
    )
    for stage, part in enumerate(s.part for s in stages):
        with torch.device("meta"):
            model = build_model(config.model)
        holders = _holders(model, stages)
        model.keep(part)
        apply_tp(model, model.tp_plan, mesh, sequence_parallel=config.parallel.sequence_parallel)
        specs = {spec_of(p).name: spec_of(p) for p in model.parameters()}
        planned = {item.spec.name: item.spec for item in items[stage]}
        assert set(planned) == set(specs)
        for name, spec in planned.items():
            real = specs[name]
            assert spec.local_shape == real.local_shape, name
            assert spec.dim == real.dim and spec.tp_partial == real.tp_partial, name
            assert spec.stages == holders[name], name
