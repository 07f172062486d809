"""launch/quickstart.sh on the sample text, a few steps of a smaller model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from training_runs import ROOT, SAMPLE, environment

SMALLER = {
    "model.hidden_size": 32,
    "model.intermediate_size": 64,
    "model.sequence_length": 32,
    "train.global_batch_size": 8,
    "train.micro_batch_size": 4,
    "validation.num_sequences": 8,
}


def quickstart(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    options = " ".join(f"--set {name}={value}" for name, value in SMALLER.items())
    env = {
        **environment(),
        "PYTHON": sys.executable,
        "EXTRA_ARGS": options,
        "QUICKSTART_TEXT": str(SAMPLE),
        "QUICKSTART_VOCAB": "300",
        "QUICKSTART_STEPS": "60",
        **variables,
    }
    command = ["bash", str(ROOT / "launch" / "quickstart.sh"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=400)


@pytest.mark.slow
def test_text_becomes_a_model_that_speaks_and_a_second_run_keeps_it(tmp_path: Path):
    out = tmp_path / "my folder"
    first = quickstart(out)
    assert first.returncode == 0, first.stdout + first.stderr
    for name in (
        "loss.png",
        "report.html",
        "hf/model.safetensors",
        "generated.txt",
        "run/step_00000060",
    ):
        assert (out / name).exists(), name
    summary = first.stdout[first.stdout.index("== summary") :]
    assert "validation loss after step 60" in summary and "unigram entropy" in summary
    assert "The people of the United States" in (out / "generated.txt").read_text()

    made = (out / "run" / "step_00000060" / "meta.json").stat().st_mtime_ns
    second = quickstart(out)
    assert second.returncode == 0, second.stderr
    assert second.stdout.count(" exist") == 4
    assert (out / "run" / "step_00000060" / "meta.json").stat().st_mtime_ns == made


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["--fast"], {}, "unknown option --fast"),
        ([], {"QUICKSTART_STEPS": "many"}, "many is not a whole number"),
        ([], {"QUICKSTART_TEXT": "/nowhere.jsonl"}, "QUICKSTART_TEXT=/nowhere.jsonl is no file"),
        ([os.devnull + "/x"], {}, "/dev/null/x can't be written"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments, variables, message):
    done = quickstart(*arguments, **variables)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert message in done.stderr
