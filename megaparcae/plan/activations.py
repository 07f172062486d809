"""What the backward pass keeps of a forward pass, in bytes per token. No torch.

Counted from the model's code, tensor by tensor; a test compares a real step's allocations. Under
bf16 the residual stream and the state stay fp32, matrix products take and give bf16. Tensors inside
attention and MLP shrink with tp; those on the residual stream only with sequence parallelism.
"""

# d width, S positions, H query heads, V padded vocabulary, d_ff inner width
from __future__ import annotations

from dataclasses import dataclass

from megaparcae.config.schema import REPEATS_BLOCKS, ModelConfig, RunConfig

FP32 = 4
CHUNK = 1024
"""Tokens whose logits the loss holds at a time (`ops.cross_entropy.LMLoss`)."""


@dataclass(frozen=True)
class Activations:
    """Bytes per token of one rank."""

    model: ModelConfig
    tp: int
    product: int
    """Bytes of an entry of a matrix product: 2 under bf16, 4 in fp32."""
    outside: float
    """Share of the residual stream that this rank has: 1/tp under sequence parallelism."""
    masked: bool
    """Documents are masked: attention keeps a bias of S entries per token."""

    @staticmethod
    def of(config: RunConfig) -> Activations:
        """For a run's precision and layout."""
        parallel = config.parallel
        return Activations(
            model=config.model,
            tp=parallel.tp,
            product=2 if config.train.precision == "bf16" else FP32,
            outside=1 / parallel.tp if parallel.sequence_parallel else 1.0,
            masked=config.data.document_mask,
        )

    @property
    def stream(self) -> float:
        """The residual stream, the looped state or e."""
        return FP32 * self.model.hidden_size * self.outside

    @property
    def operand(self) -> float:
        """A matrix product's input of width d; sequence parallelism has gathered it."""
        return self.product * self.model.hidden_size

    @property
    def local_operand(self) -> float:
        """The same outside attention and MLP, where nothing is gathered."""
        return self.operand * self.outside

    @property
    def cast(self) -> float:
        """A copy of the stream in the type of the products, when that is another."""
        return 0.0 if self.product == FP32 else self.local_operand

    @property
    def widths(self) -> tuple[int, int]:
        """Of all queries, and of all keys."""
        model = self.model
        return model.num_heads * model.head_dim, model.kv_heads * model.head_dim

    def attention(self, layer: int) -> float:
        """The attention branch, without the stream that enters it; a norm keeps only its input."""
        model, p = self.model, self.product
        q, kv = self.widths
        gated = layer in model.value_embedding_layers
        # Without a gate v is a piece of the product of q, k and v, and keeps it alive.
        values = kv if gated or model.clip_qkv is not None else q + 2 * kv
        clipped = q + 2 * kv if model.clip_qkv is not None else 0
        table = kv if gated and layer not in self.core_layers else 0
        heads = p * (q + kv + values + clipped + table + q)  # q and k, v, out
        log_sums = FP32 * (model.num_heads + (model.num_heads + model.kv_heads) * model.qk_norm)
        bias = p * model.sequence_length if self.masked else 0
        return self.operand + (heads + log_sums) / self.tp + bias

    def mlp(self) -> float:
        """The MLP branch with the sum that enters it."""
        inner = (4 if self.model.mlp == "swiglu" else 2) * self.model.intermediate_size
        return self.stream + self.operand + self.product * inner / self.tp

    def block(self, layer: int, recompute: str) -> float:
        """One application of a stored layer, with the stream that enters it."""
        if recompute in REPEATS_BLOCKS:
            return self.stream
        after = 2 * self.stream if self.model.block == "sandwich" else 0.0
        attention = 0.0 if recompute == "selective" else self.attention(layer)
        return self.stream + attention + self.mlp() + after

    def loop(self, recompute: str) -> float:
        """One loop of the core with gradient."""
        if recompute == "loop":
            return self.stream
        blocks = sum(self.block(layer, recompute) for layer in self.core_layers)
        match self.model.injection:
            case "diagonal":
                return blocks + self.stream
            case "linear":
                return blocks + self.local_operand
            case _:
                return blocks

    def shared(self) -> float:
        """What all loops of a micro-batch share: e, its term of the injection, table rows."""
        model = self.model
        e = self.stream * (1 + model.prelude_norm)
        term = 0.0
        if model.injection != "additive":
            term = self.cast + self.stream + self.local_operand * (model.injection == "diagonal")
        tables = sum(layer in model.value_embedding_layers for layer in self.core_layers)
        return e + term + tables * self.product * self.widths[1] / self.tp

    @property
    def core_layers(self) -> range:
        """Stored layers of the core."""
        if self.model.architecture == "transformer":
            return range(0)
        first = self.model.num_prelude_layers
        return range(first, first + self.model.num_core_layers)

    def head(self) -> float:
        """Final norm and loss: input, operand and its gradient, made in the forward pass."""
        return self.stream + 2 * self.operand

    def loss(self, tokens: int) -> float:
        """Bytes, not per token: logits of a chunk, the head's gradient and a product beside it."""
        model, p = self.model, self.product
        rows = model.padded_vocab_size / self.tp
        entry = FP32 + (p if p < FP32 else 0) + FP32 * (model.logit_softcap is not None)
        weight = FP32 + p + (p if p < FP32 else 0)
        return rows * (min(tokens, CHUNK) * entry + model.hidden_size * weight)

    def passing(self) -> float:
        """Temporaries of a block's backward pass: the gradients of its output and widest tensor."""
        return self.stream + self.product * self.model.intermediate_size / self.tp
