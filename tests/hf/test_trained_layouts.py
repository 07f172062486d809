"""What was trained on any layout is exported as the very weights that its ranks held."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "layouts"))

from test_export import FP32
from tiny import full_weights, merged, start, steps, tiny_config

from harness import run_ranks
from megaparcae.checkpoint.manager import CheckpointManager
from megaparcae.hf.convert import export_checkpoint, import_checkpoint
from megaparcae.hf.load import load_folder
from megaparcae.hf.load_model import load_model
from megaparcae.hf.modeling_parcae import ParcaeForCausalLM
from megaparcae.model.batch import fixed_depth

ZERO3 = Path(__file__).resolve().parents[2] / "ds_configs" / "zero3.json"
STEPS = 20
MODELS = {  # vocabularies that tp doesn't divide; grouped queries; an epsilon that shows
    "tied": {"vocab_size": 259, "num_kv_heads": 2, "norm_eps": 0.1},
    "untied": {"vocab_size": 261, "tie_embeddings": False},
}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tp2": ("tied", 2, {"tp": 2}),
    "pp2": ("tied", 2, {"pp": 2}),
    "zero1": ("tied", 2, {"zero_stage": 1}),
    "zero2": ("tied", 2, {"zero_stage": 2}),
    "zero3": ("tied", 2, {"zero_stage": 3}),
    "pp2-tp2": ("untied", 4, {"pp": 2, "tp": 2}),
}


def train(
    model: dict[str, Any], parallel: dict[str, Any], folder: str, source: str | None, count: int
) -> dict[str, torch.Tensor] | None:
    """Some steps from `source` or from scratch, and a checkpoint; on rank 0 the weights held."""
    if parallel.get("zero_stage") == 3:  # parameters of this size stay whole otherwise
        options = json.loads(ZERO3.read_text())
        options["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        path = Path(f"{folder}-{dist.get_rank()}.json")
        path.write_text(json.dumps(options))
        parallel = {**parallel, "deepspeed_config": str(path)}
    changes = {
        "model": {"vocab_multiple": 128, **model},
        "parallel": parallel,
        "checkpoint": {"dir": folder, "init_from": source},
    }
    config = tiny_config(merged({"train": {"global_batch_size": 4}}, changes))
    live, batches = start(config)
    checkpoints = CheckpointManager(config, live.plan.global_batch)
    checkpoints.resume(live.engine)
    steps(live, batches, 0, count)
    checkpoints.save(count, live.engine)
    return full_weights(live)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_export_has_the_weights_and_the_logits_of_the_training(
    layout: str, tmp_path: Path
) -> None:
    kind, world, parallel = LAYOUTS[layout]
    model = MODELS[kind]
    run, out, again = (str(tmp_path / name) for name in ("run", "out", "again"))
    held = run_ranks(train, world, model, parallel, run, None, STEPS)[0]
    export_checkpoint(run, out, kind="hf", tokenizer=None, options=FP32)
    exported, report = ParcaeForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    assert exported.config.vocab_size == model["vocab_size"]
    assert (exported.lm_head.weight is exported.model.embedding.weight) == (kind == "tied")

    ours = load_model(run, torch.device("cpu")).model
    assert ours.state_dict().keys() == held.keys()
    assert all(torch.equal(ours.state_dict()[name], held[name]) for name in held)
    ids = torch.randint(0, model["vocab_size"], (8, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for loops in (1, 4, 8):
            wanted = ours(fixed_depth(ids, loops, torch.zeros(8, 16, 32)))
            found = exported(ids, num_loops=loops).logits
            assert (wanted[..., : model["vocab_size"]] - found).abs().max() <= 2e-5, loops

    import_checkpoint(load_folder(out), again, force=False)
    weights = f"{again}/step_00000000"
    taken = run_ranks(train, world, model, parallel, str(tmp_path / "next"), weights, 0)[0]
    for name, tensor in held.items():
        rows = model["vocab_size"] if name.startswith(("embedding.", "head.", "value_")) else None
        assert taken[name].shape == tensor.shape  # padded again
        assert torch.equal(taken[name][:rows], tensor[:rows]), name
