"""Options of stops, saves and watches: what cannot be honoured is refused with a remedy."""

from __future__ import annotations

import pytest

from megaparcae.config.load import build_config


@pytest.mark.parametrize(
    ("section", "option", "value", "remedy"),
    [
        ("train", "exit_after", 0, "null is off"),
        ("train", "hang_factor", 1.5, "use 2 or more, or 0"),
        ("train", "hang_min_seconds", 0, "set train.hang_factor to 0"),
        ("train", "replica_check_interval", -1, "must be at least 0"),
        ("checkpoint", "keep_best", -1, "must be at least 0"),
        ("checkpoint", "asynchronous", "sometimes", "asynchronous"),
    ],
)
def test_a_value_that_means_nothing_is_refused(section, option, value, remedy):
    with pytest.raises(ValueError, match=remedy) as refusal:
        build_config({section: {option: value}}, where="test")
    assert f"{section}.{option}" in str(refusal.value)


@pytest.mark.parametrize("options", [{"exit_after": None, "hang_factor": 0}, {"exit_after": 90}])
def test_off_and_on_are_accepted(options):
    train = build_config({"train": options}, where="test").train
    assert train.exit_after == options["exit_after"]
