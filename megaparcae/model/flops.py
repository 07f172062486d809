"""What a model costs: parameters by part and FLOPs in two conventions. No torch.

* The authors' convention compares with the paper: 6 FLOPs per parameter and token, value-embedding
  tables counted as if they were multiplied, the head not, attention without causal discount.
* Ours counts the matrix products of the model as it runs, for the depths that were drawn. `needed`
  is what the mathematics asks for (model FLOPs, for MFU); `executed` adds what is computed twice:
  activation checkpointing, and the scores that fused attention computes again in its backward pass.

A multiply-add is two FLOPs.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from megaparcae.config.schema import VALUE_GATE_INPUTS, ModelConfig, ParallelConfig
from megaparcae.model.expected_depth import expected_loops as expected_loops  # for scaling too

# d width, S positions, H query heads, G key/value heads, hd head width


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Number of parameters of each part; a tied head counts once, as the embedding."""

    embedding: int
    value_embeddings: int
    prelude: int
    """A fixed-depth Transformer's whole stack is its prelude."""
    core: int
    coda: int
    injection: int
    readout: int
    norms: int
    """Prelude norm and final norm."""
    head: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(astuple(self))


def count_parameters(config: ModelConfig) -> Parameters:
    """Closed form; equal to the built model."""
    d, prelude, core, coda = config.hidden_size, *_sections(config)
    looped = config.architecture == "looped"
    table = config.padded_vocab_size * config.kv_heads * config.head_dim
    injection = {"diagonal": d * d + 2 * d, "linear": 2 * d * d, "additive": 0}[config.injection]
    return Parameters(
        embedding=config.padded_vocab_size * d,
        value_embeddings=len(config.value_embedding_layers) * table,
        prelude=sum(_block_parameters(config, layer) for layer in prelude),
        core=sum(_block_parameters(config, layer) for layer in core),
        coda=sum(_block_parameters(config, layer) for layer in coda),
        injection=injection if looped else 0,
        readout=d * d if looped and config.readout else 0,
        norms=d * (1 + (looped and config.prelude_norm)),
        head=0 if config.tie_embeddings else config.padded_vocab_size * d,
    )


def unrolled_params(config: ModelConfig) -> int:
    """N(mu) of the scaling law: the core counted once per loop at mean recurrence."""
    count = count_parameters(config)
    if config.architecture == "transformer":
        return count.total
    return count.total + (config.recurrence.mean_recurrence - 1) * count.core


def authors_flops_per_token(config: ModelConfig, *, head_not_tables: bool = False) -> int:
    """Training FLOPs per token by the authors' counter.

    `head_not_tables` multiplies the head instead of the value-embedding tables, as it should be.
    """
    count = count_parameters(config)
    prelude, core, coda = _sections(config)
    attention = 4 * config.num_heads * config.head_dim * config.sequence_length
    multiplied = count.total - count.embedding - count.core
    if head_not_tables:
        multiplied += count.embedding * config.tie_embeddings - count.value_embeddings
    core_forward = 2 * count.core + len(core) * attention
    loops = config.recurrence.mean_recurrence + 2 * config.recurrence.num_grad_loops
    return 6 * multiplied + 3 * (len(prelude) + len(coda)) * attention + loops * core_forward


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Activation checkpointing of each section, as in `parallel.recompute_*`."""

    prelude: str = "none"
    core: str = "none"
    coda: str = "none"

    @classmethod
    def of(cls, parallel: ParallelConfig) -> Recompute:
        """That of a run."""
        return cls(
            prelude=parallel.recompute_prelude,
            core=parallel.recompute_core,
            coda=parallel.recompute_coda,
        )


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs of training, forward and backward, by where they are spent."""

    prelude: float
    core_no_grad: float
    """Loops without gradient."""
    core_grad: float
    """Loops with gradient."""
    coda: float
    head: float
    projections: float
    """d x d matrices outside the blocks: what e contributes to the injection, and the readout."""

    @property
    def total(self) -> float:
        """All of them."""
        return sum(astuple(self))


def step_flops(
    config: ModelConfig,
    *,
    rows_no_grad: float,
    rows_grad: float,
    rows: float,
    sequence_length: int,
    executed: Recompute | None = None,
    causal: bool = True,
) -> Flops:
    """FLOPs of `rows` sequences with sum(n_i) = rows_no_grad and sum(k_i) = rows_grad loops.

    `executed` None counts what is needed; otherwise what this checkpointing executes. `causal`
    leaves out the half of the attention scores that the mask hides.
    """
    run = _Run(config, sequence_length, executed, causal)
    modes = executed or Recompute()
    prelude, core, coda = _sections(config)
    d, tokens = config.hidden_size, rows * sequence_length
    outside = 0.0
    if config.architecture == "looped":
        outside = 6.0 * d * d * (config.readout + (config.injection != "additive"))
    loop = 2.0 * d * d * (config.injection == "linear")  # W h, once per loop
    loop_again = loop if modes.core == "loop" else 0.0
    no_grad = loop + sum(run.forward(layer) for layer in core)
    with_grad = 3 * loop + loop_again + run.section(core, modes.core)
    return Flops(
        prelude=tokens * run.section(prelude, modes.prelude),
        core_no_grad=rows_no_grad * sequence_length * no_grad if core else 0.0,
        core_grad=rows_grad * sequence_length * with_grad if core else 0.0,
        coda=tokens * run.section(coda, modes.coda),
        head=tokens * 6.0 * d * config.padded_vocab_size,
        projections=tokens * outside,
    )


def needed_flops(
    config: ModelConfig, rows_no_grad: float, rows_grad: float, rows: float, sequence_length: int
) -> float:
    """Model FLOPs of a training step for the depths that were drawn (see `step_flops`)."""
    return step_flops(
        config,
        rows_no_grad=rows_no_grad,
        rows_grad=rows_grad,
        rows=rows,
        sequence_length=sequence_length,
    ).total


def expected_flops(
    config: ModelConfig, *, executed: Recompute | None = None, causal: bool = True
) -> Flops:
    """FLOPs per token at the sampler's expected depths (see `step_flops`)."""
    no_grad, grad = expected_loops(config.recurrence)
    per_token = 1 / config.sequence_length
    return step_flops(
        config,
        rows_no_grad=no_grad * per_token,
        rows_grad=grad * per_token,
        rows=per_token,
        sequence_length=config.sequence_length,
        executed=executed,
        causal=causal,
    )


def hardware_flops_per_token(config: ModelConfig, recompute: Recompute | None = None) -> float:
    """Training FLOPs per token executed at expected depth, with the causal discount."""
    return expected_flops(config, executed=recompute or Recompute()).total


def _sections(config: ModelConfig) -> tuple[range, range, range]:
    """Stored layers of prelude, core and coda."""
    if config.architecture == "transformer":
        return range(config.num_layers), range(0), range(0)
    p, r = config.num_prelude_layers, config.num_core_layers
    return range(p), range(p, p + r), range(p + r, config.num_stored_layers)


def _attention_weights(config: ModelConfig, layer: int) -> int:
    """Entries of the matrices before the scores: q, k, v and the gate."""
    d, hd = config.hidden_size, config.head_dim
    gated = layer in config.value_embedding_layers
    gate = VALUE_GATE_INPUTS * config.kv_heads * gated
    return d * hd * (config.num_heads + 2 * config.kv_heads) + gate


def _inner_matrices(config: ModelConfig) -> int:
    """Matrices [d_ff, d] before the MLP's last."""
    return 2 if config.mlp == "swiglu" else 1


def _block_parameters(config: ModelConfig, layer: int) -> int:
    d, hd = config.hidden_size, config.head_dim
    norms = 4 if config.block == "sandwich" else 2
    biases = hd * (config.num_heads + config.kv_heads) * config.qk_bias
    matrices = _attention_weights(config, layer) + config.num_heads * hd * d
    return (
        matrices + (_inner_matrices(config) + 1) * d * config.intermediate_size + norms * d + biases
    )


@dataclass(frozen=True)
class _Run:
    """FLOPs per token of blocks, as they run."""

    config: ModelConfig
    sequence_length: int
    executed: Recompute | None
    causal: bool

    def forward(self, layer: int) -> float:
        """One block's forward pass."""
        return self.attend(layer) + self.output() + self.mlp()

    def section(self, layers: range, recompute: str) -> float:
        """Forward, backward and recomputation of some blocks."""
        once = sum(self.forward(layer) for layer in layers)
        score_again = 0.5 * self.scores() if self.executed else 0.0
        return 3 * once + len(layers) * score_again + self.again(layers, recompute)

    def again(self, layers: range, recompute: str) -> float:
        """What checkpointing computes a second time.

        It stops as soon as the last tensor that the backward pass needs is there: the product that
        ends the piece is not computed again, unless a norm follows it.
        """
        once = sum(self.forward(layer) for layer in layers)
        last = self.down() if self.config.block == "pre_norm" else 0.0
        match recompute:
            case "none":
                return 0.0
            case "block":
                return once - len(layers) * last
            case "loop":
                return once - last
            case "selective":
                return sum(self.attend(layer) for layer in layers)
            case other:
                raise ValueError(f"recompute={other!r}: choose none, block, loop or selective")

    def attend(self, layer: int) -> float:
        """Attention before its output projection."""
        return 2.0 * _attention_weights(self.config, layer) + self.scores()

    def scores(self) -> float:
        """q k^T and its product with v; position s looks at s + 1 positions when causal."""
        seen = (self.sequence_length + 1) / 2 if self.causal else self.sequence_length
        return 4.0 * self.config.num_heads * self.config.head_dim * seen

    def output(self) -> float:
        """Attention's output projection."""
        return 2.0 * self.config.num_heads * self.config.head_dim * self.config.hidden_size

    def down(self) -> float:
        """The MLP's last product."""
        return 2.0 * self.config.hidden_size * self.config.intermediate_size

    def mlp(self) -> float:
        """All of the MLP."""
        return self.down() * (1 + _inner_matrices(self.config))
