"""Copies of weights are equal under every layout, and one that is not is found and named."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tiny import start, steps, tiny_config

from harness import run_ranks
from megaparcae.parallel.shard import spec_of
from megaparcae.train.replicas import check_replicas, checksum, find_differences
from megaparcae.train.safety import TrainingError

HOSTS = ["a", "a", "b", "b"]


def spoil_one(changes: dict[str, object], name: str | None, guilty: int) -> str | None:
    """Train two steps; flip one bit of one weight on one rank; what the check says."""
    run, batches = start(tiny_config(changes))
    steps(run, batches, 0, 2)
    check_replicas(run.model, 2, HOSTS)
    named = {spec_of(p).name: p for p in run.model.parameters()}
    if dist.get_rank() == guilty and name in named:
        with torch.no_grad():
            named[name].view(-1).view(torch.int32)[5] ^= 1
    try:
        check_replicas(run.model, 2, HOSTS)
    except TrainingError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("parallel", "name", "guilty", "ranks"),
    [
        ({}, "core.0.attention.q_proj.weight", 1, "0,2,3 (a and 1 more) / 1 (a)"),
        ({"tp": 2}, "final_norm.weight", 3, "0,1,2 (a and 1 more) / 3 (b)"),
        ({"pp": 2}, "core.0.attention.q_proj.weight", 2, "0,1,3 (a and 1 more) / 2 (b)"),
        ({"zero_stage": 1}, "prelude.0.mlp.up_proj.weight", 0, "1,2,3 (a and 1 more) / 0 (a)"),
    ],
)
def test_a_flipped_bit_is_found_with_its_parameter_and_ranks(parallel, name, guilty, ranks):
    said = run_ranks(spoil_one, 4, {"parallel": parallel}, name, guilty)
    assert said[0] is not None and set(said) == {said[0]}
    assert (
        f"after step 2 copies of weights differ that must be equal: {name} has 2 values" in said[0]
    )
    assert f"on ranks {ranks}" in said[0]


def test_slices_of_one_weight_are_no_copies():
    first, second = ("w", (0, 0), (2, 2)), ("w", (2, 0), (2, 2))
    assert find_differences([{first: 1}, {second: 2}]) == {}
    assert find_differences([{first: 1}, {first: 2}, {first: 1}]) == {"w": [[0, 2], [1]]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_sees_every_bit_and_the_order_of_chunks(dtype):
    values = torch.randn(3 * 4096 + 7).to(dtype)
    assert checksum(values) == checksum(values.clone())
    for at in (0, 4095, 4096, len(values) - 1):
        other = values.clone()
        other.view(torch.int16)[at * values.element_size() // 2] ^= 1
        assert checksum(other) != checksum(values), at
    assert checksum(values[: 2 * 4096].view(2, 4096).flip(0)) != checksum(values[: 2 * 4096])
