"""DeepSpeed's JSON: run-owned numbers are filled in, contradictions name both places."""

from __future__ import annotations

import json

import pytest

from megaparcae.config.batch import BatchPlan
from megaparcae.config.schema import OptimizerConfig, ParallelConfig, TrainConfig
from megaparcae.engine.ds_config import deepspeed_options
from megaparcae.errors import UserError

BATCH = BatchPlan(global_batch=16, micro_batch=2, accumulation=4, dp=2)


def options(stage=0, path=None, precision="bf16"):
    parallel = ParallelConfig(zero_stage=stage, deepspeed_config=path)
    train = TrainConfig(global_batch_size=16, micro_batch_size=2, precision=precision)
    return deepspeed_options(parallel, train, OptimizerConfig(grad_clip=0.5), BATCH)


def refusal(tmp_path, text: str, stage=1) -> str:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        options(stage, str(path))
    return str(caught.value)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_shipped_files_are_filled_with_the_numbers_of_the_run(stage):
    filled = options(stage)
    assert filled["train_batch_size"] == 16
    assert filled["train_micro_batch_size_per_gpu"] == 2
    assert filled["gradient_accumulation_steps"] == 4
    assert filled["zero_optimization"]["stage"] == stage
    assert filled["torch_autocast"]["enabled"] is True
    assert "auto" not in json.dumps(filled).replace("torch_autocast", "")


def test_fp32_has_no_autocast():
    assert options(1, precision="fp32")["torch_autocast"]["enabled"] is False


def test_clipping_is_always_written_and_left_to_our_optimizer_at_stage_0():
    assert options(0)["gradient_clipping"] == 0.0
    assert options(2)["gradient_clipping"] == 0.5


def test_what_the_file_leaves_out_is_filled_in(tmp_path):
    (tmp_path / "empty.json").write_text("{}")
    assert options(1, str(tmp_path / "empty.json"))["zero_optimization"] == {"stage": 1}


@pytest.mark.parametrize(
    "text, expected",
    [
        ('{"train_micro_batch_size_per_gpu": 4}',
         "mine.json says train_micro_batch_size_per_gpu=4, but the run's train.micro_batch_size "
         'makes it 2; write "auto" in the file, or change the run'),
        ('{"zero_optimization": {"stage": 2}}', "zero_optimization.stage=2, but the run's par"),
        ('{"gradient_clipping": 1.0}', "optimizer.grad_clip makes it 0.5"),
        ('{"bf16": {"enabled": true}}', "remove bf16: precision is train.precision"),
        ('{"optimizer": {"type": "Adam"}}', "remove optimizer: the update rule is the section"),
        ('{"gradient_cliping": 1}', "option gradient_cliping; did you mean gradient_clipping?"),
        ('{"zero_optimization": {"reduce_bucket_size": "auto"}}',
         'zero_optimization.reduce_bucket_size="auto" is not filled in here; give a value'),
        ('{"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}', "is not supported"),
        ('{"train_batch_size": 1,\n"train_batch_size": 2}', "'train_batch_size' is given twice"),
        ('{"train_batch_size": 1\n"x": 2}', "mine.json:2:1: not JSON"),
        ("[]", "must be a JSON object"),
    ],
)  # fmt: skip
def test_what_contradicts_the_run_is_refused(tmp_path, text, expected):
    message = refusal(tmp_path, text)
    assert expected in message and "mine.json" in message and "\n" not in message


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere.json: no such file; null takes .*ds_configs"):
        options(1, str(tmp_path / "nowhere.json"))
