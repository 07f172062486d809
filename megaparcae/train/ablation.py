"""Runs the suites of `ablation_suites.py`: a few training processes, each run after run, resumable.

    {out}/runs/{suite}/{variant}[-lr{rate}]-seed{seed}/    log.jsonl, config.yaml, result.json

A run that has its result is not made again, unless its config has changed.
"""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megaparcae.config.load import build_config
from megaparcae.config.schema import RunConfig
from megaparcae.config.yaml_text import Tree
from megaparcae.engine.distributed import init_distributed
from megaparcae.errors import UserError
from megaparcae.launcher.ranks import rank_variables
from megaparcae.log import logger, read_records
from megaparcae.train.ablation_suites import BATCH_SIZE, SIZE, Suite, Variant
from megaparcae.train.run import train
from megaparcae.train.safety import TrainingError


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of a suite."""

    variant: str
    rate: float | None
    seed: int
    tree: Tree
    """Its options, in the shape of a run's YAML."""

    @property
    def folder(self) -> Path:
        """Where its log and its result are."""
        return Path(self.tree["checkpoint"]["dir"])

    def config(self) -> RunConfig:
        """Checked. Raises UserError for an option that does not fit."""
        return build_config(self.tree, where=self.folder.name)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a finished run says."""

    job: Job
    diverged: bool
    """Stopped for non-finite steps, or ended no better than a model that takes no context."""
    losses: tuple[float, ...]
    """Training loss of every step, NaN where it was not finite."""
    validation: dict[int, float]
    """T -> loss at the end of the run; empty when it was stopped."""
    max_state_norm: float
    """Largest |h_T| of a token in any health record; NaN when one was not finite."""


def plan_jobs(
    suite: Suite, *, data: str, seeds: int, out: Path, num_steps: int | None, options: Tree
) -> list[Job]:
    """All runs of a suite; `options` is a nested mapping that overrides the suite's base."""
    jobs = []
    for variant in suite.variants:
        for rate in suite.rates or (None,):
            for seed in range(1, seeds + 1):
                at_rate = "" if rate is None else f"-lr{rate:g}"
                folder = out / "runs" / suite.name / f"{variant.name}{at_rate}-seed{seed}"
                tree = run_tree(suite, variant, rate, num_steps or suite.num_steps)
                tree["train"]["seed"] = seed
                tree["checkpoint"] = {"dir": str(folder), "interval": 0, "resume": "never"}
                tree["data"] = {"train": data}
                job = Job(variant=variant.name, rate=rate, seed=seed, tree=merged(tree, options))
                job.config()  # a mistake in the options shows before the first run
                jobs.append(job)
    return jobs


def run_tree(suite: Suite, variant: Variant, rate: float | None, num_steps: int) -> Tree:
    """A run's options in the shape of its YAML."""
    tree: Tree = {
        "model": merged(merged(SIZE, suite.base["model"]), variant.model),
        "optimizer": suite.base["optimizer"] | ({} if rate is None else {"lr": rate}),
        "schedule": {"warmup_steps": num_steps // 10},
        "train": {
            "num_steps": num_steps,
            "global_batch_size": BATCH_SIZE,
            "micro_batch_size": BATCH_SIZE,
            "precision": "fp32",
            "device": "cpu",
            "max_skipped_steps": 5,
        },
        "validation": {
            "interval": num_steps,
            "num_sequences": 128,
            "num_loops": list(suite.depths),
        },
        "log": {"interval": 0, "health_interval": max(1, num_steps // 30)},
    }
    return tree


def nested_options(overrides: Sequence[str]) -> Tree:
    """section.key=value (values in YAML) as a nested mapping. Raises UserError without an "="."""
    options: Tree = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise UserError(f"--set {override}: write SECTION.KEY=VALUE")
        value: object = yaml.safe_load(text)
        for name in reversed(key.split(".")):
            value = {name: value}
        options = merged(options, value)  # type: ignore[arg-type]
    return options


def merged(base: Tree, top: Tree) -> Tree:
    """`base` with nested changes."""
    result = dict(base)
    for key, value in top.items():
        nested = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if nested else value
    return result


def execute(jobs: Sequence[Job], *, num_workers: int) -> None:
    """Make the runs that have no result yet, `num_workers` at a time with one thread each."""
    left = [job for job in jobs if not is_finished(job)]
    logger.info("%d of %d runs are finished; %d to do", len(jobs) - len(left), len(jobs), len(left))
    if not left:
        return
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")  # for the processes to come
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, spawn, _start_worker) as pool:
        started = {pool.submit(make_run, job): job for job in left}
        try:
            for count, (job, seconds) in enumerate(_finished(started), 1):
                name = job.folder.relative_to(job.folder.parents[1])
                loss = ending_loss(read_outcome(job, level=math.inf).losses)
                logger.info("[%d/%d] %s: loss %.3f, %.0f s", count, len(left), name, loss, seconds)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _finished(started: dict[Future[float], Job]) -> Iterator[tuple[Job, float]]:
    for future in as_completed(started):
        yield started[future], future.result()


def _start_worker() -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.update(rank_variables({}))
    logger.setLevel(logging.CRITICAL)  # results speak; ten runs at once must not


def make_run(job: Job) -> float:
    """Train one run in this process and note how it ended; its seconds."""
    begin = time.perf_counter()
    shutil.rmtree(job.folder, ignore_errors=True)
    stopped = ""
    try:
        if train(job.config(), init_distributed("cpu")):
            raise KeyboardInterrupt  # asked to stop: no result
    except TrainingError as error:
        stopped = str(error)
    for checkpoint in job.folder.glob("step_*"):
        shutil.rmtree(checkpoint)
    result = {"options": job.tree, "stopped": stopped}
    (job.folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    return time.perf_counter() - begin


def is_finished(job: Job) -> bool:
    """Whether the run has ended, with these very options."""
    path = job.folder / "result.json"
    if not path.is_file():
        return False
    made_with = json.loads(path.read_text(encoding="utf-8"))["options"]
    return bool(made_with == json.loads(json.dumps(job.tree)))


def read_outcome(job: Job, *, level: float) -> Outcome:
    """From the run's log; `level` is the entropy of single tokens, that a model which takes the
    context into account is below. Raises UserError when the run has not been made."""
    if not is_finished(job):
        raise UserError(f"{job.folder} has no result; make the runs first")
    stopped = json.loads((job.folder / "result.json").read_text(encoding="utf-8"))["stopped"]
    records = read_records(job.folder / "log.jsonl")
    losses = tuple(_number(r["loss"]) for r in records if r["kind"] == "step")
    norms = [_number(r["state_norm_max"]) for r in records if r["kind"] == "health"]
    validated: dict[str, Any] = next(
        (r["loss"] for r in reversed(records) if r["kind"] == "validation"), {}
    )
    return Outcome(
        job=job,
        diverged=bool(stopped) or not ending_loss(losses) < level,
        losses=losses,
        validation={int(depth): _number(loss) for depth, loss in validated.items()},
        max_state_norm=max(norms) if all(map(math.isfinite, norms)) else math.nan,
    )


def ending_loss(losses: Sequence[float]) -> float:
    """Mean loss of the last tenth."""
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def _number(value: float | None) -> float:
    return math.nan if value is None else value
