"""Which part of a model a pipeline stage runs: the vocabulary that model and parallel share."""

from __future__ import annotations

from dataclasses import dataclass

from megaparcae.config.schema import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Part:
    """A contiguous piece of the model: prelude layers, a fraction of the loop's work, coda layers.

    A fixed-depth Transformer has only `prelude` layers: its whole stack.
    """

    embedding: bool
    prelude: range
    loop: tuple[float, float] | None
    """Share [begin, end] of every micro-batch's own loop work; None when no loop runs here."""
    coda: range
    head: bool

    @property
    def begins_loop(self) -> bool:
        """The start state is drawn here."""
        return self.loop is not None and self.loop[0] == 0.0

    @property
    def ends_loop(self) -> bool:
        """The readout is applied here."""
        return self.loop is not None and self.loop[1] == 1.0


def whole(model: ModelConfig) -> Part:
    """Everything on one stage."""
    if model.architecture == "transformer":
        return Part(
            embedding=True, prelude=range(model.num_layers), loop=None, coda=range(0), head=True
        )
    return Part(
        embedding=True,
        prelude=range(model.num_prelude_layers),
        loop=(0.0, 1.0),
        coda=range(model.num_coda_layers),
        head=True,
    )
