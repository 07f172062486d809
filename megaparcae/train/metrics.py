"""What a run says about itself: log.jsonl, one line a step; the console; wandb and TensorBoard."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megaparcae.config.batch import BatchPlan
from megaparcae.config.load import config_tree
from megaparcae.config.schema import RunConfig
from megaparcae.log import logger
from megaparcae.model.flops import needed_flops
from megaparcae.train.batches import HostBatch

Record = dict[str, Any]

PEAK_TFLOPS = {  # dense bf16, from the makers' data sheets
    "A100": 312.0,
    "H100": 989.0,
    "H200": 989.0,
    "B200": 2250.0,
    "L40S": 362.0,
    "V100": 125.0,
}


class Sink(Protocol):
    """One place that records go to."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """log.jsonl: one JSON object a line, flushed at once. NaN and infinity become null."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        self.file.write(json.dumps(_finite(record)) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return value


class Forgiving:
    """Another sink whose failures never reach the run: the first is reported, then it is silent."""

    def __init__(self, name: str, sink: Sink) -> None:
        self.name = name
        self.sink: Sink | None = sink

    def write(self, record: Record) -> None:
        self._try("write", record)

    def close(self) -> None:
        self._try("close")

    def _try(self, method: str, *args: object) -> None:
        if self.sink is None:
            return
        try:
            getattr(self.sink, method)(*args)
        except Exception as error:
            logger.warning(
                "%s failed (%s) and is off from here; log.jsonl is complete", self.name, error
            )
            self.sink = None


class WandbSink:
    """Weights & Biases; without a key it runs offline. The step is a value, so that a resumed run
    whose checkpoint is older than its last record loses no point."""

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        import wandb

        has_key = bool(os.environ.get("WANDB_API_KEY")) or (Path.home() / ".netrc").exists()
        mode = os.environ.get("WANDB_MODE") or ("online" if has_key else "offline")
        if mode == "offline":
            logger.warning("wandb: no key, recording offline in %s/wandb", run_dir)
        self.run = wandb.init(
            project=config.log.wandb_project,
            name=config.name,
            dir=str(run_dir),
            mode=mode,  # type: ignore[arg-type]  # wandb itself checks WANDB_MODE
            config=config_tree(config),
        )
        self.run.define_metric("*", step_metric="step")

    def write(self, record: Record) -> None:
        self.run.log(_flat(record))

    def close(self) -> None:
        self.run.finish()


class TensorBoardSink:
    """TensorBoard scalars."""

    def __init__(self, folder: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(folder)

    def write(self, record: Record) -> None:
        for name, value in _flat(record).items():
            if isinstance(value, int | float) and name != "step":
                self.writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self.writer.close()


def _flat(record: Record) -> Record:
    """Nested dicts as `outer/inner`."""
    flat: Record = {}
    for name, value in record.items():
        if isinstance(value, dict):
            flat |= {f"{name}/{inner}": item for inner, item in value.items()}
        else:
            flat[name] = value
    return flat


def make_sinks(config: RunConfig, run_dir: Path, is_writer: bool) -> list[Sink]:
    """Where records go; nowhere on ranks other than the first."""
    if not is_writer:
        return []
    sinks: list[Sink] = [JsonLines(run_dir / "log.jsonl")]
    if config.log.wandb_project is not None:
        sinks += _optional("wandb", lambda: WandbSink(config, run_dir))
    if config.log.tensorboard_dir is not None:
        folder = config.log.tensorboard_dir
        sinks += _optional("tensorboard", lambda: TensorBoardSink(folder))
    return sinks


def _optional(package: str, make: Any) -> list[Sink]:
    if importlib.util.find_spec(package) is None:
        logger.warning("%s is not installed: pip install %s; going on without it", package, package)
        return []
    try:
        return [Forgiving(package, make())]
    except Exception as error:
        logger.warning("%s could not start (%s); going on without it", package, error)
        return []


class StepClock:
    """Speed of a run: seconds of each step, tokens/s, TFLOP/s of each device, time to the end."""

    def __init__(self, config: RunConfig, plan: BatchPlan, device_name: str) -> None:
        self.config = config
        self.plan = plan
        self.peak = config.log.peak_tflops or next(
            (peak for name, peak in PEAK_TFLOPS.items() if name in device_name), None
        )
        self.last = time.perf_counter()
        self.recent: list[float] = []

    def skip(self) -> None:
        """What happened since the last step (validation, a save) is not part of the next one."""
        self.last = time.perf_counter()

    def step(self, step: int, n: np.ndarray, k: np.ndarray) -> Record:
        """Figures of the step that has just ended; n and k are the depths of its whole batch."""
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        self.recent = [*self.recent[-49:], seconds]
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
            "eta_seconds": float(np.median(self.recent)) * (self.config.train.num_steps - step),
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
    """One aligned line for people."""
    width = len(str(num_steps))
    parts = [
        f"step {record['step']:>{width}}/{num_steps}",
        f"loss {record['loss']:7.4f}",
        f"norm {record['grad_norm']:8.3g}",
        f"lr x{record['lr_factor']:.3f}",
        f"loops {record['mean_loops']:5.2f}",
        f"{_si(record['tokens_per_second'])} tok/s",
        f"{record['tflops_per_device']:.3g} TFLOP/s",
    ]
    if "mfu" in record:
        parts.append(f"MFU {record['mfu']:.1%}")
    parts.append(f"ETA {_duration(record['eta_seconds'])}")
    return "  ".join(parts)


def _si(value: float) -> str:
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


def _duration(seconds: float) -> str:
    seconds = int(seconds)
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600}:{rest % 3600 // 60:02}:{rest % 60:02}"
    return f"{days}d {clock}" if days else clock
