"""Hostfiles: good lines, bad lines and what is said about them, and who gets which device."""

from __future__ import annotations

import pytest

from megaparcae.errors import UserError
from megaparcae.launcher.hostfile import Host, include_string, read_hostfile, select_devices

HOSTS = [
    Host(name="worker-1", slots=4, where="hosts:1"),
    Host(name="worker-2", slots=2, where="hosts:2"),
]


def parse(tmp_path, text: str) -> list[tuple[str, int]]:
    path = tmp_path / "hosts"
    path.write_bytes(text.encode())
    return [(host.name, host.slots) for host in read_hostfile(path)]


def placed(**options) -> list[tuple[str, list[int]]]:
    return [(p.host, list(p.devices)) for p in select_devices(HOSTS, **options)]


@pytest.mark.parametrize(
    "text",
    [
        "worker-1 slots=4\nworker-2 slots=2\n",
        "worker-1\tslots=4\r\nworker-2  slots=2\r\n",
        "# ours\n\n  worker-1 slots=4  # rack 3\nworker-2 slots=2",
    ],
)
def test_tabs_comments_blank_lines_and_crlf_are_read(tmp_path, text):
    assert parse(tmp_path, text) == [("worker-1", 4), ("worker-2", 2)]


def test_addresses_are_hosts(tmp_path):
    assert parse(tmp_path, "10.0.0.7 slots=1") == [("10.0.0.7", 1)]


@pytest.mark.parametrize(
    "line, said",
    [
        ("worker-2 lots=8", "'lots' is not slots"),
        ("worker-2 slots = 8", "no spaces around '='"),
        ("worker-2:8", "write 'worker-2 slots=8'"),
        ("worker-2", "the number of devices is missing"),
        ("worker-2 slots=", "the number of devices is missing"),
        ("worker-2 slots=8 gpu", "nothing may follow the number"),
        ("worker-2 slots=8x", "nothing may follow the number"),
        ("worker-2 slots=0", "slots must be at least 1"),
        ("fe80::1 slots=8", "an IPv6 address needs a host name"),
        ("[2001:db8::1] slots=8", "an IPv6 address needs a host name"),
        ("me@worker-2 slots=8", "put the user's name into ~/.ssh/config"),
        ("worker-[2-5] slots=8", "expected 'HOST slots=N', such as 'worker-1 slots=8'"),
        ("slots=8", "expected 'HOST slots=N'"),
        ("worker-1 slots=8", "worker-1 is also in "),
    ],
)
def test_a_bad_line_is_shown_with_file_number_and_expected_form(tmp_path, line, said):
    with pytest.raises(UserError) as caught:
        parse(tmp_path, f"worker-1 slots=4\n\n{line}\n")
    assert f"hosts:3: {line!r}" in str(caught.value) and said in str(caught.value)


def test_an_empty_or_missing_file_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"hosts: no machine in it; expected 'HOST slots=N'"):
        parse(tmp_path, "# nothing yet\n")
    with pytest.raises(UserError, match=r"nowhere: no such file; unset HOSTFILE"):
        read_hostfile(tmp_path / "nowhere")


def test_a_launch_script_given_as_the_hostfile_is_recognised(tmp_path):
    with pytest.raises(UserError, match="this is a script; give the hostfile's name before it"):
        parse(tmp_path, "#!/usr/bin/env bash\nexec true\n")


def test_without_a_filter_all_devices_are_taken_in_file_order():
    assert placed() == [("worker-1", [0, 1, 2, 3]), ("worker-2", [0, 1])]


def test_including_a_host_without_devices_takes_all_of_them():
    assert placed(include="worker-2@worker-1:3") == [("worker-1", [3]), ("worker-2", [0, 1])]


def test_devices_two_and_three_of_a_machine_with_four_slots_can_be_chosen():
    assert placed(include="worker-1:3,2") == [("worker-1", [2, 3])]


def test_a_device_beyond_slots_is_refused_with_the_meaning_of_slots():
    with pytest.raises(UserError) as caught:
        placed(include="worker-2:2,3")
    assert str(caught.value) == (
        "INCLUDE='worker-2:2,3': worker-2 has no device 2, since hosts:2 says slots=2, devices 0 "
        "to 1; slots is the machine's total: write slots=3 or more when it has that many"
    )


def test_excluding_takes_devices_or_whole_hosts_away():
    assert placed(exclude="worker-1:0,1@worker-2") == [("worker-1", [2, 3])]


def test_the_first_nodes_and_devices_can_be_taken():
    assert placed(num_nodes=1, num_devices=3) == [("worker-1", [0, 1, 2])]
    assert placed(num_devices=2) == [("worker-1", [0, 1]), ("worker-2", [0, 1])]


@pytest.mark.parametrize(
    "options, said",
    [
        ({"include": "worker-3"}, "no host 'worker-3'; choose worker-1, worker-2"),
        ({"include": "worker-1:a"}, "'a' is not a device number; expected HOST:0,1@HOST2"),
        ({"include": "worker-1", "exclude": "worker-2"}, "give one of them"),
        ({"include": "worker-1", "num_devices": 1}, "can't be combined with INCLUDE"),
        ({"exclude": "worker-1@worker-2"}, "leaves no device"),
        ({"num_nodes": 3}, "NUM_NODES=3: there are 2 hosts; use 1 to 2"),
        ({"num_devices": 3}, "NUM_GPUS=3: worker-2 has 2 (hosts:2); use 1 to 2"),
    ],
)
def test_what_does_not_exist_can_not_be_chosen(options, said):
    with pytest.raises(UserError) as caught:
        placed(**options)
    assert said in str(caught.value)


def test_placements_become_an_include_with_every_device_named():
    assert include_string(select_devices(HOSTS)) == "worker-1:0,1,2,3@worker-2:0,1"
