"""What each suite of tools/benchmark.py can be asked. No torch, so that --help is quick."""

from __future__ import annotations

import argparse
from dataclasses import Field, dataclass, field, fields
from typing import Any

from megaparcae.errors import UserError


def _option(default: Any, help: str, *, flag: str | None = None, least: int | None = None) -> Any:
    """A field that is an option of the command line."""
    return field(default=default, metadata={"help": help, "flag": flag, "least": least})


@dataclass(frozen=True, kw_only=True)
class Options:
    """What all suites share."""

    repeats: int = _option(5, "measurements of each variant, in turn", least=1)
    threads: int = _option(0, "torch threads of a process (0: the cores, shared out)", least=0)

    def __post_init__(self) -> None:
        for item in fields(self):
            least, value = item.metadata["least"], getattr(self, item.name)
            values = value if isinstance(value, tuple) else (value,)
            if least is not None and any(v < least for v in values):
                raise UserError(f"{flag_of(item)}={value} must be at least {least}")


@dataclass(frozen=True, kw_only=True)
class LoaderOptions(Options):
    """samples/s of the datasets against bare memmap slices; what the packing indices cost"""

    data: str | None = _option(None, "prefix of a shard to read (default: a made-up one)")
    sequence_length: int = _option(2048, "S, tokens of a row", least=1)
    rows: int = _option(32, "rows read at once", least=1)
    megabytes: int = _option(256, "size of the made-up shard", least=1)
    mean_length: int = _option(1000, "mean tokens of a made-up document", least=1)
    documents: int = _option(10_000_000, "documents of the index measurement", least=1)
    seconds: float = _option(0.5, "length of one measurement of reading")


@dataclass(frozen=True, kw_only=True)
class PreprocessOptions(Options):
    """tools/preprocess_data.py against a stand-in for Megatron's, and against the bare engine"""

    repeats: int = _option(3, "measurements of each variant, in turn", least=1)
    input: str | None = _option(None, "JSON lines with the text under `text` (required)")
    tokenizer_model: str | None = _option(None, ".model or tokenizer.json (required)")
    workers: int = _option(2, "processes that encode", least=1)
    megabytes: int = _option(20, "MB of the input's beginning to use (0: all)", least=0)
    short_documents: int = _option(
        0, "also: memory with this many made-up documents of a line (0: leave it out)", least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("input", "tokenizer_model"):
            if getattr(self, name) is None:
                raise UserError(f"--{name.replace('_', '-')} is missing; preprocess needs it")


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """Suites that need a model."""

    config: str | None = _option(None, "YAML of a run (default: the suite's own shape)")
    preset: str | None = _option(None, "preset instead of --config")
    overrides: tuple[str, ...] = _option(
        (), "change the run, such as model.hidden_size=128; may be repeated", flag="--set"
    )


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(ModelOptions):
    """decoding with a cache against recomputing, batches, and the bare matrix-vector products"""

    repeats: int = _option(3, "measurements of each variant, in turn", least=1)
    dtype: str = _option("float32", "of weights and arithmetic: float32 or bfloat16")
    prompt: int = _option(32, "tokens of the prompt", least=1)
    new_tokens: int = _option(128, "tokens to generate", least=2)
    batch: int = _option(8, "rows of the batch that is compared with one row", least=2)
    wide: int = _option(
        1024, "width of the model that is compared with its bare products", least=32
    )
    lengths: tuple[int, ...] = _option(
        (64, 256, 512, 1024), "context lengths at which a token is timed", least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _choose("--dtype", (self.dtype,), ("float32", "bfloat16"))


@dataclass(frozen=True, kw_only=True)
class StepOptions(ModelOptions):
    """training step: finished rows drop out, against masking them; loss, loop work, scaling"""

    parts: tuple[str, ...] = _option(("step", "loss", "work"), "of step, loss, work, scaling")
    dtypes: tuple[str, ...] = _option(("fp32", "bf16"), "train.precision of the steps")
    rows: tuple[int, ...] = _option((16,), "rows of a micro-batch", least=1)
    means: tuple[int, ...] = _option((8,), "mean loops, half of them with gradient", least=1)
    loss_vocab: int = _option(32768, "vocabulary of the loss part", least=2)
    loss_tokens: tuple[int, ...] = _option((1024, 2048, 4096), "its tokens", least=1)
    work_steps: int = _option(100, "steps of the work part", least=1)
    scale_rows: tuple[int, ...] = _option((1, 2, 4, 8, 16), "rows of the scaling part", least=1)
    scale_lengths: tuple[int, ...] = _option((128, 256, 512, 1024), "its sequence lengths", least=2)
    scale_means: tuple[int, ...] = _option((1, 2, 4, 8, 16), "its mean loops", least=1)
    png: str = _option("scaling.png", "picture of the scaling part")

    def __post_init__(self) -> None:
        super().__post_init__()
        _choose("--parts", self.parts, ("step", "loss", "work", "scaling"))
        _choose("--dtypes", self.dtypes, ("fp32", "bf16"))


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions(ModelOptions):
    """optimizer step: sharded over the ranks, against every rank doing all of it"""

    ranks: int = _option(2, "data-parallel ranks", least=2)
    threads: int = _option(1, "torch threads of a rank", least=1)


@dataclass(frozen=True, kw_only=True)
class PipelineOptions(ModelOptions):
    """idle share of pipeline stages: simulated, and counted in a real pipeline of processes"""

    stages: int = _option(4, "P, pipeline stages", least=2)
    micro_batches: int = _option(32, "M, micro-batches of a step", least=1)
    rows: int = _option(4, "rows of a micro-batch", least=1)
    simulated_steps: int = _option(50, "steps that are simulated", least=1)
    real_steps: int = _option(3, "steps of the real pipeline, on a narrow model", least=1)
    threads: int = _option(1, "torch threads of a stage", least=1)


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(ModelOptions):
    """saves that training waits for, saves beside it, and loading"""

    repeats: int = _option(3, "measurements of each variant, in turn", least=1)
    dir: str | None = _option(None, "folder on the disk to measure (default: a temporary one)")


SUITES: dict[str, type[Options]] = {
    "loader": LoaderOptions,
    "preprocess": PreprocessOptions,
    "generate": GenerateOptions,
    "step": StepOptions,
    "optimizer": OptimizerOptions,
    "pipeline": PipelineOptions,
    "checkpoint": CheckpointOptions,
}
"""Suite -> its options; the module of the same name measures."""


def _choose(flag: str, chosen: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    for one in chosen:
        if one not in allowed:
            raise UserError(f"{flag} {one}: choose among {', '.join(allowed)}")


def flag_of(item: Field[Any]) -> str:
    """The option's name on the command line."""
    return item.metadata["flag"] or f"--{item.name.replace('_', '-')}"


def add_options(parser: argparse.ArgumentParser, options: type[Options]) -> None:
    """One argument for each field; its type is that of the default."""
    for item in fields(options):
        about: dict[str, Any] = {"dest": item.name, "default": item.default, "type": str}
        text, shown = item.metadata["help"], item.default
        match item.default:
            case ():
                about |= {"nargs": "+", "action": "extend", "default": [], "metavar": "KEY=VALUE"}
            case tuple():
                about |= {"nargs": "+", "type": type(item.default[0])}
                shown = " ".join(map(str, item.default))
            case int() | float():
                about["type"] = type(item.default)
        if shown not in (None, ()) and "default" not in text:
            text += f" (default {shown})"
        parser.add_argument(flag_of(item), help=text, **about)


def from_arguments(options: type[Options], arguments: argparse.Namespace) -> Options:
    """The options that were given; UserError when one is out of range."""
    chosen: dict[str, Any] = {}
    for item in fields(options):
        value = getattr(arguments, item.name)
        chosen[item.name] = tuple(value) if isinstance(value, list) else value
    return options(**chosen)
