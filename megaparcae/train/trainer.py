"""The training loop."""

from __future__ import annotations

from pathlib import Path

import torch

from megaparcae.checkpoint.manager import CheckpointManager, SaveResult
from megaparcae.checkpoint.ranks import gather
from megaparcae.data.dataset import TokenDataset
from megaparcae.data.loader import Prefetcher
from megaparcae.data.sampler import step_sample_ids
from megaparcae.log import logger
from megaparcae.optim.schedule import hyperparameters_at
from megaparcae.train.batches import BatchMaker, HostBatch
from megaparcae.train.build import Run, apply_schedule
from megaparcae.train.health import HealthMonitor
from megaparcae.train.lost_rank import probe_connections
from megaparcae.train.metrics import StepClock, console_line, start_record, work_record
from megaparcae.train.profile import StepProfiler
from megaparcae.train.replicas import check_replicas
from megaparcae.train.safety import (
    RollBackGuard,
    SkipGuard,
    StopRequest,
    TrainingError,
    on_any_rank,
)
from megaparcae.train.sinks import Record, make_sinks
from megaparcae.train.spikes import SpikeDetector, agreed_history
from megaparcae.train.stragglers import StragglerReport
from megaparcae.train.watchdog import Watchdog
from megaparcae.train.work import WorkMeter

LAST_SECONDS = 60.0
"""What a save that is being written is given when a run fails."""


class Trainer:
    """One run on this rank: reads, steps, validates, logs, saves."""

    def __init__(
        self, run: Run, train_data: TokenDataset, validation_data: TokenDataset | None
    ) -> None:
        config = run.config
        self.run = run
        self.config = config
        self.run_dir = Path(config.checkpoint.dir)
        self.is_writer = run.mesh.rank == 0
        self.last_step: int | None = None
        """Optimizer steps finished so far, those before a resume included."""
        self.batches = BatchMaker(
            config,
            run.plan,
            dp_index=run.mesh.dp.index,
            train=train_data,
            validation=validation_data,
            device=run.process.device,
        )
        self.checkpoints = CheckpointManager(config, run.plan.global_batch)
        self.stop = StopRequest(
            self.run_dir, is_first=self.is_writer, exit_after=config.train.exit_after
        )
        self.saved = 0
        """Step of the newest checkpoint that this run wrote or began from."""
        self.validated: dict[int, float] = {}
        """Step of the last validation -> lowest loss of its depths."""
        self.guard = SkipGuard(config.train.max_skipped_steps)
        self.spikes = SpikeDetector(config.train)
        self.roll_backs = RollBackGuard()
        self.health = HealthMonitor(run)
        self.stragglers = StragglerReport(run.model, config.model, run.mesh)
        self.watch = Watchdog(config.train.hang_factor, config.train.hang_min_seconds)
        on_gpu = run.process.device.type == "cuda"
        self.device_name = torch.cuda.get_device_name() if on_gpu else "CPU"
        self.clock = StepClock(config, run.plan, self.device_name)
        self.work = WorkMeter(config, run.plan, run.model.work, run.process.device)  # type: ignore[arg-type]
        self.profiler = StepProfiler(run, self.run_dir / "profile", self.clock)
        self.num_counted = run.plan.global_batch * config.model.sequence_length
        """Labels of a step: packing leaves no padding, so every position counts."""

    def train(self) -> bool:
        """Run to the last step or until asked to stop; True when the run is complete."""
        self.stop.refuse_to_start()
        step = self.checkpoints.resume(self.run.engine)
        self.last_step = step or None
        if self.run.process.device.type == "cpu":
            probe_connections()
        self.remember(step)
        self.sinks = make_sinks(self.config, self.run_dir, self.is_writer, step)
        self.write(start_record(self.config, self.run.plan, step, self.device_name))
        reader = Prefetcher(
            self.batches.read,
            start=step,
            stop=self.config.train.num_steps,
            num_workers=self.config.data.num_workers,
        )
        self.saved = first = step
        self.clock.skip()
        try:
            while step < self.config.train.num_steps:
                self.watch.begin("step", step)
                record = self.step(step, reader)
                self.last_step = step = step + 1
                self.report(record)
                if step == first + 1:
                    self.checkpoints.prepare(self.run.engine)
                if _due(step, self.config.train.replica_check_interval):
                    self.run.engine.finish_step()
                    check_replicas(self.run.model, step, self.stragglers.hosts)
                if self.config.train.loss_spike == "roll_back":
                    self.roll_back_if(record["loss_spike"], step)
                interval = self.config.validation.interval
                last = step == self.config.train.num_steps
                if interval and (last or _due(step, interval)):
                    self.validate(step)
                if self.agree_to_stop(step):
                    break
                if _due(step, self.config.checkpoint.interval):
                    self.save(step)
            self.save_last(step)
        finally:
            self.watch.close()
            reader.close()
            self.checkpoints.close(timeout=LAST_SECONDS)
            for sink in self.sinks:
                sink.close()
        return step >= self.config.train.num_steps

    def agree_to_stop(self, step: int) -> bool:
        """Whether a rank has a reason to stop; also the end of a save on all ranks is noted."""
        reason = self.stop.reason(self.clock.recent[-1])
        here = reason is not None, not self.checkpoints.over()
        asked, saving = on_any_rank(here, self.run.process.device)
        if not saving:
            self.settle()
        if asked:
            reason = next(why for why in gather(reason) if why is not None)
            logger.info("stopping after step %d: %s", step, reason)
            self.write({"kind": "stop", "step": step, "reason": reason})
        return asked

    def step(self, step: int, reader: Prefetcher[list[HostBatch]]) -> Record:
        """One optimizer step; `step` have been made before it."""
        host = next(reader)
        hyper = hyperparameters_at(
            step,
            optimizer=self.config.optimizer,
            schedule=self.config.schedule,
            num_steps=self.config.train.num_steps,
        )
        apply_schedule(self.run.engine.optimizer, hyper, self.config.optimizer)
        micro_batches = self.batches.to_device(host, step)
        watched = _due(step + 1, self.config.log.health_interval)
        if watched:
            self.health.watch()
        accept = self.spikes.accept if self.config.train.loss_spike == "skip" else None
        with self.profiler.watch(step + 1):
            self.work.begin()
            loss = float(self.run.engine.train_batch(micro_batches, 1 / self.num_counted, accept))
        norm = self.run.engine.grad_norm()
        self.stragglers.note(host)
        n, k = self.batches.depths(step, step_sample_ids(step, self.run.plan.global_batch))
        spike = self.spikes.note(loss, step + 1)
        self.guard.note(self.run.engine.last_step_skipped(), step + 1, spike=spike)
        if watched:
            self.write({"kind": "health", "step": step + 1, **self.health.record(host, n + k)})
        return {
            "kind": "step",
            "step": step + 1,
            "loss": loss,
            "grad_norm": norm,
            "lr_factor": hyper.lr_factor,
            "lr": hyper.lr_factor * self.config.optimizer.lr,
            "tokens": (step + 1) * self.num_counted,
            "skipped_steps": self.guard.total,
            "loss_spike": spike,
            **work_record(host, n, k),
            **self.work.record(int(n.sum()), int(k.sum())),
            **self.clock.step(step + 1, n, k),
        }

    def remember(self, step: int) -> None:
        """Judge the steps after a resume by the losses before it, and go on counting."""
        if step:
            history = agreed_history(self.run_dir / "log.jsonl", step)
            self.spikes.remember(history.losses)
            self.guard.total = history.skipped_steps

    def roll_back_if(self, spike: bool, step: int) -> None:
        """Weights and states of the last checkpoint return; steps and data go on from here."""
        if on_any_rank([spike], self.run.process.device) == [False]:
            return
        self.settle()
        if self.saved == 0:
            logger.warning("no checkpoint to roll back to yet: going on after the spike")
            return
        self.roll_backs.note(self.saved)
        self.checkpoints.restore(self.saved, self.run.engine)
        self.write({"kind": "roll_back", "step": step, "to_step": self.saved})
        self.clock.skip()

    def write(self, record: Record) -> None:
        """To all sinks."""
        for sink in self.sinks:
            sink.write(record)

    def report(self, record: Record) -> None:
        """One step: to all sinks, and at the interval to the console."""
        self.write(record)
        if _due(record["step"], self.config.log.interval):
            ranks = self.stragglers.record(record["step"])
            if ranks is not None:
                self.write(ranks)
            logger.info(console_line(record, self.config.train.num_steps))

    def validate(self, step: int) -> None:
        """Mean loss of the validation rows at each depth; training is not disturbed."""
        if self.batches.validation is None:
            return
        self.watch.begin("validation", step)
        losses = validation_losses(self.run, self.batches)
        self.validated = {step: min(losses.values())}
        self.write({"kind": "validation", "step": step, "loss": losses})
        shown = "  ".join(f"T={name} {loss:.4f}" for name, loss in losses.items())
        logger.info("validation after step %d: %s", step, shown)
        self.clock.skip()

    def save(self, step: int) -> None:
        """Begin to write a checkpoint, all ranks together; the one before is on disk by then."""
        self.watch.begin("save", step)
        self.settle()
        loss = self.validated.get(step)
        if self.config.checkpoint.asynchronous:
            self.checkpoints.begin(step, self.run.engine, validation_loss=loss)
        else:
            self.note_save(self.checkpoints.save(step, self.run.engine, validation_loss=loss))
        self.clock.skip()

    def settle(self) -> None:
        """Wait for the save that was begun, if any."""
        result = self.checkpoints.wait()
        if result is not None:
            self.note_save(result)
            self.clock.skip()

    def save_last(self, step: int) -> None:
        """The step at which a run ends is on disk when it ends. Raises TrainingError otherwise."""
        self.watch.begin("last save", step)
        self.settle()
        if self.saved != step:
            self.save(step)
            self.settle()
        if self.saved != step:
            raise TrainingError(
                f"the run ended after step {step}, which could not be saved; the checkpoint of "
                f"step {self.saved} stands: free some space and start the same command again"
            )

    def note_save(self, result: SaveResult) -> None:
        """Say and record how a save ended."""
        self.stop.save_seconds = max(self.stop.save_seconds, result.seconds)
        times = {"seconds": result.seconds, "stall_seconds": result.stall_seconds}
        if result.folder is None:
            reason = {"reason": result.problem}
            self.write({"kind": "save_failed", "step": result.step, **reason, **times})
            return
        self.saved = result.step
        logger.info(
            "saved %s in %.1f s (training waited %.2f s)",
            result.folder,
            result.seconds,
            result.stall_seconds,
        )
        path = {"path": str(result.folder)}
        self.write({"kind": "checkpoint", "step": result.step, **path, **times})


def validation_losses(run: Run, batches: BatchMaker) -> dict[str, float]:
    """Depth -> mean loss per token in nats; a Transformer has the one depth 1."""
    config = run.config
    looped = config.model.architecture == "looped"
    count = config.validation.num_sequences * config.model.sequence_length
    depths = config.validation.num_loops if looped else (1,)
    return {
        str(depth): float(run.engine.eval_batch(batches.validation_batches(depth))) / count
        for depth in depths
    }


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
