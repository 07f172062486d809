"""The harness itself: what a test sees when a rank returns, raises, dies or hangs."""

from __future__ import annotations

import os
import sys

import pytest
import torch
import torch.distributed as dist

from harness import RankError, run_ranks


def sum_of_ranks(scale):
    value = torch.tensor([float(dist.get_rank()) * scale])
    dist.all_reduce(value)
    return value, torch.get_num_threads(), "fs_preload" in sys.modules


def raise_on_rank_one():
    if dist.get_rank() == 1:
        raise ValueError("the seventh sample is damaged")
    dist.barrier()


def die_on_rank_zero():
    if os.environ["RANK"] == "0":
        os._exit(7)


def wait_on_rank_one():
    if dist.get_rank() == 1:
        dist.recv(torch.zeros(1), 0)


def launcher_variables():
    return [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "X")]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_talk_to_each_other_and_return_by_rank(world):
    results = run_ranks(sum_of_ranks, world, 10.0)
    assert len(results) == world
    for total, threads, preloaded in results:
        assert total.item() == 10.0 * sum(range(world))
        assert threads == 1 and preloaded


def test_the_first_error_ends_all_ranks_and_shows_its_traceback():
    with pytest.raises(RankError, match=r"rank 1 of 2 raised(.|\n)*the seventh sample is damaged"):
        run_ranks(raise_on_rank_one, 2)


def test_a_rank_that_dies_is_reported_with_its_exit_code():
    with pytest.raises(RankError, match="rank 0 of 2 died with exit code 7"):
        run_ranks(die_on_rank_zero, 2, init=False)


def test_a_rank_that_hangs_is_shown_with_its_stack():
    with pytest.raises(RankError, match=r"not done after 3 s(.|\n)*wait_on_rank_one"):
        run_ranks(wait_on_rank_one, 2, timeout=3)


def test_ranks_see_the_variables_a_launcher_sets():
    results = run_ranks(launcher_variables, 2, init=False, env={"X": "y"})
    assert results == [[str(r), str(r), "2", "127.0.0.1", "y"] for r in range(2)]
