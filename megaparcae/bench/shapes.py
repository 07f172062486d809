"""The run that a suite measures: a YAML, a preset or the suite's own shape, changed by --set."""

from __future__ import annotations

from collections.abc import Sequence

from megaparcae.bench.options import ModelOptions
from megaparcae.config.load import load_config, preset_config
from megaparcae.config.schema import RunConfig
from megaparcae.errors import UserError

ALONE = ("parallel.tp=1", "parallel.pp=1", "train.global_batch_size=null")
"""For suites that measure one rank, whatever the run's layout."""


def run_config(
    options: ModelOptions,
    shape: Sequence[str] = (),
    more: Sequence[str] = (),
    *,
    preset: str | None = None,
) -> RunConfig:
    """`preset` and `shape` where neither --config nor --preset is given; `more` goes last."""
    overrides = [*options.overrides, *more]
    if options.config is not None and options.preset is not None:
        raise UserError("--config and --preset exclude each other; give one of them")
    if options.config is not None:
        return load_config(options.config, overrides)
    if options.preset is not None:
        return preset_config(options.preset, overrides)
    return preset_config(preset, [*shape, *overrides])
