"""What the looped model and the fixed-depth Transformer share: embedding, blocks, head, plan."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaparcae.config.layout import Part
from megaparcae.config.schema import ModelConfig
from megaparcae.model.attention import AttentionContext, attention_context
from megaparcae.model.batch import Batch
from megaparcae.model.blocks import Block
from megaparcae.model.norm import RMSNorm
from megaparcae.model.probe import Probe
from megaparcae.model.recompute import WorkCounter, run_block
from megaparcae.model.value_embedding import ValueEmbeddings
from megaparcae.ops.cross_entropy import LMLoss

# B rows, S positions, d width, V padded vocabulary


class Logits(nn.Module):
    """c tanh(x W^T / c) in fp32, or the plain product without a cap."""

    def __init__(self, softcap: float | None) -> None:
        super().__init__()
        self.softcap = softcap

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [B, S, d], weight [V, d] -> [B, S, V]; padding ids included."""
        logits = F.linear(x, weight).float()
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


class LanguageModel(nn.Module):
    """Embedding, numbered blocks with value embeddings, final norm, tied or separate head."""

    tp_plan: ClassVar[dict[str, str]] = {
        "embedding": "vocab",
        "value_embeddings.*": "table:1",
        "*.attention": "enter",
        "*.q_proj": "column",
        "*.k_proj": "column",
        "*.v_proj": "column",
        "*.value_gate": "column",
        "*.q_bias": "split:0",
        "*.k_bias": "split:0",
        "*.o_proj": "row",
        "*.mlp": "enter",
        "*.gate_proj": "column",
        "*.up_proj": "column",
        "*.down_proj": "row",
        "*norm": "replicated",
        "injection": "replicated",
        "readout": "replicated",
        "split_state": "local_positions",
        "head": "column",
        "logits": "vocab_head",
        "loss": "vocab_loss",
    }
    """Module name -> how tensor parallelism splits it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.recompute_prelude = self.recompute_coda = "none"
        self.work = WorkCounter()
        self.probe = Probe()
        self.embedding = nn.Embedding(config.padded_vocab_size, config.hidden_size)
        self.value_embeddings = ValueEmbeddings(config)
        self.final_norm = self.make_norm()
        self.head = (
            nn.Identity()
            if config.tie_embeddings
            else nn.Linear(config.hidden_size, config.padded_vocab_size, bias=False)
        )
        self.logits = Logits(config.logit_softcap)
        self.loss = LMLoss(vocab_size=config.vocab_size, softcap=config.logit_softcap)

    def make_norm(self) -> RMSNorm:
        """A norm over the residual stream."""
        return RMSNorm(self.config.hidden_size, self.config.norm_eps)

    def make_blocks(self, count: int, *, first_layer: int, unrolled: int) -> nn.ModuleDict:
        """Blocks under their number in the section; `first_layer` is the stored layer of the first.

        `unrolled` is the depth at mean recurrence, for residual scaling: lambda / (N sqrt(L)) with
        L stored layers and N = unrolled / L loops.
        """
        config = self.config
        layers = config.num_stored_layers
        scale = 1.0
        if config.residual_scale is not None:
            scale = config.residual_scale / (unrolled / layers * math.sqrt(layers))
        tables = config.value_embedding_layers
        return nn.ModuleDict(
            {
                str(i): Block(
                    config, has_value_embedding=first_layer + i in tables, residual_scale=scale
                )
                for i in range(count)
            }
        )

    def context(self, batch: Batch) -> AttentionContext:
        """Positions and mask of this micro-batch."""
        return attention_context(self.config, batch.ids.shape[1], batch.ids.device, batch.documents)

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings [B, S, d]."""
        x = self.embedding(ids)
        return x * math.sqrt(self.config.hidden_size) if self.config.scale_embeddings else x

    def run_stored_block(
        self, block: nn.Module, layer: int, x: Tensor, batch: Batch, context: AttentionContext
    ) -> Tensor:
        """A block outside the loop; `layer` is its number among the stored layers."""
        rows = self.value_embeddings.rows(layer, batch.ids)
        core_begins = self.config.num_prelude_layers
        looped = self.config.architecture == "looped"
        recompute = (
            self.recompute_coda if looped and layer >= core_begins else self.recompute_prelude
        )
        return run_block(block, x, context, rows, recompute, self.work)

    def finish(self, x: Tensor, labels: Tensor | None) -> Tensor:
        """Logits [B, S, V] in fp32, or the summed loss over the labels that count."""
        x = self.final_norm(x)
        weight = self.embedding.weight if self.config.tie_embeddings else self.head.weight
        if labels is None:
            return self.logits(x, weight)
        loss, _, row_losses = self.loss(x, weight, labels)
        self.probe.add_losses(row_losses)
        return loss

    def set_recompute(self, *, prelude: str, core: str, coda: str) -> None:
        """Activation checkpointing by section; a Transformer's layers all count as prelude."""
        del core  # only a looped model has one
        self.recompute_prelude, self.recompute_coda = prelude, coda

    def run_order(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        """Modules as they run, each with the one whose weights it is the first to use; weights of
        none of these are used at once, or are small."""
        if not self.config.tie_embeddings:
            yield self.logits, self.head
            yield self.loss, self.head

    def keep_common(self, part: Part, layers: Collection[int], *, final_norm: bool) -> None:
        """Drop embedding, tables, norm and head that `part` does not need."""
        if not (part.embedding or (part.head and self.config.tie_embeddings)):
            drop(self, "embedding")
        for name in list(self.value_embeddings):
            if int(name) not in layers:
                del self.value_embeddings[name]
        if not final_norm:
            drop(self, "final_norm")
        if not part.head:
            drop(self, "head")


def drop(owner: nn.Module, name: str) -> None:
    """Put the identity in the place of a module whose weights are not needed here."""
    setattr(owner, name, nn.Identity())


def keep_layers(blocks: nn.ModuleDict, layers: range) -> None:
    """Drop the blocks outside `layers`."""
    for name in list(blocks):
        if int(name) not in layers:
            del blocks[name]
