"""A run's folder with a log written by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megaparcae.config.load import build_config, dump_config

Record = dict[str, Any]

MODEL = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "vocab_size": 100}
START = {
    "kind": "start",
    "host": "worker-7",
    "device": "CPU",
    "layout": {"world": 2, "dp": 2, "tp": 1, "pp": 1},
    "parameters": 1000,
    "versions": {"torch": "2.13.0"},
}


def start(step: int, time: float) -> Record:
    """A process begins to work."""
    return {**START, "step": step, "time": time}


def steps(first: int, last: int, time: float, **changes: Any) -> list[Record]:
    """Records of steps [first, last], two seconds each."""
    return [
        {
            "kind": "step",
            "step": step,
            "loss": 3 + 2 * math.exp(-step / 20),
            "grad_norm": 1.0,
            "lr_factor": 1.0,
            "tokens": step * 1024,
            "skipped_steps": 0,
            "loss_spike": False,
            "mean_loops": 8.0,
            "loop_work": 8 * 16,
            "rank0_loop_work": 65,
            "efficiency": 0.99,
            "flops_needed": {"prelude": 1024e6, "core_no_grad": 0.0, "core_grad": 3072e6},
            "flops_recomputed": {"prelude": 0.0, "core_grad": 409.6e6},
            "seconds": 2.0,
            "tokens_per_second": 512.0,
            "tflops_per_device": 0.5,
            "time": time + 2 * (step - first + 1),
            **changes,
        }
        for step in range(first, last + 1)
    ]


def health(step: int, time: float) -> Record:
    """A record of the loop."""
    return {
        "kind": "health",
        "step": step,
        "state_norm": 20.0,
        "state_norm_max": 30.0,
        "residual_ratio": 0.1,
        "rho_A": 0.5,
        "decay_mean": 0.4,
        "B_norm": 2.0,
        "C_norm": 3.0,
        "update_norm": 0.1,
        "prelude_norms": {"0": 1.5},
        "loss_by_depth": {"4": 3.5, "8": 3.0},
        "depths": {"4": 3, "8": 1},
        "time": time,
    }


def write_run(
    folder: Path, records: Iterable[Record], tail: str = "", **sections: dict[str, Any]
) -> Path:
    """log.jsonl and config.yaml in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tree = {"name": "sea", "model": {**MODEL, **sections.pop("model", {})}, **sections}
    tree.setdefault("train", {"num_steps": 60})
    (folder / "config.yaml").write_text(dump_config(build_config(tree, where="test")))
    lines = [json.dumps(record) for record in records]
    (folder / "log.jsonl").write_text("\n".join(lines) + "\n" + tail)
    return folder


def eventful_run(folder: Path) -> Path:
    """Died after step 30 with a save at 20; one skip, one spike, a roll-back; stopped at 50."""
    skipped = {"skipped_steps": 1}
    return write_run(
        folder,
        [
            start(0, 1000),
            *steps(1, 20, 1000),
            {"kind": "validation", "step": 20, "loss": {"1": 3.9, "8": 3.7}, "time": 1043},
            {"kind": "checkpoint", "step": 20, "path": "p", "seconds": 0.4, "stall_seconds": 0.01},
            *steps(21, 30, 1043),
            start(20, 1100),
            *steps(21, 30, 1100),
            *steps(31, 31, 1120, **skipped, loss=None),
            *steps(32, 32, 1122, **skipped, loss=9.0, loss_spike=True),
            {"kind": "roll_back", "step": 32, "to_step": 20},
            {"kind": "save_failed", "step": 40, "reason": "<b>no space</b>", "time": 1125},
            *steps(33, 50, 1125, **skipped),
            health(40, 1150),
            health(50, 1165),
            {"kind": "validation", "step": 50, "loss": {"1": 3.4, "8": 3.1}, "time": 1170},
            {"kind": "stop", "step": 50, "reason": "received SIGTERM", "time": 1171},
        ],
        tail='{"kind": "step", "st',
    )
