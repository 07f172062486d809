"""The tokenizer of an export encodes as the one that made the shards, and knows BOS and EOS."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from test_export import FP32, SMALL, random_weights

from megaparcae.data.tokenizer import load_tokenizer
from megaparcae.errors import UserError
from megaparcae.hf.export import export_hf
from megaparcae.hf.tokenizer import PROBES

TEXT = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the "
    "age of foolishness, it was the epoch of belief, it was the epoch of incredulity. "
)


def sentencepiece_model(folder: Path, **options: object) -> Path:
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT, TEXT.upper(), *PROBES]),
        model_prefix=str(folder / "tok"),
        vocab_size=420,
        hard_vocab_limit=False,
        byte_fallback=True,
        minloglevel=2,
        **options,
    )
    return folder / "tok.model"


def byte_bpe(folder: Path, adds_bos: bool = False) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|bos|>", "<|eos|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


MAKERS = {
    "sentencepiece": lambda folder: sentencepiece_model(
        folder, model_type="bpe", normalization_rule_name="identity",
        remove_extra_whitespaces=False, add_dummy_prefix=False,
    ),
    "sentencepiece, like Llama's": lambda folder: sentencepiece_model(
        folder, model_type="bpe", normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    ),
    "sentencepiece, default": lambda folder: sentencepiece_model(folder, model_type="bpe"),
    "sentencepiece unigram": lambda folder: sentencepiece_model(folder, model_type="unigram"),
    "byte-level BPE": byte_bpe,
    "byte-level BPE that adds BOS": lambda folder: byte_bpe(folder, adds_bos=True),
}  # fmt: skip


@pytest.mark.parametrize("kind", MAKERS)
def test_the_exported_tokenizer_gives_the_ids_of_the_shards(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = MAKERS[kind](tmp_path)
    ours = load_tokenizer(source)
    config = dataclasses.replace(SMALL, vocab_size=ours.vocab_size)
    out = export_hf(random_weights(config), config, source, tmp_path / "out", FP32)
    exported = AutoTokenizer.from_pretrained(out, trust_remote_code=True)
    assert exported.is_fast
    probes = [text for text in PROBES if "unigram" not in kind or "<s>" not in text]
    for text in [*probes, TEXT, "<|eos|> in a text"]:
        assert exported.encode(text) == ours.encode(text), text
        assert exported.decode(exported.encode(text)) == ours.decode(ours.encode(text))
    assert (exported.bos_token_id, exported.eos_token_id) == (ours.bos_id, ours.eos_id)
    assert exported.pad_token_id == (ours.eos_id if ours.pad_id is None else ours.pad_id)
    for name in ("config.json", "generation_config.json"):
        content = json.loads((out / name).read_text())
        assert content["eos_token_id"] == ours.eos_id
        assert content["bos_token_id"] == ours.bos_id


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    source = byte_bpe(tmp_path)
    with pytest.raises(UserError, match="vocab_size=259"):
        export_hf(random_weights(SMALL), SMALL, source, tmp_path / "out", FP32)
    assert not (tmp_path / "out").exists()


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer.json"):
        export_hf(random_weights(SMALL), SMALL, tmp_path, tmp_path / "out", FP32)


@pytest.mark.slow
def test_pipeline_generates_text(tmp_path: Path) -> None:
    from transformers import pipeline

    source = byte_bpe(tmp_path)
    vocabulary = load_tokenizer(source).vocab_size
    config = dataclasses.replace(SMALL, vocab_size=vocabulary, sequence_length=128)
    out = export_hf(random_weights(config), config, source, tmp_path / "out", FP32)
    speak = pipeline("text-generation", model=str(out), trust_remote_code=True)
    texts = speak(["It was", "the age of"], max_new_tokens=5, do_sample=False, batch_size=2)
    assert texts[0][0]["generated_text"].startswith("It was")
    alone = speak("It was", max_new_tokens=5, do_sample=False, num_loops=8)
    assert alone[0]["generated_text"] == texts[0][0]["generated_text"]
    assert torch.is_tensor(speak.model.lm_head.weight)
