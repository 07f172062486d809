"""The command line: a run's own validation loss, exports, ranks, bundles, lm-eval, mistakes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from bundles import write_bundle

from cli.training_runs import ROOT, environment, make_shard, records, run_tool, train
from megaparcae.errors import UserError
from megaparcae.log import logger
from megaparcae.scaling.curves import read_evaluation

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A run of five steps with its validation, its export, and its text."""
    folder = tmp_path_factory.mktemp("made")
    options = make_shard(folder)
    options |= {"train.num_steps": 5, "checkpoint.dir": folder / "run"}
    train(options)
    run_tool(
        "convert_to_hf.py",
        *("--checkpoint", folder / "run", "--output", folder / "export", "--dtype", "float32"),
    )
    return folder


def evaluate(made: Path, *arguments: object, model: str = "run") -> dict:
    """What --json holds; the command runs in this process, which saves its start."""
    report = made / "report.json"
    main(["--model", made / model, "--json", report, *arguments])
    return json.loads(report.read_text())


def main(arguments: list[object]) -> None:
    """tools/evaluate.py with these arguments."""
    spec = importlib.util.spec_from_file_location("evaluate_tool", ROOT / "tools" / "evaluate.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    handlers, propagate = logger.handlers[:], logger.propagate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["evaluate.py", *map(str, arguments)])
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            patch.delenv(name, raising=False)
        try:
            tool.main()
        finally:
            logger.handlers[:], logger.propagate = handlers, propagate


def losses(report: dict) -> list[float]:
    return [one["loss"] for one in report["loss"]]


def test_a_checkpoint_gives_the_validation_loss_of_its_training(made):
    report = evaluate(made, "--num-loops", "1,4", "--start", "drawn")
    logged = records(made / "run", "validation")[5]["loss"]
    assert losses(report) == pytest.approx([logged["1"], logged["4"]], rel=1e-6)
    assert [one["num_rows"] for one in report["loss"]] == [4, 4]


def test_checkpoint_and_export_agree_on_shards_and_on_text(made):
    shard = ("--data", made / "s_text_document", "--max-rows", 40, "--num-loops", "1,2,4,8")
    first, second = evaluate(made, *shard), evaluate(made, *shard, model="export")
    assert losses(first) == pytest.approx(losses(second), rel=1e-6)
    name, curve = read_evaluation(made / "report.json")  # as tools/scaling.py curves does
    assert name == str(made / "export") and curve.num_loops.tolist() == [1, 2, 4, 8]
    assert curve.loss.tolist() == losses(second) and curve.mu[0] == second["mean_recurrence"]
    assert first["loss"][0]["bits_per_byte"] == pytest.approx(second["loss"][0]["bits_per_byte"])
    text = made / "text.txt"
    text.write_text("Call me Ishmael. Some years ago, never mind how long precisely.")
    first, second = (evaluate(made, "--data", text, model=m) for m in ("run", "export"))
    assert losses(first) == pytest.approx(losses(second), rel=1e-6)
    assert first["loss"][0]["num_bytes"] == text.stat().st_size


def test_two_ranks_and_another_batch_give_the_same_number(made):
    arguments = ["--data", made / "s_text_document", "--max-rows", 30, "--num-loops", "1,3"]
    alone = losses(evaluate(made, *arguments, "--batch-tokens", 64))
    report = made / "two.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [ROOT / "tools" / "evaluate.py", "--model", made / "run", "--json", report]
    command += [*arguments, "--batch-tokens", 1000]
    done = subprocess.run(
        list(map(str, command)), env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert losses(json.loads(report.read_text())) == pytest.approx(alone, rel=1e-6)
    assert done.stdout.count("perplexity") == 1


def test_early_exit_starts_from_the_losses_of_fixed_loops(made):
    picture = made / "exit.png"
    arguments = ("--early-exit", "kl", "--max-rows", 2, "--picture", picture)
    points = evaluate(made, *arguments)["early_exit"]
    plain = evaluate(made, "--num-loops", "1,2,3,4", "--max-rows", 2)
    fixed = [point["loss"] for point in points if point["rule"] == "fixed"]
    assert fixed == pytest.approx(losses(plain), rel=1e-5)
    assert {point["rule"] for point in points} == {"fixed", "kl"}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_core_of_an_export_is_that_of_its_checkpoint_and_is_resumed(made):
    items = [
        {"query": f"The {animal}", "choices": ["sea is wide", "whale", "of"], "gold": i % 3}
        for i, animal in enumerate(["cat", "dog", "cow", "ship", "sail", "wind"])
    ]
    task = {"label": "made", "icl_task_type": "multiple_choice", "num_fewshot": [2]}
    write_bundle(made / "bundle", [{**task, "baseline": 33}], {"made": items})
    arguments = ("--core", made / "bundle", "--tasks", "bundle", "--num-loops", "2,4")
    results = made / "results.jsonl"
    first = evaluate(made, *arguments, "--results", results)
    written = results.read_text()
    assert len(first["tasks"]) == 6
    assert evaluate(made, *arguments, "--results", results) == first
    assert results.read_text() == written
    export = evaluate(made, *arguments, model="export")
    assert export["tasks"] == first["tasks"]
    assert export["scores"] == first["scores"]


@pytest.mark.parametrize(
    "arguments, model, message",
    [
        (["--num-loops", "1,x"], "run", "--num-loops=1,x"),
        ([], "export", "--data is missing"),
        (["--data", "nowhere.txt"], "run", "nowhere.txt does not exist"),
        (["--core", "nowhere"], "run", "no core.yaml"),
        (["--lm-eval", "table3"], "run", "needs an export"),
        (["--early-exit", "kl,luck"], "run", "--early-exit=kl,luck: choose from"),
        ([], "nowhere", "is no folder"),
    ],
)
def test_mistakes_are_explained(made, arguments, model, message):
    with pytest.raises(UserError, match=message):
        evaluate(made, *arguments, model=model)


def test_a_mistake_ends_the_command_without_a_traceback(made):
    command = [
        sys.executable,
        ROOT / "tools" / "evaluate.py",
        "--model",
        made / "run",
        "--data",
        "x",
    ]
    done = subprocess.run(
        list(map(str, command)), env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "x does not exist" in done.stderr
    assert "Traceback" not in done.stderr


LOCAL_TASK = """
task: made_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{query}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{gold}}}}"
metric_list: [{{metric: acc}}]
"""


def local_copy(task: str, file: Path, folder: Path) -> None:
    """lm-eval's own definition of a task, under the name local_{task}, on a local file."""
    import lm_eval

    (source,) = (Path(lm_eval.__file__).parent / "tasks").glob(f"*/{task}.yaml")
    skipped = ("task:", "dataset_path:", "dataset_name:", "training_split:", "validation_split:")
    kept = [x for x in source.read_text().splitlines() if not x.startswith(skipped)]
    head = [f"task: local_{task}", "dataset_path: json"]
    data = ["dataset_kwargs:", f"  data_files: {{test: {file}}}"]
    (folder / f"local_{task}.yaml").write_text("\n".join([*head, *data, *kept]))
    for helper in source.parent.glob("*.py"):
        (folder / helper.name).write_text(helper.read_text())


def test_the_papers_perplexities_run_on_local_text_and_agree_with_ours(made, monkeypatch):
    pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")
    folder = made / "perplexity"
    folder.mkdir()
    text = "Call me Ishmael. Some years ago, never mind how long precisely, I went to sea."
    (folder / "pages.jsonl").write_text(json.dumps({"page": text, "text": text}) + "\n")
    for task in ("wikitext", "lambada_openai"):
        local_copy(task, folder / "pages.jsonl", folder)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
    tasks = ("--lm-eval", "local_wikitext,local_lambada_openai", "--lm-eval-path", folder)
    loss = ("--data", folder / "pages.jsonl", "--num-loops", 2)
    report = evaluate(made, *tasks, *loss, model="export")
    found = report["lm_eval"]["2"]
    ours = report["loss"][0]["bits_per_byte"]
    assert found["local_wikitext"]["bits_per_byte,none"] == pytest.approx(ours, rel=0.02)
    assert found["local_lambada_openai"]["perplexity,none"] > 1


def test_lm_eval_scores_an_export_at_every_depth(made, monkeypatch):
    pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")
    folder = made / "lm_eval"
    folder.mkdir()
    items = [
        {"query": f"{text} the", "choices": ["sea", "of of of"], "gold": i % 2}
        for i, text in enumerate(["On", "Call", "All", "From"])
    ]
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (folder / "made.yaml").write_text(LOCAL_TASK.format(file=folder / "items.jsonl"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
    arguments = ("--lm-eval", "made_choice", "--lm-eval-path", folder, "--num-loops", "1,4")
    report = evaluate(made, *arguments, model="export")
    assert set(report["lm_eval"]) == {"1", "4"}
    for result in report["lm_eval"].values():
        assert 0 <= result["made_choice"]["acc,none"] <= 1
    with pytest.raises(UserError, match="no task 'no_such_task'"):
        evaluate(made, "--lm-eval", "no_such_task", model="export")
