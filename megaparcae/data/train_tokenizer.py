"""Training of tokenizers: sentencepiece BPE with byte fallback, byte-level BPE."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from megaparcae.data.blocks import iterate_blocks
from megaparcae.data.inputs import Source
from megaparcae.data.progress import Progress
from megaparcae.data.records import load_block, read_records
from megaparcae.data.writer import require_writable_folder
from megaparcae.errors import UserError
from megaparcae.log import logger

SPLIT = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
"""The paper's split pattern: GPT-4's with numbers of at most two digits (as in nanochat)."""
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
"""Ids 0, 1, 2 of a byte-level BPE."""
PIECE_CHARACTERS = 10_000
"""Longest stretch of a document that a trainer sees at once."""


def training_texts(
    sources: Sequence[Source], key: str, max_bytes: int, quiet: bool = False
) -> Iterator[str]:
    """Texts for training, cut at PIECE_CHARACTERS, until max_bytes (0: all) are read."""
    total = sum(source.size for source in sources)
    progress = Progress("read", min(total, max_bytes) if max_bytes else total, quiet)
    num_bytes = 0
    problems = []
    for block in iterate_blocks(sources):
        for record in read_records(load_block(block, [key]), [key]):
            if record.problem:
                problems.append(record.problem)
                continue
            text = record.texts[0]
            for start in range(0, len(text), PIECE_CHARACTERS):
                yield text[start : start + PIECE_CHARACTERS]
            num_bytes += record.num_bytes[0]
            progress.advance(record.num_bytes[0])
            if max_bytes and num_bytes >= max_bytes:
                progress.end()
                return
    progress.end()
    if problems and not quiet:
        logger.warning("%d documents left out, the first: %s", len(problems), problems[0])


def train_bpe(texts: Iterator[str], vocab_size: int, folder: Path, show: bool = True) -> Path:
    """Byte-level BPE -> folder/tokenizer.json and tokenizer_config.json; ids in merge order."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    least = 256 + 3
    if vocab_size < least:
        raise UserError(
            f"--vocab-size={vocab_size} must be at least {least} (256 bytes and 3 special tokens)"
        )
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=show,
    )
    tokenizer.train_from_iterator(_not_empty(texts), trainer)
    require_writable_folder(folder, "--output", str(folder))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
    _write(folder / "tokenizer_config.json", json.dumps(config, indent=1).encode())
    path = folder / "tokenizer.json"
    _write(path, tokenizer.to_str(pretty=False).encode())
    return path


def train_sentencepiece(
    texts: Iterator[str], vocab_size: int, folder: Path, num_threads: int, show: bool = True
) -> Path:
    """Sentencepiece BPE -> folder/tokenizer.model; ids 0 <unk>, 1 <s>, 2 </s>, 3 <pad>.

    Every text can be restored from its ids: no normalisation, no dropped spaces, bytes for
    characters outside the vocabulary.
    """
    import io

    from sentencepiece import SentencePieceTrainer

    least = 256 + 4
    if vocab_size <= least:
        raise UserError(
            f"--vocab-size={vocab_size} must be above {least} (256 bytes and 4 special tokens)"
        )
    model = io.BytesIO()
    lines = (line for text in _not_empty(texts) for line in text.splitlines() if line.strip())
    try:
        SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=4 * PIECE_CHARACTERS,
            num_threads=num_threads,
            pad_id=3,
            minloglevel=0 if show else 2,
        )
    except RuntimeError as error:
        reason = str(error).replace("\n", " ")
        raise UserError(
            f"--vocab-size={vocab_size}: sentencepiece cannot make that many pieces of this text "
            f"({reason[:160]}); use fewer, or more text"
        ) from None
    require_writable_folder(folder, "--output", str(folder))
    path = folder / "tokenizer.model"
    _write(path, model.getvalue())
    return path


def _not_empty(texts: Iterator[str]) -> Iterator[str]:
    """The texts; UserError when there is none."""
    found = False
    for text in texts:
        found = found or bool(text.strip())
        yield text
    if not found:
        raise UserError("--input: no text found to train on; check file and --json-key")


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
