"""The definition of the language-model loss: all logits at once, in fp32."""

# N tokens, d width, V rows of the (padded) vocabulary
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def naive_cross_entropy(
    hidden: Tensor,  # [N, d]
    weight: Tensor,  # [V, d]
    labels: Tensor,  # [N]
    *,
    vocab_size: int,
    softcap: float | None = None,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """Sum of -log softmax(cap(hidden weight^T))[label] in fp32, and the number of labels counted.

    cap(x) = c tanh(x / c) when softcap = c. Rows of `weight` from vocab_size on are padding: no
    probability. Labels equal to ignore_index count for nothing. Logits have the type of the matrix
    product (bf16 under autocast) before they become fp32.
    """
    logits = F.linear(hidden, weight).float()  # [N, V]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits[:, :vocab_size]
    loss_sum = F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")
    return loss_sum, (labels != ignore_index).sum()
