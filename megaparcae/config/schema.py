"""Every option of a run: frozen sections, one docstring per field, checked on construction.

A section checks what can be said about it alone; `RunConfig` checks what needs two sections. What
needs the number of processes is in `batch.py`. Messages name the option, its value, the rule and
the remedy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

VALUE_GATE_INPUTS = 32
"""The value-embedding gate reads the first 32 entries of the normalised block input."""


@dataclass(frozen=True, kw_only=True)
class RecurrenceConfig:
    """How often the core is applied (paper, section 4 and appendix O)."""

    mean_recurrence: int = 8
    """Mean number of loops per sequence (mu_rec in the paper)."""
    backprop_depth: int | None = None
    """Most loops that carry a gradient (mu_bwd); null means ceil(mean_recurrence / 2)."""
    sampler: Literal["poisson", "poisson_full", "poisson_fill", "fixed", "lognormal_poisson"] = (
        "poisson"
    )
    """poisson: T = max(1, Poisson(mu)), k = min(T, mu_bwd). poisson_full: k = T. poisson_fill:
    n = Poisson(mu - mu_bwd), k = mu_bwd. fixed: T = mu. lognormal_poisson: Huginn's."""
    draw_per: Literal["sequence", "batch"] = "sequence"
    """One depth per sequence (Parcae), or one for all sequences of an optimizer step (RDM)."""
    curriculum: Literal["none", "linear", "sqrt"] = "none"
    """Ramp of the mean depth: step/L, or 1 - sqrt(1 - step/L), with L = curriculum_steps."""
    curriculum_target: Literal["forward", "backward", "both"] = "forward"
    """Ramp the loops without gradient, those with gradient, or both."""
    curriculum_steps: int = 0
    """Optimizer steps until the full depth is reached."""

    def __post_init__(self) -> None:
        _at_least("model.recurrence.mean_recurrence", self.mean_recurrence, 1)
        if self.backprop_depth is None:
            object.__setattr__(self, "backprop_depth", math.ceil(self.mean_recurrence / 2))
        _at_least("model.recurrence.backprop_depth", self.num_grad_loops, 1)
        if self.num_grad_loops > self.mean_recurrence:
            raise ValueError(
                f"model.recurrence.backprop_depth={self.backprop_depth} is more than "
                f"mean_recurrence={self.mean_recurrence}; use at most {self.mean_recurrence}, or "
                "sampler=poisson_full to backpropagate through every loop"
            )
        if (self.curriculum == "none") != (self.curriculum_steps == 0):
            raise ValueError(
                f"model.recurrence.curriculum={self.curriculum!r} with curriculum_steps="
                f"{self.curriculum_steps}: give both a ramp and its length, or neither"
            )

    @property
    def num_grad_loops(self) -> int:
        """mu_bwd, after the default has been filled in."""
        assert self.backprop_depth is not None
        return self.backprop_depth


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What the weights are; two checkpoints are compatible when these agree."""

    architecture: Literal["looped", "transformer"] = "looped"
    """looped: prelude, core x T, coda. transformer: num_layers blocks, once each."""
    vocab_size: int = 32768
    """Number of token ids of the tokenizer."""
    vocab_multiple: int = 64
    """The embedding has vocab_size rounded up to a multiple of this; tp must divide the result."""
    sequence_length: int = 2048
    """Tokens of one training sequence (S)."""
    hidden_size: int = 768
    """Width d of the residual stream and of the looped state."""
    intermediate_size: int = 3072
    """Width of the MLP's inner layer."""
    num_heads: int = 6
    """Query heads."""
    num_kv_heads: int | None = None
    """Key/value heads (grouped-query attention); null means num_heads."""
    num_prelude_layers: int = 2
    """Blocks before the loop (looped only)."""
    num_core_layers: int = 2
    """Blocks of the core, applied T times (looped only)."""
    num_coda_layers: int = 2
    """Blocks after the loop (looped only)."""
    num_layers: int = 6
    """Blocks of the fixed-depth Transformer (transformer only)."""
    block: Literal["pre_norm", "sandwich"] = "pre_norm"
    """pre_norm: x + f(norm(x)). sandwich: norm(x + f(norm(x))) (Huginn)."""
    mlp: Literal["relu2", "swiglu"] = "relu2"
    """relu2: down(relu(up x)^2 / 2). swiglu: down(silu(gate x) * up x)."""
    qk_norm: bool = True
    """RMS-normalise every query and key head, without a weight."""
    qk_bias: bool = False
    """Learned bias on queries and keys, before the rotary embedding."""
    value_embeddings: bool = True
    """Gated token tables added to the values of every second layer."""
    clip_qkv: float | None = None
    """Clamp q, k and v to [-c, c]; null is off."""
    logit_softcap: float | None = None
    """logits = c tanh(logits / c); null is off."""
    norm_eps: float = 1e-5
    """Epsilon inside the root of every weighted RMSNorm."""
    rope_theta: float = 50000.0
    """Base of the rotary embedding."""
    tie_embeddings: bool = True
    """The head is the transposed input embedding."""
    scale_embeddings: bool = False
    """Multiply input embeddings by sqrt(hidden_size) (Takase et al.)."""
    injection: Literal["diagonal", "linear", "additive"] = "diagonal"
    """How the prelude's output enters every loop (Parcae, Huginn, plain sum)."""
    prelude_norm: bool = True
    """RMSNorm on the prelude's output (looped only)."""
    readout: bool = True
    """The d x d matrix C between loop and coda (looped only)."""
    loop_norm: bool = False
    """Apply the final norm to the state after the loop as well (Huginn)."""
    state_init: Literal["like_init", "zero", "normal", "embed", "unit"] = "like_init"
    """Distribution of the start state h_0."""
    init: Literal["scaled_zero", "scaled"] = "scaled_zero"
    """Output projections at the start: zero, or std sqrt(2/5d) / sqrt(2 x unrolled depth).
    All other matrices have std sqrt(2/5d) (Takase et al.)."""
    init_orthogonal: bool = True
    """Scaled semi-orthogonal matrices instead of truncated normals of the same rms."""
    residual_scale: float | None = None
    """lambda of the residual scaling lambda / (N sqrt(L)), N loops and L layers; null is off."""
    recurrence: RecurrenceConfig = field(default_factory=RecurrenceConfig)
    """Loop depth."""

    def __post_init__(self) -> None:
        if self.num_kv_heads is None:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        for name in ("vocab_size", "vocab_multiple", "sequence_length", "hidden_size"):
            _at_least(f"model.{name}", getattr(self, name), 1)
        for name in ("intermediate_size", "num_heads", "num_kv_heads"):
            _at_least(f"model.{name}", getattr(self, name), 1)
        self._check_layers()
        self._check_heads()

    def _check_layers(self) -> None:
        if self.architecture == "transformer":
            _at_least("model.num_layers", self.num_layers, 1)
            return
        _at_least("model.num_core_layers", self.num_core_layers, 1)
        _at_least("model.num_prelude_layers", self.num_prelude_layers, 0)
        _at_least("model.num_coda_layers", self.num_coda_layers, 0)

    def _check_heads(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"model.hidden_size={self.hidden_size} must be divisible by model.num_heads="
                f"{self.num_heads}; use num_heads in {divisors(self.hidden_size)}"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"model.num_heads={self.num_heads} must be divisible by model.num_kv_heads="
                f"{self.num_kv_heads}; use num_kv_heads in {divisors(self.num_heads)}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"model.hidden_size/num_heads={self.head_dim} must be even for the rotary "
                "embedding; change num_heads"
            )
        if self.value_embeddings and self.hidden_size < VALUE_GATE_INPUTS:
            raise ValueError(
                f"model.hidden_size={self.hidden_size} is below the {VALUE_GATE_INPUTS} entries "
                "that value-embedding gates read; use a wider model or value_embeddings: false"
            )

    @property
    def kv_heads(self) -> int:
        """Key/value heads, after the default has been filled in."""
        assert self.num_kv_heads is not None
        return self.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: vocab_size rounded up to vocab_multiple."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def num_stored_layers(self) -> int:
        """Blocks with weights of their own, numbered prelude, core, coda."""
        if self.architecture == "transformer":
            return self.num_layers
        return self.num_prelude_layers + self.num_core_layers + self.num_coda_layers

    @property
    def value_embedding_layers(self) -> tuple[int, ...]:
        """Stored layers that own a value-embedding table: every second one, the last always."""
        if not self.value_embeddings:
            return ()
        last = self.num_stored_layers - 1
        return tuple(i for i in range(last + 1) if (last - i) % 2 == 0)


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """One shard and its share of a blend."""

    prefix: str
    """Path of the `.bin`/`.idx` pair without the extension."""
    weight: float | None = None
    """Share of the drawn samples; null (for all sets at once) means in proportion to size."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from and how they become sequences."""

    train: tuple[DatasetConfig, ...] = ()
    """Training shards."""
    validation: tuple[DatasetConfig, ...] = ()
    """Validation shards; empty takes validation_fraction of the training documents."""
    validation_fraction: float = 0.01
    """Share of the documents held out when no validation shards are given."""
    tokenizer: str | None = None
    """Folder or file of the tokenizer; checked against the shards, exported with the model."""
    packing: Literal["best_fit", "concatenate"] = "best_fit"
    """best_fit: rows start with BOS, documents are cropped to fit. concatenate: one stream."""
    cropped_tail: Literal["reuse", "drop"] = "reuse"
    """What best_fit does with the rest of a cropped document."""
    document_mask: bool = False
    """Attention stays inside a document and positions restart with it."""
    num_epochs: int | None = None
    """Exactly this many passes decide train.num_steps; null repeats the data as often as needed."""
    cache_dir: str | None = None
    """Folder of the packing indices; null is beside the shard."""
    num_workers: int = 1
    """Threads that read and prefetch batches; 0 reads in the training thread."""

    def __post_init__(self) -> None:
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(
                f"data.validation_fraction={self.validation_fraction} must be in [0, 1); "
                "use for example 0.01"
            )
        _at_least("data.num_workers", self.num_workers, 0)
        if self.num_epochs is not None:
            _at_least("data.num_epochs", self.num_epochs, 1)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Update rule (paper, tables 20 and 21, section Q.1)."""

    name: Literal["muon_adamw", "adamw", "adamw_rdm"] = "adamw"
    """muon_adamw: the paper's recipe. adamw_rdm: no epsilon, update clipping (RDM)."""
    lr: float = 8e-3
    """Learning rate of AdamW."""
    betas: tuple[float, float] = (0.8, 0.95)
    """Decay rates of AdamW's two moments."""
    eps: float = 1e-10
    """AdamW's epsilon, outside the root."""
    weight_decay: float = 0.0
    """Decoupled weight decay of AdamW; norms, biases, injection and readout are exempt."""
    muon_lr: float = 8e-3
    """Learning rate of Muon, times sqrt(max(1, rows/columns))."""
    muon_momentum: float = 0.95
    """Muon's momentum after its warm-up from 0.85 over 300 steps."""
    muon_momentum_warmup_steps: int = 300
    """Steps until muon_momentum is reached; 0 starts with it."""
    muon_weight_decay: float = 0.2
    """Cautious weight decay of Muon, linear to 0 over the run."""
    muon_dtype: Literal["bf16", "fp32"] = "bf16"
    """Arithmetic of the orthogonalisation."""
    grad_clip: float = 1.0
    """Largest global gradient norm; 0 is off."""

    def __post_init__(self) -> None:
        for name in ("lr", "muon_lr", "weight_decay", "muon_weight_decay", "grad_clip", "eps"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"optimizer.{name}={getattr(self, name)} must not be negative; 0 is off"
                )
        for name, value in (
            *zip(("betas[0]", "betas[1]"), self.betas, strict=True),
            ("muon_momentum", self.muon_momentum),
        ):
            if not 0 <= value < 1:
                raise ValueError(
                    f"optimizer.{name}={value} must be in [0, 1); use for example 0.95"
                )


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate over the run, as a factor of the optimizer's rates."""

    kind: Literal["constant", "linear", "cosine", "trapezoid"] = "trapezoid"
    """trapezoid: warm-up, constant, linear cool-down. linear and cosine fall after the warm-up."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0."""
    cooldown_steps: int | None = None
    """Steps of trapezoid's cool-down; null takes cooldown_fraction."""
    cooldown_fraction: float = 0.5
    """Share of the run that is cool-down."""
    min_factor: float = 0.0
    """Factor at the last step."""

    def __post_init__(self) -> None:
        _at_least("schedule.warmup_steps", self.warmup_steps, 0)
        for name in ("cooldown_fraction", "min_factor"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"schedule.{name}={getattr(self, name)} must be in [0, 1]")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length, batch and precision of the run."""

    num_steps: int = 1000
    """Optimizer steps of the whole run."""
    global_batch_size: int | None = None
    """Sequences per optimizer step = micro_batch_size x gradient_accumulation_steps x DP."""
    micro_batch_size: int | None = None
    """Sequences per rank and forward pass; give any two of the three."""
    gradient_accumulation_steps: int | None = None
    """Micro-batches per rank and optimizer step."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """bf16: fp32 weights, bf16 matrix products (autocast)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes CUDA when there is a GPU."""
    seed: int = 42
    """Everything random is a function of this seed, a name or a sample id, and the step."""
    deterministic: bool = False
    """Bit-reproducible kernels only, at a cost."""
    compile: bool = False
    """torch.compile of the blocks, about a dozen versions for all row counts. Needs a C++ compiler
    on CPU; worth it in long runs, since the versions take minutes to make."""
    max_skipped_steps: int = 10
    """Skipped steps in a row that are tolerated; one more stops the run."""
    loss_spike: Literal["warn", "skip", "roll_back"] = "warn"
    """A loss far above the recent ones: warn says so, skip leaves its update out, roll_back returns
    to the weights of the last checkpoint. Steps, schedule and data go on in every case."""
    loss_spike_zscore: float = 6.0
    """Robust standard deviations above the median of the recent losses that make a spike."""
    loss_spike_window: int = 64
    """Recent losses to compare with; nothing is a spike before half of them are known."""
    exit_after: float | None = None
    """Minutes after which the run saves and stops with code 75, to be started again; null is off.
    A Slurm job's end is known without it."""
    hang_factor: float = 20.0
    """A step (validation, save) that takes this many times the median of those before it is a hang:
    every rank shows what it is doing, and the run ends; 0 is off."""
    hang_min_seconds: float = 600.0
    """Nothing shorter is a hang; what was never done before is given six times as much."""
    replica_check_interval: int = 1000
    """Steps between comparisons of the weights that several ranks hold; 0 is off."""

    def __post_init__(self) -> None:
        _at_least("train.num_steps", self.num_steps, 1)
        for name in ("global_batch_size", "micro_batch_size", "gradient_accumulation_steps"):
            if getattr(self, name) is not None:
                _at_least(f"train.{name}", getattr(self, name), 1)
        _at_least("train.loss_spike_window", self.loss_spike_window, 8)
        _at_least("train.replica_check_interval", self.replica_check_interval, 0)
        if self.exit_after is not None and self.exit_after <= 0:
            raise ValueError(
                f"train.exit_after={self.exit_after} must be more than 0 minutes; null is off"
            )
        if self.hang_factor and self.hang_factor < 2:
            raise ValueError(
                f"train.hang_factor={self.hang_factor} would end a run for a slow step; use 2 or "
                "more, or 0 for no such watch"
            )
        if self.hang_min_seconds <= 0:
            raise ValueError(
                f"train.hang_min_seconds={self.hang_min_seconds} must be positive; to switch the "
                "watch off, set train.hang_factor to 0"
            )
        if self.loss_spike_zscore <= 0:
            raise ValueError(
                f"train.loss_spike_zscore={self.loss_spike_zscore} must be positive; use for "
                "example 6, or a large number to see no spikes"
            )


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Validation loss at fixed depths, over a fixed number of sequences."""

    interval: int = 100
    """Steps between validations; 0 is off."""
    num_sequences: int = 64
    """Sequences of every validation, whatever the batch or layout."""
    num_loops: tuple[int, ...] = (1, 2, 4, 8)
    """Depths T at which the loss is taken (looped only)."""

    def __post_init__(self) -> None:
        _at_least("validation.interval", self.interval, 0)
        _at_least("validation.num_sequences", self.num_sequences, 1)
        for loops in self.num_loops:
            _at_least("validation.num_loops", loops, 1)


Recompute = Literal["none", "block", "loop", "selective"]
REPEATS_BLOCKS = ("block", "loop")
"""Activation checkpointing that runs whole blocks a second time."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How one model becomes many processes; none of it changes the result."""

    tp: int = 1
    """Tensor-parallel ranks; consecutive ranks, so that they share a node."""
    sequence_parallel: bool = False
    """Split norms, injection and residual stream along the sequence over the tp ranks."""
    pp: int = 1
    """Pipeline stages."""
    pipeline_layout: str = "balanced"
    """balanced: borders at equal expected cost. Or one entry per stage, such as
    "prelude | core | coda" or "embedding,prelude:0-1 | core:0.5 | core:0.5,coda,head"."""
    deal: Literal["none", "balanced"] = "balanced"
    """Assign the samples of a step to ranks and micro-batches so that all carry equal loop work."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """0: our sharded optimizer (states sharded over DP). 1, 2, 3: DeepSpeed's ZeRO (AdamW only)."""
    deepspeed_config: str | None = None
    """DeepSpeed JSON; null takes ds_configs/zero{zero_stage}.json."""
    recompute_prelude: Literal["none", "block", "selective"] = "none"
    """Activation checkpointing of the prelude: none, block, or attention only (selective)."""
    recompute_core: Recompute = "none"
    """Activation checkpointing of the loop: none, block, loop (all blocks at once), selective."""
    recompute_coda: Literal["none", "block", "selective"] = "none"
    """Activation checkpointing of the coda."""

    def __post_init__(self) -> None:
        _at_least("parallel.tp", self.tp, 1)
        _at_least("parallel.pp", self.pp, 1)
        if self.zero_stage >= 2 and self.pp > 1:
            raise ValueError(
                f"parallel.zero_stage={self.zero_stage} can't be combined with parallel.pp="
                f"{self.pp}: DeepSpeed shards gradients only without a pipeline; use zero_stage "
                "0 or 1, or pp 1"
            )

    @property
    def repeats_core(self) -> bool:
        """Whether checkpointing computes loops with gradient twice; `selective` repeats little."""
        return self.recompute_core in REPEATS_BLOCKS


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When and where the run is saved."""

    dir: str = "runs/default"
    """Folder of the run: checkpoints, config.yaml, log.jsonl."""
    interval: int = 500
    """Steps between checkpoints; 0 saves at the end only."""
    keep: int = 3
    """Newest checkpoints that are kept; 0 keeps all."""
    keep_every: int = 0
    """Keep every checkpoint whose step is a multiple of this; 0 is off."""
    keep_best: int = 0
    """Keep this many with the lowest validation loss (at the best depth); 0 is off. It needs saves
    at steps that are validated."""
    asynchronous: bool = True
    """Train on while a checkpoint is written, from a copy in host memory."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: continue from the newest complete checkpoint when there is one."""
    init_from: str | None = None
    """Checkpoint folder whose weights a new run starts from, without its optimizer states."""
    override_schedule: bool = False
    """Resume with changed optimizer or schedule options; otherwise a difference is an error."""

    def __post_init__(self) -> None:
        for name in ("interval", "keep", "keep_every", "keep_best"):
            _at_least(f"checkpoint.{name}", getattr(self, name), 0)


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is written about the run; log.jsonl always."""

    interval: int = 1
    """Steps between console lines; 0 is off."""
    health_interval: int = 50
    """Steps between loop-health records; 0 is off. A record costs 4% of a step of the preset tiny
    on a CPU, so less than 0.1% at 50."""
    wandb_project: str | None = None
    """Weights & Biases project; null is off."""
    tensorboard_dir: str | None = None
    """Folder of TensorBoard events; null is off."""
    peak_tflops: float | None = None
    """Peak of one device for MFU; null looks well-known devices up."""

    def __post_init__(self) -> None:
        _at_least("log.interval", self.interval, 0)
        _at_least("log.health_interval", self.health_interval, 0)


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Traces of single steps, written to `profile/` in the folder of the run."""

    steps: tuple[int, ...] = ()
    """Steps to trace, with the numbers of the log; leave the first ones out, which warm up."""

    def __post_init__(self) -> None:
        for step in self.steps:
            _at_least("profile.steps", step, 1)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run: the root of every YAML in launch/configs."""

    name: str = "default"
    """Name of the run in logs."""
    preset: str | None = None
    """Model preset that `model` starts from; see presets.py."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    def __post_init__(self) -> None:
        tp = self.parallel.tp
        for name, value in (
            ("num_heads", self.model.num_heads),
            ("num_kv_heads", self.model.kv_heads),
            ("intermediate_size", self.model.intermediate_size),
        ):
            if value % tp:
                raise ValueError(
                    f"model.{name}={value} must be divisible by parallel.tp={tp}; "
                    f"use tp in {divisors(value)}"
                )
        if self.model.padded_vocab_size % tp:
            raise ValueError(
                f"the padded vocabulary {self.model.padded_vocab_size} must be divisible by "
                f"parallel.tp={tp}; set model.vocab_multiple to a multiple of {tp}"
            )
        if self.parallel.sequence_parallel and self.model.sequence_length % tp:
            raise ValueError(
                f"model.sequence_length={self.model.sequence_length} must be divisible by "
                f"parallel.tp={tp} for sequence parallelism; change either"
            )
        if self.train.loss_spike == "roll_back" and not self.checkpoint.interval:
            raise ValueError(
                "train.loss_spike='roll_back' needs checkpoints to return to, but "
                "checkpoint.interval=0 saves at the end only; set an interval, or use skip"
            )
        if self.data.num_epochs is None and max(self.profile.steps, default=0) > (
            self.train.num_steps
        ):
            raise ValueError(
                f"profile.steps={list(self.profile.steps)} goes beyond train.num_steps="
                f"{self.train.num_steps}; name steps that the run makes"
            )
        if self.train.compile and (self.parallel.zero_stage == 3 or tp > 1):
            raise ValueError(
                f"train.compile=true can't be combined with parallel.tp={tp} and zero_stage="
                f"{self.parallel.zero_stage}: blocks that communicate inside were not compiled "
                "within minutes; use tp 1 and zero_stage 0, 1 or 2, or compile=false"
            )
        if self.parallel.zero_stage and self.optimizer.name != "adamw":
            raise ValueError(
                f"optimizer.name={self.optimizer.name!r} needs whole matrices, which parallel."
                f"zero_stage={self.parallel.zero_stage} flattens; use zero_stage 0 (its optimizer "
                "states are sharded too) or optimizer.name adamw"
            )


def divisors(value: int) -> list[int]:
    """All divisors, ascending: the remedy of many messages."""
    return [i for i in range(1, value + 1) if value % i == 0]


def _at_least(option: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{option}={value} must be at least {least}")
