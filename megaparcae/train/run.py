"""A whole training run on this rank: data, build, train, exit code."""

from __future__ import annotations

from dataclasses import replace

from megaparcae.config.batch import BatchPlan, solve_batch
from megaparcae.config.schema import RunConfig
from megaparcae.data.build import open_datasets
from megaparcae.data.dataset import TokenDataset
from megaparcae.data.describe import draw_table, plan_epochs
from megaparcae.engine.distributed import Process
from megaparcae.log import logger
from megaparcae.train.build import build_run
from megaparcae.train.lost_rank import LostRankError, is_lost_rank
from megaparcae.train.preflight import check_agreement, preflight
from megaparcae.train.safety import STOPPED_EXIT_CODE
from megaparcae.train.trainer import Trainer


def train(config: RunConfig, process: Process, *, only_check: bool = False) -> int:
    """Train to the end or until asked to stop; the exit code of the process.

    With `only_check` the machines are checked, and nothing is trained.

    Raises LostRankError when another rank is gone.
    """
    train_data, validation_data = open_datasets(
        config.data, config.model, config.validation, seed=config.train.seed
    )
    config = with_epochs(config, train_data, process.world_size)
    datasets = [data for data in (train_data, validation_data) if data is not None]
    samples = config.train.num_steps * batch_plan(config, process.world_size).global_batch
    logger.info("%s", draw_table(train_data, samples))
    trainer = None
    try:
        if only_check:
            preflight(config, process, datasets)
            return 0
        check_agreement(config, datasets)
        trainer = Trainer(build_run(config, process), train_data, validation_data)
        complete = trainer.train()
    except RuntimeError as error:
        if is_lost_rank(error):
            raise LostRankError(trainer.last_step if trainer else None, error) from error
        raise
    return 0 if complete else STOPPED_EXIT_CODE


def batch_plan(config: RunConfig, world_size: int) -> BatchPlan:
    """The solved batch arithmetic."""
    parallel = config.parallel
    return solve_batch(config.train, world=world_size, tp=parallel.tp, pp=parallel.pp)


def with_epochs(config: RunConfig, data: TokenDataset, world_size: int) -> RunConfig:
    """data.num_epochs as train.num_steps: whole batches only, what is left over is left out."""
    if config.data.num_epochs is None:
        return config
    batch = batch_plan(config, world_size).global_batch
    num_steps, explanation = plan_epochs(data, config.data.num_epochs, batch)
    logger.info("%s", explanation)
    return replace(config, train=replace(config.train, num_steps=num_steps))
