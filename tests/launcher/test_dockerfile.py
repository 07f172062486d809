"""The Dockerfile can't be built here; what it names is held against the checkout."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "launch" / "Dockerfile").read_text()
INSTRUCTIONS = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE)).splitlines()


def test_what_is_copied_exists_and_is_not_ignored():
    ignore = (ROOT / "launch" / "Dockerfile.dockerignore").read_text().splitlines()
    kept = {line[1:] for line in ignore if line.startswith("!")}
    copied = [source for line in INSTRUCTIONS if line.startswith("COPY")
              for source in line.split()[1:-1]]  # fmt: skip
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert source.split("/")[0] in kept, source


def test_versions_are_those_of_the_other_installation():
    (torch,) = re.findall(r"torch==([\d.]+)", "\n".join(INSTRUCTIONS))
    assert f'"torch=={torch}"' in (ROOT / "launch" / "environment.sh").read_text()
    (python,) = re.findall(r"^FROM python:3\.(\d+)", TEXT, re.MULTILINE)
    (least,) = re.findall(r'python_requires=">=3\.(\d+)"', (ROOT / "setup.py").read_text())
    assert int(python) >= int(least)


def test_extras_exist_and_pip_keeps_to_the_constraints():
    for line in INSTRUCTIONS:
        for command in re.findall(r"pip install [^&]*", line):
            assert "-c launch/constraints.txt" in command, command
    (extras,) = re.findall(r"'\.\[(.*?)\]'", TEXT)
    for extra in extras.split(","):
        assert f'"{extra}": [' in (ROOT / "setup.py").read_text()
