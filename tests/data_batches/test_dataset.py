"""From a config to rows: splits, blends, checks, masks, epochs, listings."""

from __future__ import annotations

import json
import logging
import resource
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from fake_shards import counting_documents, write_shard

from megaparcae.config.schema import DataConfig, DatasetConfig, ModelConfig, ValidationConfig
from megaparcae.data import build
from megaparcae.data.build import open_all_documents, open_datasets
from megaparcae.data.dataset import TokenDataset
from megaparcae.data.describe import describe_sample, draw_table, plan_epochs, sample_pieces
from megaparcae.data.sampler import deal, step_sample_ids
from megaparcae.data.split import DocumentSplit
from megaparcae.errors import UserError

VOCABULARY = 30_000
BOS = 29_999
LENGTHS = np.random.default_rng(0).integers(1, 60, 400).tolist()


@dataclass
class FakeTokenizer:
    identity: str = "run's own"
    path: str = "tok"
    vocab_size: int = VOCABULARY
    bos_id: int | None = BOS
    eos_id: int | None = 0


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> FakeTokenizer:
    one = FakeTokenizer()
    monkeypatch.setattr(build, "load_tokenizer", lambda path, fast: one)
    return one


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """What the logger says, also when another test has set it up for a command line."""
    monkeypatch.setattr(logging.getLogger("megaparcae"), "propagate", True)
    caplog.set_level(logging.INFO, "megaparcae")
    return caplog


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_shard(tmp_path / "s", counting_documents(LENGTHS))


def open_both(
    *prefixes: str,
    weights: list[float | None] | None = None,
    sequence_length: int = 16,
    seed: int = 1,
    num_sequences: int = 4,
    interval: int = 10,
    vocab_size: int = VOCABULARY,
    **options: object,
) -> tuple[TokenDataset, TokenDataset | None]:
    given = weights or [None] * len(prefixes)
    train = tuple(DatasetConfig(prefix=p, weight=w) for p, w in zip(prefixes, given, strict=True))
    options = {"tokenizer": "tok", "validation_fraction": 0.1, **options}
    return open_datasets(
        DataConfig(train=train, **options),
        ModelConfig(sequence_length=sequence_length, vocab_size=vocab_size),
        ValidationConfig(interval=interval, num_sequences=num_sequences),
        seed=seed,
    )


def open_train(*prefixes: str, **options) -> TokenDataset:
    return open_both(*prefixes, **{"validation_fraction": 0.0, "interval": 0, **options})[0]


def tokens_of(dataset: TokenDataset) -> np.ndarray:
    """Every token of one epoch, BOS left out."""
    tokens = dataset.rows(np.arange(dataset.num_samples)).tokens
    return tokens[tokens != BOS]


# Rows


@pytest.mark.parametrize("packing", ["best_fit", "concatenate"])
def test_rows_are_a_pure_function_of_the_sample_id(prefix: str, packing: str) -> None:
    data = open_train(prefix, packing=packing)
    ids = np.array([3, 10**12, 0, 3, 77])
    together = data.rows(ids)
    assert together.tokens.shape == (5, 17)
    assert together.tokens.dtype == np.uint16, "the shard's: whoever makes the batch widens it once"
    again = open_train(prefix, packing=packing)
    for i, sample in enumerate(ids):
        assert (again.rows(np.array([sample])).tokens[0] == together.tokens[i]).all()
    assert data.rows(np.zeros(0, np.int64)).tokens.shape == (0, 17)


def test_a_batch_from_shards_of_two_dtypes_keeps_every_id(tmp_path: Path) -> None:
    small = write_shard(tmp_path / "small", [np.full(50, 65_535)])
    large = write_shard(tmp_path / "large", [np.full(50, 70_000)], "int32")
    data = open_train(small, large, packing="concatenate", vocab_size=80_000)
    ids = np.arange(data.num_samples)
    assert sorted(data.rows(ids).tokens[:, 0]) == [65_535] * 3 + [70_000] * 3
    assert sorted(np.concatenate([data.rows(ids[i : i + 1]).tokens[:, 0] for i in ids])) == (
        [65_535] * 3 + [70_000] * 3
    )


def test_an_epoch_has_every_row_once_and_the_next_another_order(prefix: str) -> None:
    data = open_train(prefix, packing="concatenate")
    first = data.rows(np.arange(data.num_samples)).tokens
    second = data.rows(data.num_samples + np.arange(data.num_samples)).tokens
    assert (np.sort(first[:, 0]) == 16 * np.arange(data.num_samples)).all()
    assert (np.sort(second[:, 0]) == np.sort(first[:, 0])).all()
    assert (first != second).any()


def test_the_seed_changes_the_order_and_nothing_else(prefix: str) -> None:
    one, two = open_train(prefix, seed=1), open_train(prefix, seed=2)
    assert (np.sort(tokens_of(one)) == np.sort(tokens_of(two))).all()
    assert (one.rows(np.arange(9)).tokens != two.rows(np.arange(9)).tokens).any()


def test_document_ids_come_only_with_the_document_mask(prefix: str) -> None:
    ids = np.arange(20)
    assert open_train(prefix).rows(ids).document_ids is None
    rows = open_train(prefix, document_mask=True).rows(ids)
    assert rows.document_ids is not None
    assert rows.document_ids.dtype == np.int32
    begins = rows.tokens[:, :-1] == BOS
    assert (rows.document_ids == np.cumsum(begins, axis=1) - 1).all()


@pytest.mark.parametrize("workers", [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_any_number_of_ranks_reads_the_same_samples_after_a_resume(
    prefix: str, workers: tuple[int, int]
) -> None:
    dp, rows = workers
    data = open_train(prefix)
    for step in (4, 5, 6):
        ids = step_sample_ids(step, 8)
        costs = 1 + ids % 5
        dealt = ids[deal(costs, dp=dp, micro_batches=1, rows=rows)]
        read = np.concatenate([data.rows(rank.ravel()).tokens for rank in dealt])
        straight = data.rows(ids).tokens
        assert (read[np.argsort(dealt.ravel())] == straight).all()


# Split


def test_training_and_validation_share_no_document_and_lose_none(prefix: str) -> None:
    train, validation = open_both(prefix, packing="concatenate", sequence_length=1)
    held_out = DocumentSplit("validation", 0.1, 1).mask(0, len(LENGTHS))
    owner = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    assert validation is not None
    assert held_out[owner[np.unique(tokens_of(validation))]].all()
    assert not held_out[owner[np.unique(tokens_of(train))]].any()
    assert 20 < held_out.sum() < 60
    both = np.concatenate([np.unique(tokens_of(train)), np.unique(tokens_of(validation))])
    assert (np.sort(both) == np.arange(sum(LENGTHS))).all()


def test_a_document_stays_in_its_part_as_the_shard_grows() -> None:
    before = DocumentSplit("validation", 0.05, 7).mask(0, 1000)
    after = DocumentSplit("validation", 0.05, 7).mask(0, 5000)
    assert (after[:1000] == before).all()
    more = DocumentSplit("validation", 0.10, 7).mask(0, 1000)
    assert (more | ~before).all(), "a larger share keeps what was held out"


def test_validation_is_the_same_with_any_batch_and_does_not_move_training(prefix: str) -> None:
    train, validation = open_both(prefix)
    without, nothing = open_both(prefix, interval=0)
    assert nothing is None
    assert (train.rows(np.arange(9)).tokens == without.rows(np.arange(9)).tokens).all()
    _, again = open_both(prefix, num_sequences=9)
    assert validation is not None and again is not None
    assert (validation.rows(np.arange(4)).tokens == again.rows(np.arange(9)).tokens[:4]).all()


def test_validation_shards_leave_every_training_document_to_training(
    prefix: str, tmp_path: Path
) -> None:
    other = write_shard(tmp_path / "v", counting_documents([20] * 30))
    shards = (DatasetConfig(prefix=other),)
    train, validation = open_both(prefix, validation=shards, packing="concatenate")
    assert validation is not None and validation.sets[0].option == "data.validation[0]"
    assert train.num_samples == (sum(LENGTHS) - 1) // 16


# What does not fit is refused


def test_parts_too_small_for_one_row_are_named(prefix: str) -> None:
    with pytest.raises(UserError, match=r"data.train\[0\].*train part has .*sequence_length=20000"):
        open_both(prefix, sequence_length=20_000)
    with pytest.raises(
        UserError, match=r"num_sequences=400.*validation_fraction=0.1 gives \d+ rows"
    ):
        open_both(prefix, num_sequences=400)
    with pytest.raises(UserError, match="switch validation off"):
        open_both(prefix, sequence_length=9_000)


def test_a_cache_of_another_length_is_not_used_for_a_longer_one(prefix: str) -> None:
    assert open_train(prefix, sequence_length=16).rows(np.arange(3)).tokens.shape == (3, 17)
    assert open_train(prefix, sequence_length=64).rows(np.arange(3)).tokens.shape == (3, 65)


def write_sidecar(prefix: str, **record: object) -> None:
    tokenizer = {"identity": "run's own", "vocab_size": 25_000, "bos_id": BOS, **record}
    Path(f"{prefix}.json").write_text(json.dumps({"tokenizer": tokenizer}))


def test_a_shard_of_another_tokenizer_is_refused(prefix: str) -> None:
    write_sidecar(prefix, identity="another")
    with pytest.raises(UserError, match=r"data.train\[0\].*another.*data.tokenizer=tok"):
        open_train(prefix)


def test_a_shard_with_a_larger_vocabulary_is_refused(prefix: str) -> None:
    write_sidecar(prefix, vocab_size=30_001)
    with pytest.raises(UserError, match="30001 ids, more than model.vocab_size=30000"):
        open_train(prefix)


def test_a_shard_without_a_sidecar_is_taken_with_a_warning(prefix: str, heard) -> None:
    open_train(prefix)
    assert "no record of its tokenizer" in heard.text
    heard.clear()
    write_sidecar(prefix)
    assert not open_train(prefix).sets[0].check_ids
    assert "no record" not in heard.text


def test_an_id_outside_the_vocabulary_is_refused_before_the_model_sees_it(prefix: str) -> None:
    data = open_train(prefix, vocab_size=5000, packing="concatenate")
    with pytest.raises(UserError, match=r"token id \d+, but model.vocab_size=5000"):
        data.rows(np.arange(data.num_samples))


def test_bos_comes_from_the_tokenizer_its_eos_or_the_sidecar(
    prefix: str, tokenizer: FakeTokenizer
) -> None:
    tokenizer.bos_id = None
    assert open_train(prefix).bos_id == 0
    tokenizer.eos_id = None
    with pytest.raises(UserError, match="neither BOS nor EOS"):
        open_train(prefix)
    with pytest.raises(UserError, match="do not say which id"):
        open_train(prefix, tokenizer=None)
    assert open_train(prefix, tokenizer=None, packing="concatenate").bos_id is None
    write_sidecar(prefix)
    assert open_train(prefix, tokenizer=None).bos_id == BOS


def test_no_shard_at_all_is_refused() -> None:
    with pytest.raises(UserError, match=r"data.train is empty"):
        open_both()


# Blends, epochs, listings


def test_three_hundred_shards_are_opened_and_each_drawn_twice(tmp_path: Path) -> None:
    prefixes = [write_shard(tmp_path / f"s{i}", [np.full(50, i)]) for i in range(300)]
    data = open_train(*prefixes, weights=[1.0] * 300, sequence_length=48, packing="concatenate")
    rows = data.rows(np.arange(600))
    assert (np.bincount(rows.tokens[:, 0]) == 2).all()


def test_more_shards_than_open_files_are_refused_with_the_merge_tool(
    tmp_path: Path,
) -> None:
    prefixes = [write_shard(tmp_path / f"s{i}", [np.full(50, i)]) for i in range(40)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(list(Path("/proc/self/fd").iterdir())) + 30
    held: list[TokenDataset] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_allow_open_files", lambda needed: None)
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
        try:
            with pytest.raises(UserError, match="inspect_data.py merge"):
                held.append(open_train(*prefixes, packing="concatenate"))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_start_up_table_lists_weight_samples_epochs_and_tokens(tmp_path: Path) -> None:
    a = write_shard(tmp_path / "a", [np.arange(161)])  # 10 rows of 16
    b = write_shard(tmp_path / "b", [np.arange(321)])  # 20 rows
    by_weight = {"1:1": [1.0, 1.0], "10:20": [10.0, 20.0], "by size": [None, None]}
    samples = {"1:1": (15, 15), "10:20": (10, 20), "by size": (10, 20)}
    for name, weights in by_weight.items():
        data = open_train(a, b, weights=weights, packing="concatenate")
        header, *lines = (line.split("  ") for line in draw_table(data, 30).splitlines())
        columns = [cell.strip() for cell in header if cell.strip()]
        assert columns[:6] == ["set", "weight", "share", "samples", "epochs", "tokens"]
        cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
        assert tuple(int(row[3]) for row in cells) == samples[name]
        assert [row[5] for row in cells] == [f"{n * 16}" for n in samples[name]]
        assert float(cells[0][4]) == samples[name][0] / 10


def test_one_epoch_is_every_row_once_and_says_what_is_left_out(tmp_path: Path) -> None:
    prefix = write_shard(tmp_path / "s", [np.arange(1003)])
    data = open_train(prefix, sequence_length=10, packing="concatenate")
    assert data.num_samples_for_epochs(1) == 100
    steps, text = plan_epochs(data, 1, 4)
    assert steps == 25
    ids = np.concatenate([step_sample_ids(step, 4) for step in range(steps)])
    first_tokens = data.rows(ids).tokens[:, 0]
    assert (np.sort(first_tokens) == 10 * np.arange(100)).all()
    assert "25 steps of 4 use 100 samples (1,000 tokens); left out: 0 samples" in text
    assert "2 tokens that fill no row" in text
    assert plan_epochs(data, 1, 7)[0] == 14
    assert "left out: 2 samples of the last partial batch" in plan_epochs(data, 1, 7)[1]
    with pytest.raises(UserError, match="fewer than train.global_batch_size=101"):
        plan_epochs(data, 1, 101)


def test_epochs_of_weighted_sets_are_refused(tmp_path: Path) -> None:
    prefixes = [write_shard(tmp_path / name, [np.arange(100)]) for name in "ab"]
    data = open_train(*prefixes, weights=[1.0, 2.0], packing="concatenate")
    with pytest.raises(UserError, match="leave every weight null"):
        data.num_samples_for_epochs(1)
    data = open_train(*prefixes, weights=[1.0, 0.0], packing="concatenate")
    assert data.num_samples_for_epochs(3) == 3 * 6


@pytest.mark.parametrize("packing", ["best_fit", "concatenate"])
def test_the_listing_of_a_sample_shows_its_documents(tmp_path: Path, packing: str) -> None:
    prefix = write_shard(tmp_path / "s", counting_documents([100] + [3] * 10))
    data = open_all_documents(
        DataConfig(train=(DatasetConfig(prefix=prefix),), packing=packing, tokenizer="tok"),
        sequence_length=32,
        vocab_size=VOCABULARY,
    )
    seen: list[int] = []
    begins = np.cumsum([0, 100] + [3] * 9)
    for sample in range(data.num_samples):
        tokens = data.rows(np.array([sample])).tokens[0]
        for piece in sample_pieces(data, sample):
            shown = tokens[piece.column : piece.column + piece.length]
            first = begins[piece.document] + piece.offset
            assert shown.tolist() == list(range(first, first + piece.length))
            seen += shown.tolist()
        text = describe_sample(data, sample, decode=lambda ids: " ".join(map(str, ids)))
        assert text.startswith(f"sample {sample}: set {prefix}, epoch 0")
        assert all(f"document {p.document}," in text for p in sample_pieces(data, sample))
        assert all(str(tokens[p.column]) in text for p in sample_pieces(data, sample))
    if packing == "best_fit":
        assert len(set(seen)) == len(seen) >= 100
    else:  # the label that closes a row is the next row's first input
        twice = [32 * k for k in range(1, data.num_samples)]
        assert sorted(seen) == sorted([*range(data.num_samples * 32 + 1), *twice])
