"""Tokenizers: both kinds restore their text, and the fast engine gives the ids of the original."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import numpy as np
import pytest
from text_fixtures import SAMPLE

from megaparcae.data import engines
from megaparcae.data.inputs import find_sources
from megaparcae.data.tokenizer import BPETokenizer, Tokenizer, load_tokenizer
from megaparcae.data.train_tokenizer import train_bpe, train_sentencepiece, training_texts
from megaparcae.errors import UserError


def sample_texts() -> list[str]:
    return [json.loads(line)["text"] for line in SAMPLE.read_text().splitlines()]


def texts():
    return training_texts(find_sources([str(SAMPLE)]), "text", 0, quiet=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizers")
    train_bpe(texts(), 1000, folder / "bpe", show=False)
    train_sentencepiece(texts(), 1000, folder / "sentencepiece", 1, show=False)
    return folder


@pytest.fixture(params=["bpe", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, folder: Path) -> Tokenizer:
    return load_tokenizer(folder / request.param)


def test_every_text_is_restored(tokenizer: Tokenizer) -> None:
    for text in [*sample_texts()[:20], *engines.SAMPLE, " lead", "trail \n", "a\r\nb", "🤖\u2028"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_batch_is_its_texts(tokenizer: Tokenizer) -> None:
    batch = tokenizer.encode_batch(["Hello world", "", "x"])
    assert [ids.tolist() for ids in batch] == [
        tokenizer.encode(t) for t in ("Hello world", "", "x")
    ]
    assert all(isinstance(ids, np.ndarray) and ids.dtype.kind in "iu" for ids in batch)


def test_special_tokens_have_the_documented_ids(folder: Path) -> None:
    bpe, pieces = load_tokenizer(folder / "bpe"), load_tokenizer(folder / "sentencepiece")
    assert (bpe.bos_id, bpe.eos_id, bpe.pad_id, bpe.vocab_size) == (0, 1, 2, 1000)
    assert (pieces.bos_id, pieces.eos_id, pieces.pad_id, pieces.vocab_size) == (1, 2, 3, 1000)
    assert bpe.eod_id == 1 and pieces.eod_id == 2
    assert bpe.decode([0, *bpe.encode("a"), 1]) == "<|bos|>a<|eos|>"
    assert pieces.decode([1, *pieces.encode("a"), 2]) == "<s>a</s>"
    assert bpe.decode([0, *bpe.encode("a"), 1], skip_special=True) == "a"


def test_special_tokens_in_text_are_ordinary_text(folder: Path) -> None:
    for name, fast in (("bpe", True), ("bpe", False), ("sentencepiece", True)):
        tokenizer = load_tokenizer(folder / name, fast)
        ids = tokenizer.encode("a <|eos|> </s> <|bos|><s> b")
        assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids)


def test_the_fast_engine_gives_the_ids_of_the_original(folder: Path) -> None:
    fast, slow = load_tokenizer(folder / "bpe"), load_tokenizer(folder / "bpe", fast=False)
    assert (fast.engine, slow.engine) == ("tiktoken", "tokenizers")
    for text in [*sample_texts(), *engines.SAMPLE]:
        assert fast.encode(text) == slow.encode(text)


def changed(folder: Path, target: Path, change) -> BPETokenizer:
    definition = json.loads((folder / "bpe" / "tokenizer.json").read_bytes())
    change(definition)
    (target / "tokenizer.json").write_text(json.dumps(definition))
    return BPETokenizer(target / "tokenizer.json")


def swap_ids(definition: dict) -> None:
    vocabulary = definition["model"]["vocab"]
    last, before = list(vocabulary)[-1], list(vocabulary)[-2]
    vocabulary[last], vocabulary[before] = vocabulary[before], vocabulary[last]


def normalize(definition: dict) -> None:
    definition["normalizer"] = {"type": "NFC"}


def split_otherwise(definition: dict) -> None:
    definition["pre_tokenizer"] = {"type": "Whitespace"}


def add_plain_token(definition: dict) -> None:
    token = {**definition["added_tokens"][0], "content": "ab", "id": 1000, "special": False}
    definition["added_tokens"].append(token)


@pytest.mark.parametrize(
    "change, reason",
    [
        (swap_ids, "not in merge order"),
        (normalize, "normalizes text"),
        (split_otherwise, "pre-tokenizer"),
        (add_plain_token, "added tokens that are not special"),
    ],
)
def test_what_cannot_be_converted_falls_back_with_the_reason(
    folder: Path, tmp_path: Path, caplog, change, reason: str
) -> None:
    logging.getLogger("megaparcae").propagate = True
    with caplog.at_level(logging.WARNING):
        tokenizer = changed(folder, tmp_path, change)
    assert tokenizer.engine == "tokenizers" and reason in caplog.text
    assert tokenizer.encode("The whale")


def test_a_difference_found_on_text_falls_back(folder: Path, caplog) -> None:
    logging.getLogger("megaparcae").propagate = True
    tokenizer = BPETokenizer(folder / "bpe" / "tokenizer.json")
    other = json.loads((folder / "bpe" / "tokenizer.json").read_bytes())
    other["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\S+|\s+"
    tokenizer.encoding = engines.to_tiktoken(other)
    with caplog.at_level(logging.WARNING):
        tokenizer.check_engine(["ok", "two words, and 1234 numbers"])
    assert tokenizer.engine == "tokenizers" and "other ids for 'two words" in caplog.text


def without_gigatoken(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gigatoken", "gigatoken.gigatoken_rs", "gigatoken._load.sentencepiece"):
        monkeypatch.setitem(sys.modules, name, None)


def odd_texts() -> list[str]:
    """Every kind of character in random company."""
    random = np.random.default_rng(0)
    ranges = [(0, 128), (0x80, 0x3000), (0x4E00, 0x4F00), (0xE000, 0x110000)]
    pools = [lambda low=low, high=high: chr(random.integers(low, high)) for low, high in ranges]
    pools += [lambda some=some: str(random.choice(list(some))) for some in (" \n\t'", "aeinst 19")]
    return ["".join(pools[random.integers(6)]() for _ in range(40)) for _ in range(500)]


@pytest.mark.parametrize("kind", ["gpt2", "sentencepiece"])
def test_gigatoken_gives_the_ids_of_the_original(
    folder: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gigatoken")

    def split_as_gpt2(definition: dict) -> None:
        definition["pre_tokenizer"] = {
            **definition["pre_tokenizer"]["pretokenizers"][1],
            "use_regex": True,
        }

    path = folder / "sentencepiece"
    if kind == "gpt2":
        path = changed(folder, tmp_path, split_as_gpt2).path
    fast = load_tokenizer(path)
    assert fast.engine == "gigatoken"
    without_gigatoken(monkeypatch)
    plain = load_tokenizer(path)
    assert plain.engine == ("tiktoken" if kind == "gpt2" else "sentencepiece")
    texts = [*sample_texts(), *engines.SAMPLE, *odd_texts()]
    for one, other in zip(fast.encode_batch(texts), plain.encode_batch(texts), strict=True):
        assert one.tolist() == other.tolist()


@pytest.mark.parametrize("kind", ["bpe", "sentencepiece"])
def test_gigatoken_is_not_used_where_its_ids_differ(
    folder: Path, kind: str, caplog, monkeypatch: pytest.MonkeyPatch
) -> None:
    logging.getLogger("megaparcae").propagate = True
    without_gigatoken(monkeypatch)
    plain = load_tokenizer(folder / kind)

    def encode(text: str) -> np.ndarray:
        return plain.encode_batch([text.replace("hale", "in")])[0]

    monkeypatch.setattr(engines, "to_gigatoken", lambda definition: encode)
    monkeypatch.setattr(engines, "model_to_gigatoken", lambda path: encode)
    with caplog.at_level(logging.WARNING):
        tokenizer = load_tokenizer(folder / kind)
        assert tokenizer.engine == plain.engine, "found by the texts that every start compares"
        assert "gigatoken is not used" in caplog.text and "The Whale" in caplog.text
        caplog.clear()
        monkeypatch.setattr(engines, "SAMPLE", ("ok",))
        tokenizer = load_tokenizer(folder / kind)
        assert tokenizer.engine == "gigatoken"
        tokenizer.check_engine(["ok", "a whale"])
    assert tokenizer.engine == plain.engine, "found by the sample of the input"
    assert "gigatoken is not used, because it gives other ids for 'a whale'" in caplog.text
    assert tokenizer.encode_batch(["a whale"])[0].tolist() == plain.encode("a whale")


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("no.json", None, "does not exist"),
        ("bad.json", "{}", "not a BPE tokenizer.json"),
        ("bad.json", "not json", "not a BPE tokenizer.json"),
        ("bad.model", "nothing", "not a sentencepiece model"),
    ],
)
def test_files_that_are_no_tokenizer_are_refused(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path / name)
    if content is None:
        with pytest.raises(UserError, match=r"holds 0 \.model files and no tokenizer\.json"):
            load_tokenizer(tmp_path)


def test_names_declared_beside_a_tokenizer_json_win(folder: Path, tmp_path: Path) -> None:
    source = (folder / "bpe" / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(source)
    declared = {"eos_token": {"content": "<|pad|>"}, "bos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(declared))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eos_id, tokenizer.bos_id) == (2, 0)
    assert tokenizer.identity == load_tokenizer(folder / "bpe").identity


def test_impossible_vocabularies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--vocab-size=100 must be at least 259"):
        train_bpe(texts(), 100, tmp_path / "a", show=False)
    with pytest.raises(UserError, match=r"--vocab-size=100 must be above 260"):
        train_sentencepiece(texts(), 100, tmp_path / "a", 1, show=False)
    with pytest.raises(UserError, match=r"--vocab-size=9000: sentencepiece cannot"):
        train_sentencepiece(iter(["a few words"]), 9000, tmp_path / "a", 1, show=False)
    with pytest.raises(UserError, match="no text found to train on"):
        train_bpe(iter(["", " "]), 300, tmp_path / "a", show=False)
    assert not (tmp_path / "a").exists()
