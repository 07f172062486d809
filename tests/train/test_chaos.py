"""A run that is killed, stopped, starved of disk and damaged ends bit for bit as if it were not."""

from __future__ import annotations

import os

import pytest
from chaos import FAULTS, play


@pytest.mark.slow
def test_every_kind_of_strike_leaves_the_run_as_it_was(tmp_path):
    """CHAOS_ROUNDS=30 strikes longer, CHAOS_SEED=2 otherwise."""
    rounds = int(os.environ.get("CHAOS_ROUNDS", len(FAULTS)))
    chaos = play(tmp_path, rounds, int(os.environ.get("CHAOS_SEED", 1)))
    assert len(chaos.said) == rounds
