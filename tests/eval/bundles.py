"""Hand-made evaluation bundles, and models whose answers to them are known."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import yaml
from tiny_models import LOOPED

from megaparcae.eval.scoring import ScoredBatch, Scores
from megaparcae.model.build import build_model

BIGRAM = replace(
    LOOPED,
    hidden_size=320,
    intermediate_size=32,
    sequence_length=512,
    value_embeddings=False,
    injection="additive",
    readout=False,
    tie_embeddings=False,
    logit_softcap=None,
)


def write_bundle(folder: Path, tasks: list[dict], items: dict[str, list[dict]]) -> Path:
    """core.yaml with these tasks, their items by label, baselines from task["baseline"]."""
    lines = ["Eval Task,Task Category,Random baseline,Description"]
    listed = []
    for task in tasks:
        task = dict(task)
        lines.append(f'{task["label"]},made,{task.pop("baseline", 0)},"a task, made"')
        uri = task.setdefault("dataset_uri", f"made/{task['label']}.jsonl")
        path = folder / "eval_data" / uri
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(item) + "\n" for item in items[task["label"]])
        path.write_text(text, encoding="utf-8")
        listed.append(task)
    (folder / "core.yaml").write_text(yaml.safe_dump({"icl_tasks": listed}))
    (folder / "eval_meta_data.csv").write_text("\n".join(lines) + "\n")
    return folder


def bigram_model(likely: str) -> torch.nn.Module:
    """After a character, the one that follows it in `likely` has nearly all the probability.

    A real looped model whose blocks add nothing: embeddings are unit vectors, the head is the table
    of bigrams.
    """
    model = build_model(BIGRAM).eval()
    for name, parameter in model.named_parameters():
        parameter.data = torch.full_like(parameter, 1.0 if "norm" in name else 0.0)
    rows = len(model.embedding.weight)
    model.embedding.weight.data[:, :rows] = torch.eye(rows)
    data = likely.encode()
    for before, after in itertools.pairwise(data):
        model.head.weight.data[after + 3, before + 3] = 1.0
    return model


class Imitator:
    """Stands for a Scorer: predicts what followed the last three characters earlier in its row.

    The loss of a character it predicts is 0 and the character is the likeliest; of others 1.
    """

    config = BIGRAM
    num_loops = (1, 2)
    device = torch.device("cpu")

    def score(self, batch: ScoredBatch) -> dict[int, Scores]:
        """Equal at both depths."""
        seen = [
            self.is_expected(batch, int(row), int(position), int(target))
            for row, position, target in zip(
                batch.targets.rows, batch.targets.positions, batch.targets.ids, strict=True
            )
        ]
        scores = Scores(np.where(seen, 0.0, 1.0), np.array(seen))
        return dict.fromkeys(self.num_loops, scores)

    def is_expected(self, batch: ScoredBatch, row: int, position: int, target: int) -> bool:
        ids = batch.ids[row, : position + 1]
        if batch.branches is not None:
            branches = batch.branches[row, : position + 1]
            ids = ids[(branches == 0) | (branches == branches[-1])]
        text = bytes(i - 3 for i in ids.tolist() if i >= 3)
        return text[-3:] + bytes([target - 3]) in text
