"""tools/generate.py and the two converters as their users run them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_export import FP32, SMALL, random_weights
from test_exported_tokenizer import byte_bpe

from megaparcae.checkpoint.model_tensors import write_model_tensors
from megaparcae.config.load import dump_config
from megaparcae.config.schema import DataConfig, RunConfig
from megaparcae.errors import UserError
from megaparcae.hf.export import export_hf
from megaparcae.hf.generate import GenerationOptions, Generator, Meter
from megaparcae.hf.prompts import generate_file

ROOT = Path(__file__).parents[2]
CONFIG = dataclasses.replace(SMALL, vocab_size=330, sequence_length=256)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("export")
    return export_hf(random_weights(CONFIG), CONFIG, byte_bpe(home), home / "out", FP32)


@pytest.fixture(scope="module")
def generator(folder: Path) -> Generator:
    return Generator.load(folder)


def tool(name: str, *args: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / f"{name}.py"), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def test_a_batch_gives_what_single_prompts_give(generator: Generator) -> None:
    prompts = ["It was the best", "", "of times, it was the worst of"]
    options = GenerationOptions(max_new_tokens=12)
    batch = generator.generate(prompts, options)
    assert batch == [generator.generate([prompt], options)[0] for prompt in prompts]
    assert batch[0].loops_per_token == 8


def test_a_seed_makes_sampling_repeatable(generator: Generator) -> None:
    first, second, other = (
        generator.generate(["It"], GenerationOptions(temperature=1.0, seed=seed))[0].text
        for seed in (1, 1, 2)
    )
    assert first == second != other


def test_top_k_one_is_greedy(generator: Generator) -> None:
    greedy = generator.generate(["It"], GenerationOptions(max_new_tokens=9))
    sampled = GenerationOptions(max_new_tokens=9, temperature=1.0, top_k=1)
    assert generator.generate(["It"], sampled) == greedy


def test_early_exit_reports_fewer_loops(generator: Generator) -> None:
    options = GenerationOptions(max_new_tokens=9, early_exit="state", exit_threshold=1e9)
    found = generator.generate(["It"], options)[0]
    assert found.loops_per_token == pytest.approx(
        (8 + 2 * (found.num_tokens - 1)) / found.num_tokens
    )


@pytest.mark.parametrize(
    "wrong", [{"max_new_tokens": 0}, {"top_p": 0.0}, {"temperature": -1.0}, {"num_loops": 0}]
)
def test_options_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        GenerationOptions(**wrong)


def test_a_file_of_prompts_keeps_its_order_and_its_fields(
    generator: Generator, tmp_path: Path
) -> None:
    records = [{"prompt": text, "id": i} for i, text in enumerate(["It was the", "a", "of times"])]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    options = GenerationOptions(max_new_tokens=4)
    meter = generate_file(generator, source, target, options, key="prompt", batch_size=2)
    found = [json.loads(line) for line in target.read_text().splitlines()]
    assert [record["id"] for record in found] == [0, 1, 2]
    for record in found:
        alone = generator.generate([record["prompt"]], options)[0]
        assert record["continuation"] == alone.text
    assert isinstance(meter, Meter)
    assert meter.tokens == sum(record["num_tokens"] for record in found)


@pytest.mark.parametrize("line", ["not json", '{"text": "x"}', "[1]"])
def test_a_bad_line_is_named_and_nothing_is_written(
    line: str, generator: Generator, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n' + line)
    with pytest.raises(UserError, match=r"in.jsonl:2"):
        generate_file(
            generator,
            source,
            tmp_path / "out.jsonl",
            GenerationOptions(),
            key="prompt",
            batch_size=1,
        )
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["generate", "convert_to_hf", "convert_from_hf"])
def test_help_comes_at_once(name: str) -> None:
    started = time.perf_counter()
    assert tool(name, "--help").returncode == 0
    assert time.perf_counter() - started < 2


@pytest.mark.slow
def test_checkpoint_to_folder_to_text_and_back(tmp_path: Path) -> None:
    run, tokenizer = tmp_path / "run", byte_bpe(tmp_path)
    write_model_tensors(run / "step_00000020", random_weights(CONFIG))
    config = RunConfig(model=CONFIG, data=DataConfig(tokenizer=str(tokenizer)))
    (run / "config.yaml").write_text(dump_config(config))
    done = tool("convert_to_hf", "--checkpoint", run, "--output", tmp_path / "hf")
    assert done.returncode == 0, done.stderr
    assert "| step | 20 |" in (tmp_path / "hf" / "README.md").read_text()
    args = ["--model", tmp_path / "hf", "--prompt", "It was", "--num-loops", 4]
    done = tool("generate", *args, "--max-new-tokens", 8)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("It was")
    assert "8 tokens" in done.stderr
    assert "4.00 loops per token" in done.stderr
    done = tool("convert_from_hf", "--input", tmp_path / "hf", "--output", tmp_path / "again")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "again" / "step_00000000" / ".metadata").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, args, message",
    [
        ("generate", ["--model", "nowhere", "--prompt", "x"], "config.json is missing"),
        ("convert_to_hf", ["--checkpoint", "nowhere", "--output", "out"], "holds no checkpoint"),
        ("convert_from_hf", ["--input", "nowhere", "--output", "out"], "config.json is missing"),
    ],
)
def test_a_users_mistake_is_one_sentence_and_exit_code_two(
    name: str, args: list[str], message: str, tmp_path: Path
) -> None:
    done = tool(name, *args, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
