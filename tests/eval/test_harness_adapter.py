"""lm-eval's view of an exported model: depth, BOS, names of tasks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import LOOPED, random_model, write_byte_tokenizer

from megaparcae.checkpoint.model_tensors import LazyTensors
from megaparcae.errors import UserError
from megaparcae.eval import harness
from megaparcae.eval.loss import make_batch
from megaparcae.eval.rows import Row
from megaparcae.eval.scoring import Scorer
from megaparcae.hf.export import ExportOptions, export_hf
from megaparcae.hf.generate import Generator


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Generator:
    folder: Path = tmp_path_factory.mktemp("export")
    weights = dict(random_model(LOOPED).named_parameters())
    lazy = LazyTensors({k: tuple(v.shape) for k, v in weights.items()}, weights.__getitem__)
    tokenizer = write_byte_tokenizer(folder / "tokenizer")
    options = ExportOptions(dtype=torch.float32)
    return Generator.load(export_hf(lazy, LOOPED, tokenizer, folder / "model", options))


@pytest.mark.parametrize("num_loops", [1, 5])
def test_log_likelihoods_are_those_of_our_model_behind_bos(exported, num_loops):
    pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")
    from lm_eval.api.instance import Instance

    adapter = harness._adapter()(exported.model, exported.tokenizer, num_loops, 2)
    pairs = [("The sea", " is"), ("The ship", " was"), ("", "Call")]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    scorer = Scorer(random_model(LOOPED), num_loops=[num_loops])
    for (context, answer), (found, _) in zip(
        pairs, adapter.loglikelihood(requests, disable_tqdm=True), strict=True
    ):
        ids = [0, *(byte + 3 for byte in (context + answer).encode())]
        batch = make_batch([Row(torch.tensor(ids).numpy())], [0], torch.device("cpu"))
        losses = scorer.score(batch)[num_loops].losses
        assert found == pytest.approx(-losses[len(context) :].sum(), rel=1e-4)


def test_rolling_log_likelihood_of_a_text_is_its_loss(exported):
    pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")
    from lm_eval.api.instance import Instance

    adapter = harness._adapter()(exported.model, exported.tokenizer, 3, 2)
    text = "Call me Ishmael."
    (found,) = adapter.loglikelihood_rolling(
        [Instance("loglikelihood_rolling", {}, (text,), 0)], disable_tqdm=True
    )
    ids = torch.tensor([0, *(byte + 3 for byte in text.encode())]).numpy()
    batch = make_batch([Row(ids)], [0], torch.device("cpu"))
    losses = Scorer(random_model(LOOPED), num_loops=[3]).score(batch)[3].losses
    assert found == pytest.approx(-losses.sum(), rel=1e-4)


def test_sets_stand_for_the_papers_tasks():
    assert len(harness.task_names("table3")) == 6
    assert harness.task_names("piqa,perplexity,piqa") == ["piqa", "wikitext", "lambada_openai"]


@pytest.mark.parametrize("missing", ["lm_eval", "accelerate"])
def test_without_a_package_the_message_says_what_to_install(monkeypatch, missing):
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda name: name != missing or None)
    with pytest.raises(UserError, match=rf"package {missing}, .* `pip install 'lm-eval\[hf\]'"):
        harness.require_lm_eval()
