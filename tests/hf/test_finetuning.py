"""Fine-tuning an export with transformers' Trainer and with LoRA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_generation import tiny
from torch.utils.data import Dataset

STEPS = 20


class Sentences(Dataset):
    """Eight rows that repeat a pattern: quick to learn."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(24) * 5 + index) % 40
        return {"input_ids": ids, "labels": ids}


def losses_of_training(model: torch.nn.Module, folder: Path, **options: object) -> list[float]:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        logging_steps=1,
        learning_rate=3e-3,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Sentences())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_the_trainer_lowers_the_loss(gradient_checkpointing: bool, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = tiny()
    losses = losses_of_training(model, tmp_path, gradient_checkpointing=gradient_checkpointing)
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 2
    ids = model.generate(Sentences()[0]["input_ids"][None, :8], max_new_tokens=2, do_sample=False)
    assert ids.shape == (1, 10)


def test_accumulated_micro_batches_give_the_loss_of_the_whole_batch(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    whole = losses_of_training(tiny(), tmp_path)
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, logging_steps=1, learning_rate=3e-3, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = Trainer(model=tiny(), args=arguments, train_dataset=Sentences())
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(whole[0], rel=1e-4)


def test_lora_lowers_the_loss_and_merges_into_the_model(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    pytest.importorskip("accelerate")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    torch.manual_seed(0)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=32, target_modules=targets)
    model = peft.get_peft_model(tiny(), config)
    trainable, total = model.get_nb_trainable_parameters()
    assert 0 < trainable < total / 3
    losses = losses_of_training(model, tmp_path)
    assert losses[-1] < losses[0] - 0.5
    ids = Sentences()[0]["input_ids"][None]
    model.eval()
    with torch.no_grad():
        adapted = model(ids).logits
        merged = model.merge_and_unload()(ids).logits
    assert (adapted - merged).abs().max() < 1e-3
