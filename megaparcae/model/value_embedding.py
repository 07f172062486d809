"""Gated token tables whose rows are added to the values of every second stored layer."""

from __future__ import annotations

from torch import Tensor, nn

from megaparcae.config.schema import ModelConfig
from megaparcae.model.precision import as_multiplied


class ValueEmbeddings(nn.ModuleDict):
    """Tables [V, G hd] under the number of their stored layer (prelude, core, coda)."""

    def __init__(self, config: ModelConfig) -> None:
        width = config.kv_heads * config.head_dim
        super().__init__(
            {
                str(layer): nn.Embedding(config.padded_vocab_size, width)
                for layer in config.value_embedding_layers
            }
        )

    def rows(self, layer: int, ids: Tensor) -> Tensor | None:
        """Rows [B, S, G hd] of a layer's table as values are, or None for a layer without one."""
        name = str(layer)
        return as_multiplied(self[name](ids)) if name in self else None
