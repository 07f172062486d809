"""The looped language model of the paper, written for one device.

    e = norm(prelude(embed(ids)));  h = h_0;  T times: h = core(inject(h, e));  logits = head(coda(C h))

Parcae, Huginn/RDM and their mixtures are choices in `ModelConfig`; `parallel` splits what `tp_plan`
declares, and a pipeline stage runs the `Part` it is given.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megaparcae.config.layout import Part, whole
from megaparcae.config.schema import ModelConfig
from megaparcae.model.attention import AttentionContext
from megaparcae.model.batch import Batch
from megaparcae.model.injection import Drive, make_injection
from megaparcae.model.language_model import LanguageModel, keep_layers
from megaparcae.model.loop import run_phase
from megaparcae.model.recompute import checkpointed

# B rows, S positions, d width


@dataclass(frozen=True)
class LoopInputs:
    """What all loops of a micro-batch share; computed once."""

    drive: Drive
    context: AttentionContext
    value_rows: tuple[Tensor | None, ...]
    """Value-embedding rows of each core layer."""

    def detached(self) -> LoopInputs:
        """For the loops without gradient."""
        rows = tuple(None if r is None else r.detach() for r in self.value_rows)
        return LoopInputs(self.drive.detached(), self.context, rows)


class LoopedLM(LanguageModel):
    """Prelude, looped core, coda; one `forward` for training, evaluation and every pipeline stage."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        d = config.hidden_size
        p, r, c = config.num_prelude_layers, config.num_core_layers, config.num_coda_layers
        unrolled = p + c + r * config.recurrence.mean_recurrence
        self.prelude = self.make_blocks(p, first_layer=0, unrolled=unrolled)
        self.core = self.make_blocks(r, first_layer=p, unrolled=unrolled)
        self.coda = self.make_blocks(c, first_layer=p + r, unrolled=unrolled)
        self.prelude_norm = self.make_norm() if config.prelude_norm else nn.Identity()
        self.injection = make_injection(config)
        self.readout = nn.Linear(d, d, bias=False) if config.readout else nn.Identity()
        self.split_state = nn.Identity()  # a seam: sequence parallelism keeps this rank's positions

    def forward(
        self, batch: Batch, part: Part | None = None, carry: Tensor | None = None
    ) -> Tensor:
        """Logits [B, S, V], or the loss when `batch.labels` are given, or what the next stage needs.

        `carry` is what the stage before returned: the residual stream [B, S, d], or inside the loop
        state and e side by side [B, S, 2d].
        """
        part = part or whole(self.config)
        context = self.context(batch)
        x = self.embed(batch.ids) if part.embedding else carry
        assert x is not None
        for i in part.prelude:
            block = self.prelude[str(i)]
            x = self.run_stored_block(block, i, x, batch, context, self.recompute_prelude)
        if part.loop is not None:
            h, e = self.enter_loop(x, batch) if part.begins_loop else x.chunk(2, dim=-1)
            h = self.run_loop(h, e, batch, part.loop, context)
            if not part.ends_loop:
                return torch.cat([h, e], dim=-1)
            x = self.leave_loop(h)
        first = self.config.num_prelude_layers + self.config.num_core_layers
        for i in part.coda:
            block = self.coda[str(i)]
            x = self.run_stored_block(block, first + i, x, batch, context, self.recompute_coda)
        return self.finish(x, batch.labels) if part.head else x

    def enter_loop(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Start state h_0 and the prelude's normalised output e."""
        assert batch.start_state is not None
        e = self.prelude_norm(x)
        return self.split_state(batch.start_state()).type_as(e), e

    def run_loop(
        self,
        h: Tensor,
        e: Tensor,
        batch: Batch,
        share: tuple[float, float],
        context: AttentionContext,
    ) -> Tensor:
        """This part's share of the loops: first those without gradient, then those with."""
        assert batch.plan is not None
        plan, layers = batch.plan, self.config.num_core_layers
        begin, end = (plan.cut(fraction, layers) for fraction in share)
        inputs = LoopInputs(self.injection.prepare(e), context, self.core_value_rows(batch.ids))
        units = plan.no_grad_units(begin, end, layers)
        if units[0] < units[1]:
            with torch.no_grad():
                run = self.loop_runner(inputs.detached())
                h = run_phase(h.detach(), plan.no_grad, *units, layers, run)
            # Autocast caches cast weights; those cached here would carry no gradient.
            torch.clear_autocast_cache()
        units = plan.grad_units(begin, end, layers)
        return run_phase(h, plan.grad, *units, layers, self.loop_runner(inputs))

    def loop_runner(self, inputs: LoopInputs):  # type: ignore[no-untyped-def]  # noqa: ANN201
        """The function that runs (part of) one loop on a prefix of the rows, see `RunBlocks`."""

        def run(h: Tensor, count: int, layers: range) -> Tensor:
            if layers.start == 0:
                h = self.injection(h, inputs.drive.rows(count))
            context = inputs.context.rows(count)
            for i in layers:
                table = inputs.value_rows[i]
                rows = None if table is None else table[:count]
                h = self.apply_block(self.core[str(i)], h, context, rows, self.recompute_core)
            return h

        return lambda *args: checkpointed(self.recompute_core == "loop", run, *args)

    def core_value_rows(self, ids: Tensor) -> tuple[Tensor | None, ...]:
        """Value-embedding rows of every core layer: the same in every loop."""
        first = self.config.num_prelude_layers
        layers = range(first, first + self.config.num_core_layers)
        return tuple(self.value_embeddings.rows(layer, ids) for layer in layers)

    def leave_loop(self, h: Tensor) -> Tensor:
        """From the looped state to the coda's input."""
        return self.readout(self.final_norm(h) if self.config.loop_norm else h)

    def keep(self, part: Part) -> None:
        """Drop the weights that a pipeline stage running only `part` does not need."""
        config = self.config
        keep_layers(self.prelude, part.prelude)
        keep_layers(self.coda, part.coda)
        core = range(config.num_prelude_layers, config.num_prelude_layers + config.num_core_layers)
        layers = {*part.prelude, *(core.stop + i for i in part.coda)}
        if part.loop is None:
            keep_layers(self.core, range(0))
            self.injection = nn.Identity()
        else:
            layers |= set(core)
        if not part.begins_loop:
            self.prelude_norm = nn.Identity()
        if not part.ends_loop:
            self.readout = nn.Identity()
        looped_norm = config.loop_norm and part.ends_loop
        self.keep_common(part, layers, final_norm=part.head or looped_norm)
