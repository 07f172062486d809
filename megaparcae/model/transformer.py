"""The fixed-depth baseline: the same blocks, once each, and no loop."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from megaparcae.config.layout import Part, whole
from megaparcae.config.schema import ModelConfig
from megaparcae.model.batch import Batch
from megaparcae.model.language_model import LanguageModel, keep_layers


class Transformer(LanguageModel):
    """Decoder-only Transformer of `model.num_layers` blocks; a `Part` calls its layers prelude."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.layers = self.make_blocks(config.num_layers, first_layer=0, unrolled=config.num_layers)

    def forward(
        self, batch: Batch, part: Part | None = None, carry: Tensor | None = None
    ) -> Tensor:
        """Logits [B, S, V], the summed loss when labels are given, or the residual stream."""
        part = part or whole(self.config)
        context = self.context(batch)
        x = self.embed(batch.ids) if part.embedding else carry
        assert x is not None
        for i in part.prelude:
            block = self.layers[str(i)]
            x = self.run_stored_block(block, i, x, batch, context)
            self.probe.after_block(i, x)
        return self.finish(x, batch.labels) if part.head else x

    def run_order(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        for block in self.layers.values():
            yield block, block
        yield from super().run_order()

    def keep(self, part: Part) -> None:
        """Drop the weights that a pipeline stage running only `part` does not need."""
        keep_layers(self.layers, part.prelude)
        self.keep_common(part, set(part.prelude), final_norm=part.head)
