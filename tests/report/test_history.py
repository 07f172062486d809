"""What a log says of a run: steps that count, steps that were lost, events, time."""

from __future__ import annotations

import pytest
from logs import eventful_run, start, steps, write_run

from megaparcae.errors import UserError
from megaparcae.report.history import read_history


def test_steps_beyond_the_checkpoint_of_a_restart_are_lost_and_made_again(tmp_path):
    history = read_history(eventful_run(tmp_path))
    assert list(history.steps) == list(range(1, 51))
    assert history.steps[25]["time"] > 1100
    assert history.num_lost_steps == 10


def test_a_run_that_never_got_back_to_where_it_was_ends_earlier(tmp_path):
    records = [start(0, 0), *steps(1, 30, 0), start(10, 100), *steps(11, 15, 100)]
    history = read_history(write_run(tmp_path, records))
    assert history.last_step == 15
    assert [step for step, _ in history.series("loss")] == list(range(1, 16))


def test_events_come_in_order_and_in_words(tmp_path):
    history = read_history(eventful_run(tmp_path))
    said = [(event.kind, event.step, event.text) for event in history.events]
    assert said == [
        ("start", 0, "started with 2 processes on worker-7 (CPU)"),
        ("checkpoint", 20, "saved in 0.4 s, training waited 0.01 s"),
        ("start", 20, "resumed with 2 processes on worker-7 (CPU); 10 steps to be made again"),
        ("skip", 31, "update skipped: loss or gradient not finite"),
        ("spike", 32, "loss spike: 9.0000"),
        ("roll_back", 32, "rolled back to the weights of step 20"),
        ("save_failed", 40, "save failed: <b>no space</b>"),
        ("stop", 50, "stopped: received SIGTERM"),
    ]


def test_the_time_is_divided_without_a_rest(tmp_path):
    spent = read_history(eventful_run(tmp_path)).time
    assert spent.kept == 100
    assert spent.repeated == 20
    assert spent.down == 1100 - 1063
    assert spent.total == pytest.approx(1171 - 1000)


def test_a_slow_machine_is_an_event_and_a_deep_draw_is_none(tmp_path):
    ranks = {"kind": "ranks", "slowest_rank": 1, "host": "w1", "slower": 1.5, "deeper": 1.0}
    records = [
        *steps(1, 3, 0),
        {**ranks, "step": 1, "cause": "depth"},
        {**ranks, "step": 2, "cause": None},
        {**ranks, "step": 3, "cause": "machine"},
    ]
    history = read_history(write_run(tmp_path, records))
    assert [event.step for event in history.events] == [3]
    assert "rank 1 on w1 takes 1.50 times" in history.events[0].text


def test_values_of_the_wrong_type_are_left_out(tmp_path):
    records = [
        {"kind": "start", "step": 0, "layout": 3, "versions": None, "host": 5},
        {"kind": "step", "step": 1, "loss": "3.0", "seconds": True, "time": "noon"},
        {"kind": "step", "step": 2, "loss": 3.0, "skipped_steps": "one", "loss_spike": "yes"},
        {"kind": "validation", "step": 2, "loss": [1, 2]},
        {"kind": "validation", "step": 1, "loss": {"four": 2.0, "4": None, "8": 2.5}},
        {"kind": "health", "step": 2, "loss_by_depth": {"x": 1.0}, "prelude_norms": 4},
        {"kind": "strange news", "step": 2, "note": "a"},
    ]
    history = read_history(write_run(tmp_path, records))
    assert history.series("loss") == [(2, 3.0)]
    assert history.validation == {2: {}, 1: {8: 2.5}}
    assert history.events[-1].text == "strange news note a"


def test_a_folder_without_a_log_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match=r"log\.jsonl is missing"):
        read_history(tmp_path)
    (tmp_path / "log.jsonl").write_text('{"kind": "st')
    with pytest.raises(UserError, match="no record yet"):
        read_history(tmp_path)


def test_a_config_that_cannot_be_read_is_said_and_no_obstacle(tmp_path):
    run = eventful_run(tmp_path)
    (run / "config.yaml").write_text("model: {no_such_option: 3}")
    history = read_history(run)
    assert history.config is None and "no_such_option" in history.config_problem
    (run / "config.yaml").unlink()
    assert read_history(run).config is None
