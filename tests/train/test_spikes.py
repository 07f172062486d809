"""What counts as a spike of the loss."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megaparcae.config.schema import TrainConfig
from megaparcae.train.spikes import SpikeDetector, read_history


def detector(window: int = 32, zscore: float = 6.0) -> SpikeDetector:
    return SpikeDetector(TrainConfig(loss_spike_window=window, loss_spike_zscore=zscore))


def noise(count: int) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.02, count)


def test_noise_around_a_falling_loss_is_no_spike_and_a_jump_is():
    spikes, curve = detector(), 3 + 4 * np.exp(-np.arange(400) / 80) + noise(400)
    assert not any(spikes.note(float(loss), i) for i, loss in enumerate(curve))
    assert spikes.note(3.5, 400)
    assert spikes.total == 1
    assert not spikes.is_spike(2.0), "a loss that falls is welcome"


def test_nothing_is_judged_before_half_a_window_is_known():
    spikes = detector()
    spikes.remember([3.0] * 15)
    assert not spikes.is_spike(30.0)
    spikes.remember([3.0])
    assert spikes.is_spike(30.0)


def test_losses_that_hardly_vary_are_not_spikes_for_a_trifle():
    spikes = detector()
    spikes.remember([3.0] * 32)
    assert not spikes.is_spike(3.01)
    assert spikes.is_spike(3.1)


def test_a_lasting_change_of_level_becomes_what_is_usual():
    spikes = detector()
    spikes.remember((3 + noise(32)).tolist())
    found = [spikes.note(float(loss), i) for i, loss in enumerate(4 + noise(40))]
    assert found[0] and sum(found) <= 17 and not any(found[20:])


def test_losses_that_are_not_finite_are_left_to_the_other_guard():
    spikes = detector()
    spikes.remember([3.0] * 32)
    assert not spikes.note(float("nan"), 33)
    assert not spikes.is_spike(float("inf"))
    assert all(loss == 3.0 for loss in spikes.recent)


def test_history_is_read_up_to_the_resumed_step_and_as_made_last(tmp_path):
    def line(step: int, loss: float | None, skipped: int = 0) -> str:
        record = {"kind": "step", "step": step, "loss": loss, "skipped_steps": skipped}
        return json.dumps(record) + "\n"

    log = tmp_path / "log.jsonl"
    log.write_text(
        line(1, 5.0)
        + line(2, None, 1)
        + line(3, 4.0, 1)
        + line(2, 4.5, 2)
        + line(4, 9.0, 7)
        + '{"kind": "health", "step": 3}\n{"kind": "st'
    )
    history = read_history(log, 3)
    assert history.losses == [5.0, 4.5, 4.0]
    assert history.skipped_steps == 1
    assert read_history(tmp_path / "none", 3).losses == []


@pytest.mark.parametrize(
    "options, option",
    [({"loss_spike_zscore": 0.0}, "loss_spike_zscore"), ({"loss_spike_window": 2}, "window")],
)
def test_options_that_make_no_sense_are_refused(options, option):
    with pytest.raises(ValueError, match=option):
        TrainConfig(**options)
