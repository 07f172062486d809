"""What a run says about itself: its start, the figures of a step, the line for people."""

from __future__ import annotations

import platform
import socket
import time
from dataclasses import asdict
from importlib.metadata import version

import numpy as np
import torch

import megaparcae
from megaparcae.config.batch import BatchPlan
from megaparcae.config.schema import RunConfig
from megaparcae.model.flops import count_parameters, needed_flops
from megaparcae.plan.machines import peak_tflops
from megaparcae.train.batches import HostBatch
from megaparcae.train.sinks import Record


def start_record(config: RunConfig, plan: BatchPlan, step: int, device: str) -> Record:
    """The beginning of a process's work on a run: where, and as what; `step` steps are made."""
    return {
        "kind": "start",
        "step": step,
        "host": socket.gethostname(),
        "device": device,
        "layout": {
            "world": plan.world,
            **{name: value for name, value in asdict(plan).items() if name != "global_batch"},
            "zero_stage": config.parallel.zero_stage,
        },
        "parameters": count_parameters(config.model).total,
        "versions": {
            "megaparcae": megaparcae.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "deepspeed": version("deepspeed"),
        },
    }


class StepClock:
    """Speed of a run: seconds of each step, tokens/s, TFLOP/s of each device, time to the end."""

    def __init__(self, config: RunConfig, plan: BatchPlan, device_name: str) -> None:
        self.config = config
        self.plan = plan
        self.peak = config.log.peak_tflops or peak_tflops(device_name)
        self.last = time.perf_counter()
        self.recent: list[float] = []
        self.num_steps = 0
        self.other_seconds = 0.0
        """Spent between steps: validation, saves."""

    def skip(self) -> None:
        """What happened since the last step (validation, a save) is not part of the next one."""
        now = time.perf_counter()
        self.other_seconds += (now - self.last) * bool(self.num_steps)
        self.last = now

    def exclude(self, seconds: float) -> None:
        """So much of the time since the last step was no part of the next one."""
        self.other_seconds += seconds
        self.last += seconds

    def step(self, step: int, n: np.ndarray, k: np.ndarray) -> Record:
        """Figures of the step that has just ended; n and k are the depths of its whole batch."""
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        self.recent = [*self.recent[-49:], seconds]
        self.num_steps += 1
        whole_step = float(np.median(self.recent)) + self.other_seconds / self.num_steps
        S, G = self.config.model.sequence_length, self.plan.global_batch
        flops = needed_flops(
            self.config.model,
            rows_no_grad=int(n.sum()),
            rows_grad=int(k.sum()),
            rows=G,
            sequence_length=S,
        )
        tflops = flops / seconds / 1e12 / self.plan.world
        figures: Record = {
            "seconds": seconds,
            "tokens_per_second": G * S / seconds,
            "tflops_per_device": tflops,
            "eta_seconds": whole_step * (self.config.train.num_steps - step),
        }
        if self.peak:
            figures["mfu"] = tflops / self.peak
        return figures


def work_record(batches: list[HostBatch], n: np.ndarray, k: np.ndarray) -> Record:
    """Depths of the step's whole batch, and this rank's share of its loop work."""
    mine = sum(sum(b.num_no_grad) + 3 * sum(b.num_grad) for b in batches)
    return {
        "mean_loops": float((n + k).mean()),
        "max_loops": int((n + k).max()),
        "rank0_loop_work": mine,
        "loop_work": int(n.sum() + 3 * k.sum()),
    }


def console_line(record: Record, num_steps: int) -> str:
    """One line for people; the columns of a run's lines stand below each other."""
    width = len(str(num_steps))
    parts = [
        f"step {record['step']:>{width}}/{num_steps} {record['step'] / num_steps:4.0%}",
        f"loss {record['loss']:7.4f}",
        f"norm {record['grad_norm']:8.3g}",
        f"lr x{record['lr_factor']:.3f}",
        f"loops {record['mean_loops']:5.2f}",
        f"eff {record['efficiency']:6.1%}",
        f"{_si(record['tokens_per_second'])} tok/s",
        f"{record['tflops_per_device']:8.3g} TFLOP/s",
    ]
    if "mfu" in record:
        parts.append(f"MFU {record['mfu']:5.1%}")
    parts.append(f"ETA {_duration(record['eta_seconds']):>8}")
    if record["skipped_steps"]:
        parts.append(f"skipped {record['skipped_steps']}")
    return "  ".join(parts)


def _si(value: float) -> str:
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:5.1f}{suffix}"
    return f"{value:5.0f} "


def _duration(seconds: float) -> str:
    seconds = int(seconds)
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600}:{rest % 3600 // 60:02}:{rest % 60:02}"
    return f"{days}d {clock}" if days else clock
