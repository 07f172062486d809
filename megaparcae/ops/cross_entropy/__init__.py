"""Language-model loss: `naive` is the definition, `chunked` is what runs."""

# B rows, S positions, d width, V rows of the vocabulary on this rank
from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from megaparcae.ops.cross_entropy.chunked import Reduce, Vocabulary, chunked_cross_entropy
from megaparcae.ops.cross_entropy.naive import naive_cross_entropy

__all__ = ["LMLoss", "Vocabulary", "chunked_cross_entropy", "naive_cross_entropy"]


class LMLoss(nn.Module):
    """-log p(label), summed over the labels that count (those that are not -100)."""

    def __init__(
        self, vocab_size: int, softcap: float | None = None, chunk_size: int = 1024
    ) -> None:
        super().__init__()
        self.vocabulary = Vocabulary(size=vocab_size)
        self.softcap = softcap
        self.chunk_size = chunk_size

    def forward(
        self, hidden: Tensor, weight: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss sum (fp32), number of labels that count, and each row's loss [B] without gradient.

        hidden [B, S, d], normalised; weight [V, d]; labels [B, S], already shifted. When the
        vocabulary is split, all ranks get the same numbers.
        """
        loss_sum, count, losses = chunked_cross_entropy(
            hidden.flatten(0, -2),
            weight,
            labels.flatten(),
            vocabulary=self.vocabulary,
            softcap=self.softcap,
            chunk_size=self.chunk_size,
        )
        return loss_sum, count, losses.view(labels.shape).sum(dim=-1)

    def split_vocabulary(self, index: int, *, reduce_max: Reduce, reduce_sum: Reduce) -> None:
        """From now on `weight` is slice `index` of the padded vocabulary's equal row slices."""
        self.vocabulary = replace(
            self.vocabulary, index=index, reduce_max=reduce_max, reduce_sum=reduce_sum
        )
