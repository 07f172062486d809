"""Benchmarks fork their processes as the tests do: from the server that has all preloaded."""

from __future__ import annotations

import pytest

from harness import start_forkserver


@pytest.fixture(scope="session", autouse=True)
def _forkserver_of_the_tests() -> None:
    start_forkserver()
