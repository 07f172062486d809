"""The chunked loss against its definition, forward and backward, and its memory."""

from __future__ import annotations

import ctypes
import resource

import pytest
import torch
from torch import Tensor

from harness import run_ranks
from megaparcae.ops.cross_entropy import (
    LMLoss,
    Vocabulary,
    chunked_cross_entropy,
    naive_cross_entropy,
)

N, D, PADDED = 37, 16, 64
M_MMAP_THRESHOLD = -3
"""From malloc.h."""


def make_inputs(vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=g).requires_grad_()
    weight = torch.randn(PADDED, D, generator=g).requires_grad_()
    labels = torch.randint(vocab_size, (N,), generator=g)
    labels[::5] = -100
    return hidden, weight, labels


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor, vocab_size: int, **options: float):
    loss_sum, count, _ = chunked_cross_entropy(
        hidden, weight, labels, vocabulary=Vocabulary(size=vocab_size), chunk_size=8, **options
    )
    return loss_sum, count


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("vocab_size", [PADDED, 50])
def test_chunked_loss_and_gradients_are_those_of_the_definition(softcap, vocab_size):
    hidden, weight, labels = make_inputs(vocab_size)
    want, count = naive_cross_entropy(
        hidden, weight, labels, vocab_size=vocab_size, softcap=softcap
    )
    want_grads = torch.autograd.grad(3.0 * want, (hidden, weight))
    got, got_count = chunked(hidden, weight, labels, vocab_size, softcap=softcap)
    got_grads = torch.autograd.grad(3.0 * got, (hidden, weight))
    assert got_count == count == (labels != -100).sum()
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    for mine, theirs in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=2e-6)


def test_padding_rows_get_no_probability_and_no_gradient():
    hidden, weight, labels = make_inputs(50)
    loss, _ = chunked(hidden, weight, labels, 50)
    loss.backward()
    assert weight.grad is not None
    assert not weight.grad[50:].any()
    with torch.no_grad():
        weight[50:] = 100.0
    assert chunked(hidden, weight, labels, 50)[0] == loss


def test_bf16_autocast_agrees_with_the_definition_under_autocast():
    hidden, weight, labels = make_inputs(50)
    with torch.autocast("cpu", torch.bfloat16):
        want, _ = naive_cross_entropy(hidden, weight, labels, vocab_size=50, softcap=5.0)
        got, _ = chunked(hidden, weight, labels, 50, softcap=5.0)
    assert got.dtype == torch.float32
    # The same bf16 products; only the fp32 sums differ.
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    want_grads = torch.autograd.grad(want, (hidden, weight))
    got_grads = torch.autograd.grad(got, (hidden, weight))
    for mine, theirs in zip(got_grads, want_grads, strict=True):
        assert mine.dtype == torch.float32
        # Products of bf16 gradients: 8 bits of mantissa.
        assert (mine - theirs).norm() / theirs.norm() < 4e-3


def test_labels_that_are_all_ignored_give_zero_loss_and_zero_gradients():
    hidden, weight, labels = make_inputs(50)
    loss, count = chunked(hidden, weight, torch.full_like(labels, -100), 50)
    loss.backward()
    assert loss == 0 and count == 0
    assert not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("label", [50, PADDED, -1])
def test_a_label_outside_the_vocabulary_gives_an_infinite_loss(label):
    hidden, weight, labels = make_inputs(50)
    labels[1] = label
    assert chunked(hidden, weight, labels, 50)[0] == torch.inf


def test_large_logits_do_not_overflow():
    hidden, weight, labels = make_inputs(50)
    want, _ = naive_cross_entropy(300 * hidden, weight, labels, vocab_size=50)
    got, _ = chunked(300 * hidden, weight, labels, 50)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


def test_evaluation_without_gradient_gives_the_same_loss():
    hidden, weight, labels = make_inputs(50)
    with torch.no_grad():
        quiet, _ = chunked(hidden, weight, labels, 50, softcap=2.0)
    assert quiet == chunked(hidden, weight, labels, 50, softcap=2.0)[0]
    assert not quiet.requires_grad


def test_the_module_takes_rows_of_positions():
    hidden, weight, labels = make_inputs(50)
    want, count = naive_cross_entropy(hidden, weight, labels, vocab_size=50, softcap=3.0)
    got = LMLoss(50, softcap=3.0)(hidden[None], weight, labels[None])
    torch.testing.assert_close(got[0], want, rtol=1e-6, atol=0)
    assert got[1] == count
    assert got[2].shape == (1,)
    torch.testing.assert_close(got[2].sum(), want, rtol=1e-6, atol=0)


def peak_growth(num_tokens: int) -> int:
    """Bytes by which one forward and backward raise this process's peak memory."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)  # free memory goes back at once
    d, vocab_size = 64, 8192
    hidden = torch.randn(num_tokens, d, requires_grad=True)
    weight = torch.randn(vocab_size, d, requires_grad=True)
    labels = torch.randint(vocab_size, (num_tokens,))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loss, *_ = chunked_cross_entropy(
        hidden, weight, labels, vocabulary=Vocabulary(size=vocab_size), softcap=30.0, chunk_size=512
    )
    loss.backward()
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def test_peak_memory_does_not_grow_with_tokens_times_vocabulary():
    (few,) = run_ranks(peak_growth, 1, 1024)
    (many,) = run_ranks(peak_growth, 1, 8192)
    all_logits = 4 * 8192 * 8192
    assert many - few < 0.1 * all_logits
    assert many < 0.6 * all_logits
