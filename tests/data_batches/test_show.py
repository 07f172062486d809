"""`inspect_data.py show`: what is in sample k, for people."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fake_shards import counting_documents, write_shard

from megaparcae.data.show import samples
from megaparcae.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def shard_options(**options: object) -> dict:
    plain = {"sequence_length": 32, "packing": "concatenate", "count": 4}
    return {**plain, **options}


def test_all_samples_of_long_and_short_documents_are_listed(tmp_path: Path) -> None:
    prefix = write_shard(tmp_path / "s", counting_documents([100] + [3] * 10))
    table, *shown = samples([prefix], **shard_options())
    assert table.splitlines()[0].startswith("set")
    assert "document 0, [0, 33) of its 100 tokens" in "".join(shown)
    assert "document 0, [96, 100) of its 100 tokens" in "".join(shown)
    assert "document 5, whole 3 tokens" in "".join(shown)


def test_a_run_shows_the_samples_that_it_draws(tmp_path: Path) -> None:
    prefix = write_shard(tmp_path / "s", counting_documents([40] * 50))
    (tmp_path / "run.yaml").write_text(f"preset: tiny\ndata: {{train: {prefix}}}\n")
    overrides = ["model.sequence_length=16", "data.packing=concatenate"]
    _, first, second = samples(
        [],
        config=str(tmp_path / "run.yaml"),
        overrides=overrides,
        **shard_options(sample=5, count=2),
    )
    assert first.startswith("sample 5:") and second.startswith("sample 6:")
    assert first.splitlines()[0].split("row")[1] != second.splitlines()[0].split("row")[1]


@pytest.mark.parametrize("options", [{"sample": -1}, {"packing": "best"}, {"config": "x"}])
def test_what_cannot_be_shown_is_refused(tmp_path: Path, options: dict) -> None:
    prefix = write_shard(tmp_path / "s", [np.arange(100)])
    with pytest.raises(UserError):
        list(samples([prefix], **shard_options(**options)))


def test_the_command_prints_a_sample(tmp_path: Path) -> None:
    prefix = write_shard(tmp_path / "s", counting_documents([100] + [3] * 10))
    command = [sys.executable, str(ROOT / "tools" / "inspect_data.py"), "show", prefix]
    options = ["--sequence-length", "32", "--packing", "concatenate", "--sample", "2"]
    done = subprocess.run(command + options, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "sample 2: set" in done.stdout
    both = subprocess.run(command + ["--config", "x"], capture_output=True, text=True, check=False)
    assert both.returncode == 2
