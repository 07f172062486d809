"""The looped language model of the paper, written for one device.

    e = norm(prelude(embed(ids)));  h = h_0
    T times: h = core(inject(h, e))
    logits = head(coda(C h))

Parcae, Huginn/RDM and their mixtures are choices in `ModelConfig`; `parallel` splits what `tp_plan`
declares, and a pipeline stage runs the `Part` it is given.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from megaparcae.config.layout import Part, whole
from megaparcae.config.schema import ModelConfig
from megaparcae.model.batch import Batch
from megaparcae.model.injection import make_injection
from megaparcae.model.language_model import LanguageModel, drop, keep_layers
from megaparcae.model.looped_core import LoopedCore, LoopInputs

# B rows, S positions, d width


class LoopedLM(LanguageModel):
    """Prelude, looped core, coda; one `forward` for training, evaluation and every stage."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        d = config.hidden_size
        p, r, c = config.num_prelude_layers, config.num_core_layers, config.num_coda_layers
        unrolled = p + c + r * config.recurrence.mean_recurrence
        # Registered in the order in which they run: gradients come in the reverse order.
        self.prelude = self.make_blocks(p, first_layer=0, unrolled=unrolled)
        self.prelude_norm = self.make_norm() if config.prelude_norm else nn.Identity()
        self.injection = make_injection(config)
        core = self.make_blocks(r, first_layer=p, unrolled=unrolled)
        self.core = LoopedCore(core, self.work, self.probe)
        self.readout = nn.Linear(d, d, bias=False) if config.readout else nn.Identity()
        self.coda = self.make_blocks(c, first_layer=p + r, unrolled=unrolled)
        self.split_state = nn.Identity()  # a seam: sequence parallelism keeps this rank's positions

    def forward(
        self, batch: Batch, part: Part | None = None, carry: Tensor | None = None
    ) -> Tensor:
        """Logits [B, S, V], or the summed loss when labels are given, or what the next stage needs.

        `carry` is what the stage before returned: the residual stream [B, S, d], or inside the loop
        state and e side by side [B, S, 2d].
        """
        part = part or whole(self.config)
        context = self.context(batch)
        x = self.embed(batch.ids) if part.embedding else carry
        assert x is not None
        for i in part.prelude:
            block = self.prelude[str(i)]
            x = self.run_stored_block(block, i, x, batch, context)
            self.probe.after_block(i, x)
        if part.loop is not None:
            self.probe.next_micro_batch(len(batch.ids))
            h, e = self.enter_loop(x, batch) if part.begins_loop else x.chunk(2, dim=-1)
            assert batch.plan is not None
            rows = self.core_value_rows(batch.ids)
            inputs = LoopInputs(batch.plan, context, rows)
            h = self.core(h, *self.injection(e), inputs=inputs, share=part.loop)
            if not part.ends_loop:
                return torch.cat([h, e], dim=-1)
            x = self.leave_loop(h)
        first = self.config.num_prelude_layers + self.config.num_core_layers
        for i in part.coda:
            block = self.coda[str(i)]
            x = self.run_stored_block(block, first + i, x, batch, context)
        return self.finish(x, batch.labels) if part.head else x

    def enter_loop(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Start state h_0 and the prelude's normalised output e."""
        assert batch.start_state is not None
        e = self.prelude_norm(x)
        return self.split_state(batch.start_state()).type_as(e), e

    def core_value_rows(self, ids: Tensor) -> tuple[Tensor | None, ...]:
        """Value-embedding rows of every core layer: the same in every loop."""
        first = self.config.num_prelude_layers
        layers = range(first, first + self.config.num_core_layers)
        return tuple(self.value_embeddings.rows(layer, ids) for layer in layers)

    def leave_loop(self, h: Tensor) -> Tensor:
        """From the looped state to the coda's input."""
        return self.readout(self.final_norm(h) if self.config.loop_norm else h)

    def set_recompute(self, *, prelude: str, core: str, coda: str) -> None:
        """Activation checkpointing by section."""
        super().set_recompute(prelude=prelude, core=core, coda=coda)
        if isinstance(self.core, LoopedCore):  # else another stage has it
            self.core.recompute = core

    def run_order(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        for module in (*self.prelude.values(), self.core, *self.coda.values()):
            yield module, module
        yield from super().run_order()

    def keep(self, part: Part) -> None:
        """Drop the weights that a pipeline stage running only `part` does not need."""
        config = self.config
        keep_layers(self.prelude, part.prelude)
        keep_layers(self.coda, part.coda)
        core = range(config.num_prelude_layers, config.num_prelude_layers + config.num_core_layers)
        layers = {*part.prelude, *(core.stop + i for i in part.coda)}
        if part.loop is None:
            drop(self, "core")
            drop(self, "injection")
        else:
            layers |= set(core)
        if not part.begins_loop:
            drop(self, "prelude_norm")
        if not part.ends_loop:
            drop(self, "readout")
        looped_norm = config.loop_norm and part.ends_loop
        self.keep_common(part, layers, final_norm=part.head or looped_norm)
