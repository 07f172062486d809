"""Memory of one rank, by what it is for. No torch.

The peak of a step is the largest of three moments: the end of a forward pass, when everything is
kept and the loss runs; the first piece that is recomputed in the backward pass; the update.
"""

# N parameters of a rank (of its stage and tensor-parallel slice), D data-parallel ranks
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import prod

from megaparcae.config.batch import BatchPlan
from megaparcae.config.layout import Part
from megaparcae.config.schema import REPEATS_BLOCKS, RunConfig
from megaparcae.engine.ds_config import config_path, read_options
from megaparcae.parallel.ownership import Item, assign_owners
from megaparcae.parallel.stages import Stage
from megaparcae.plan.activations import FP32, Activations

MATRIX_BATCH = 1 << 26
"""Elements that Muon works on at once (`parallel.sharded_optimizer`)."""
MUON_BYTES = 20
"""Muon's temporaries per element: look-ahead, direction, change, weights and one product."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of the fullest moment of a step."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    """Kept for the backward pass of one micro-batch."""
    in_flight: float
    """The same of the further micro-batches that a pipeline stage has begun."""
    loss: float
    working: float
    """Temporaries of the backward pass, or of the update when that is the fuller moment."""

    @property
    def total(self) -> float:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class States:
    """What lies there from step to step, in bytes."""

    weights: float
    gradients: float
    """When all are there."""
    buckets: float
    """Of these, what is there when the first is made."""
    optimizer: float
    update: float
    """Temporaries of the update."""
    moved: float
    """Elements that are reduced, and gathered again, over the data-parallel ranks."""
    owned: float
    """Elements that the busiest owner updates."""
    matrices: float
    """Of these, elements of Muon's matrices."""
    muon_flops: float
    """FLOPs of its orthogonalisations."""
    tied: float
    """Elements that other stages hold too."""


def all_states(config: RunConfig, items: Sequence[Sequence[Item]], dp: int) -> list[States]:
    """Weights, gradients and optimizer states of each stage's fullest data-parallel rank."""
    if config.parallel.zero_stage == 0:
        held: list[list[tuple[Item, int]]] = [[] for _ in items]
        for item, owner in assign_owners(items, dp):
            for stage in item.spec.stages:
                held[stage].append((item, owner))
        return [_sharded(mine, owned, dp) for mine, owned in zip(items, held, strict=True)]
    return [_zero(config, items, stage, dp) for stage in range(len(items))]


def _zero(config: RunConfig, items: Sequence[Sequence[Item]], stage: int, dp: int) -> States:
    """DeepSpeed's ZeRO 1 to 3 under fp32 weights."""
    local = sum(prod(item.spec.local_shape) for item in items[stage])
    bucket, live = _bucket_sizes(config)
    match config.parallel.zero_stage:
        case 1:  # weights, and this rank's master copy
            weights, gradients = local + local / dp, local + local / dp
        case 2:
            weights, gradients = local + local / dp, local / dp
        case _:  # gathered weights, slices of all, and the master copy
            weights, gradients = min(local, live) + 2 * local / dp, local / dp
    return States(
        weights=FP32 * weights,
        gradients=FP32 * (gradients + bucket),
        buckets=FP32 * bucket,
        optimizer=2 * FP32 * local / dp,
        update=FP32 * local / dp,
        moved=local,
        owned=local / dp,
        matrices=0.0,
        muon_flops=0.0,
        tied=_tied(items[stage]),
    )


def _bucket_sizes(config: RunConfig) -> tuple[int, int]:
    """Elements of DeepSpeed's reduction buckets, and most parameters that ZeRO-3 keeps gathered.

    Buckets are allocated as a whole; under ZeRO-2 one fills while the other is reduced.
    """
    options = read_options(config_path(config.parallel))["zero_optimization"]
    overlapped = config.parallel.zero_stage == 2 and options.get("overlap_comm", False)
    bucket = int(options.get("reduce_bucket_size", 500_000_000))
    return bucket * (1 + overlapped), int(options.get("stage3_max_live_parameters", 1e9))


def _tied(items: Sequence[Item]) -> int:
    """Elements that other stages hold too."""
    return sum(prod(item.spec.local_shape) for item in items if len(item.spec.stages) > 1)


def _sharded(items: Sequence[Item], owned: Sequence[tuple[Item, int]], dp: int) -> States:
    """Our optimizer: a flat buffer of all gradients, states of the owned pieces only.

    `owned` are the stage's parameters, or rows of them, with their owners.
    """
    local = sum(prod(item.spec.local_shape) for item in items)
    cut = {item.spec.name for item, _ in owned if item.spec.rows is not None}
    tables = sum(prod(item.spec.local_shape) for item in items if item.spec.name in cut)
    matrices, vectors, flops = ([0.0] * dp for _ in range(3))
    groups: dict[tuple[object, ...], float] = {}  # matrices of one owner and shape
    widest = 0
    for item, owner in owned:
        numel = prod(item.spec.local_shape)
        if item.kind == "adamw":
            vectors[owner] += numel
            continue
        matrices[owner] += numel
        flops[owner] += _muon_flops(*item.spec.full_shape)
        whole = prod(item.spec.full_shape)
        widest = max(widest, whole)
        key = (owner, item.spec.stages, item.spec.local_shape, item.spec.dim)
        groups[key] = groups.get(key, 0.0) + whole
    batch = min(max(groups.values(), default=0.0), max(MATRIX_BATCH, widest))
    segment = max(m + v for m, v in zip(matrices, vectors, strict=True))
    return States(
        weights=FP32 * local,
        gradients=FP32 * (dp * segment + tables),
        buckets=FP32 * dp * segment,
        optimizer=FP32 * max(m + 2 * v for m, v in zip(matrices, vectors, strict=True)),
        update=MUON_BYTES * batch,
        moved=dp * segment,
        owned=segment,
        matrices=max(matrices),
        muon_flops=max(flops),
        tied=_tied(items),
    )


def _muon_flops(rows: int, columns: int) -> float:
    """Five iterations of two products with the matrix and one of its smaller side squared."""
    least = min(rows, columns)
    return 5.0 * (4 * rows * columns * least + 2 * least**3)


def peak_memory(
    config: RunConfig,
    batch: BatchPlan,
    stages: Sequence[Stage],
    items: Sequence[Sequence[Item]],
    stage: int,
    *,
    states: States,
    grad_units: float,
) -> Memory:
    """The fullest moment of one rank of a stage.

    `grad_units`: rows times core blocks with gradient on this stage, of the deepest micro-batch.
    """
    kept = _Kept(config, batch, stages[stage].part, items[stage], grad_units)
    ahead = min(len(stages) - stage, batch.accumulation) - 1
    waiting = ahead * (sum(kept.sections()) + kept.casts() + kept.carry())
    waiting += 2 * kept.carry() * (len(stages) > 1)
    # DeepSpeed's ZeRO 1 and 2 have no gradients before the first backward pass of a step.
    early = config.parallel.zero_stage in (1, 2) and batch.accumulation == 1
    before, during = (0.0, states.buckets) if early else (states.gradients,) * 2
    moments = [(before, *kept.after_forward(), waiting)]
    moments += [(during, *moment, waiting) for moment in kept.in_backward()]
    moments.append((states.gradients, 0.0, 0.0, states.update, 0.0))
    gradients, activations, loss, working, in_flight = max(moments, key=sum)
    return Memory(
        weights=states.weights,
        gradients=gradients,
        optimizer=states.optimizer,
        activations=activations,
        in_flight=in_flight,
        loss=loss,
        working=working,
    )


Moment = tuple[float, float, float]
"""Bytes kept for the backward pass, of the loss, and of temporaries."""


@dataclass(frozen=True)
class _Kept:
    """What a stage keeps of one micro-batch."""

    config: RunConfig
    batch: BatchPlan
    part: Part
    items: Sequence[Item]
    grad_units: float

    @property
    def per_token(self) -> Activations:
        return Activations.of(self.config)

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.batch.micro_batch * self.config.model.sequence_length

    @property
    def tied_head(self) -> float:
        """The gradient of a tied head waits for the embedding's."""
        both = self.part.embedding and self.part.head and self.config.model.tie_embeddings
        return FP32 * self._numel("embedding.") * both

    def sections(self) -> tuple[float, float, float, float]:
        """Prelude, loop, coda, head."""
        a, part, parallel = self.per_token, self.part, self.config.parallel
        prelude = sum(a.block(layer, parallel.recompute_prelude) for layer in part.prelude)
        coda = sum(a.block(layer, parallel.recompute_coda) for layer in self._coda_layers())
        around = 0.0
        if part.loop is not None:
            around = a.shared() + a.local_operand * (part.ends_loop and self.config.model.readout)
        length = self.config.model.sequence_length
        loop = self.tokens * around
        if self.grad_units:
            per_unit = a.loop(parallel.recompute_core) / len(a.core_layers)
            loop += length * self.grad_units * per_unit
        head = a.head() * part.head
        return self.tokens * prelude, loop, self.tokens * coda, self.tokens * head

    def after_forward(self) -> Moment:
        """Everything is kept, and the loss runs."""
        loss = self.per_token.loss(self.tokens) if self.part.head else 0.0
        return sum(self.sections()) + self.casts(), loss, 0.0

    def in_backward(self) -> list[Moment]:
        """When each section begins its backward pass; those behind it are gone."""
        a, parallel = self.per_token, self.config.parallel
        prelude, loop, coda, _ = self.sections()
        passing = self.tokens * a.passing()
        moments = []
        if self.part.coda:
            again = self._again(self._coda_layers(), parallel.recompute_coda)
            moments.append((prelude + loop + coda, again + passing))
        if self.grad_units:
            again = self._again(a.core_layers, parallel.recompute_core)
            summed = a.product * self._numel("core.")  # over the loops
            moments.append((prelude + loop, again + passing + summed))
        if self.part.prelude:
            again = self._again(self.part.prelude, parallel.recompute_prelude)
            moments.append((prelude, again + passing))
        casts = self.casts(backward=True)
        return [(kept + casts, 0.0, work + self.tied_head) for kept, work in moments]

    def casts(self, backward: bool = False) -> float:
        """q, k and v as one matrix, and other matrices in the type of the products if that is bf16.

        Those of pieces that are computed again are made again.
        """
        p, parallel = self.per_token.product, self.config.parallel
        modes = {
            "prelude.": parallel.recompute_prelude,
            "layers.": parallel.recompute_prelude,
            "core.": parallel.recompute_core,
            "coda.": parallel.recompute_coda,
        }
        total = p * self._numel("injection", "readout") * (p < FP32)
        for section, mode in modes.items():
            if mode == "none" or section == "core.":  # the core's are shared by its loops
                total += p * self._numel(*(f"{letter}_proj" for letter in "qkv"), inside=section)
            if p < FP32 and not (backward and mode in REPEATS_BLOCKS):
                total += p * self._numel("o_proj", "mlp", inside=section)
        return total

    def carry(self) -> float:
        """What crosses a border of the pipeline: the stream, inside the loop with e beside it."""
        inside = self.part.loop is not None
        return self.tokens * self.per_token.stream * (1 + inside)

    def _again(self, layers: Sequence[int], recompute: str) -> float:
        """The piece that checkpointing computes at a time."""
        a = self.per_token
        match recompute:
            case "loop":
                return self.tokens * sum(a.block(layer, "none") for layer in layers)
            case "block":
                return self.tokens * max(a.block(layer, "none") for layer in layers)
            case "selective":
                return self.tokens * max(a.attention(layer) for layer in layers)
            case _:
                return 0.0

    def _coda_layers(self) -> list[int]:
        first = self.config.model.num_prelude_layers + self.config.model.num_core_layers
        return [first + i for i in self.part.coda]

    def _numel(self, *names: str, inside: str = "") -> int:
        """Elements of the local matrices with one of these in their names."""
        return sum(
            prod(item.spec.local_shape)
            for item in self.items
            if item.spec.name.startswith(inside)
            and any(name in item.spec.name for name in names)
            and len(item.spec.full_shape) == 2
        )
