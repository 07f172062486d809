"""One small interface over sentencepiece models and byte-level BPE `tokenizer.json` files.

Text never yields a special id: "<|eos|>" written in a document is encoded as ordinary characters,
so a document cannot end itself. BOS, EOS and padding are added by id, by whoever needs them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from megaparcae.data import engines
from megaparcae.errors import UserError
from megaparcae.log import logger

if TYPE_CHECKING:
    import tiktoken
    import tokenizers

BOS_NAMES = ("<|bos|>", "<s>", "<|begin_of_text|>", "<bos>", "<|startoftext|>")
EOS_NAMES = ("<|eos|>", "</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|eod|>", "<eod>")
PAD_NAMES = ("<|pad|>", "<pad>", "[PAD]")
TYPES = {
    "auto": "",
    "bpe": "bpe",
    "HuggingFaceTokenizer": "bpe",
    "sentencepiece": "sentencepiece",
    "SentencePieceTokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
}
"""Names of --tokenizer-type, Megatron's among them, and the kind each means."""


class Tokenizer(Protocol):
    """What the rest of the project knows of a tokenizer."""

    kind: str
    """"sentencepiece" or "bpe"."""
    path: Path
    """The model file."""
    identity: str
    """SHA-256 of the model file: two runs have the same tokenizer when this agrees."""
    vocab_size: int
    """Largest id that can occur + 1, added tokens included."""
    bos_id: int | None
    eos_id: int | None
    """End of text; shards end documents with it, where it is called EOD."""
    pad_id: int | None

    @property
    def engine(self) -> str:
        """The library that encodes."""

    @property
    def eod_id(self) -> int | None:
        """The id that ends a document: eos_id."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without BOS or EOS."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of several texts, one array (uint32 or int32) each."""

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = False) -> str:
        """Text of ids; special tokens appear by name unless skipped."""

    def check_engine(self, texts: Iterable[str]) -> None:
        """Compare a converted engine with the original on texts; fall back, with a message."""


class SentencePieceTokenizer:
    """A `.model` file run by sentencepiece, or by gigatoken where that gives equal ids."""

    kind = "sentencepiece"

    def __init__(self, path: Path, fast: bool = True) -> None:
        from sentencepiece import SentencePieceProcessor

        self.path = path
        self.identity = file_hash(path)
        try:
            self.model = SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError):
            raise UserError(
                f"tokenizer {path}: not a sentencepiece model; give a .model file that "
                "sentencepiece trained, or a tokenizer.json"
            ) from None
        self.vocab_size = self.model.vocab_size()
        self.bos_id = _present(self.model.bos_id())
        self.eos_id = _present(self.model.eos_id())
        self.pad_id = _present(self.model.pad_id())
        self.gigatoken: engines.Encode | None = None
        if fast:
            self.gigatoken = _if_equal(path, self.encode, lambda: engines.model_to_gigatoken(path))

    @property
    def engine(self) -> str:
        return "sentencepiece" if self.gigatoken is None else "gigatoken"

    @property
    def eod_id(self) -> int | None:
        return self.eos_id

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.model.EncodeAsIds(text)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encode = self.gigatoken or self.model.EncodeAsNumpy
        return [encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = False) -> str:
        parts: list[str] = []
        run: list[int] = []
        for index in (int(i) for i in ids):
            if not self.model.is_control(index):
                run.append(index)
                continue
            parts.append(self.model.decode(run))
            run = []
            if not skip_special:
                parts.append(self.model.id_to_piece(index))
        return "".join([*parts, self.model.decode(run)])

    def check_engine(self, texts: Iterable[str]) -> None:
        if self.gigatoken and _differs(self.path, "gigatoken", self.gigatoken, self.encode, texts):
            self.gigatoken = None


class BPETokenizer:
    """A `tokenizer.json`, run by gigatoken or tiktoken where they give equal ids, else by
    `tokenizers`."""

    kind = "bpe"

    def __init__(self, path: Path, fast: bool = True) -> None:
        self.path = path
        self.identity = file_hash(path)
        definition = _read_json(path)
        self.reference = _reference_engine(path)
        specials = {token["content"]: token["id"] for token in definition.get("added_tokens") or []}
        vocabulary = definition["model"]["vocab"]
        largest = max([*vocabulary.values(), *specials.values()], default=-1)
        self.vocab_size = largest + 1
        names = _declared_names(path.parent)
        known = specials | {name: vocabulary[name] for name in names.values() if name in vocabulary}
        self.bos_id = _find(known, names.get("bos_token"), BOS_NAMES)
        self.eos_id = _find(known, names.get("eos_token"), EOS_NAMES)
        self.pad_id = _find(known, names.get("pad_token"), PAD_NAMES)
        self.encoding: tiktoken.Encoding | None = None
        self.gigatoken: engines.Encode | None = None
        if fast:
            self._convert(definition)

    @property
    def engine(self) -> str:
        if self.gigatoken is not None:
            return "gigatoken"
        return "tokenizers" if self.encoding is None else "tiktoken"

    @property
    def eod_id(self) -> int | None:
        return self.eos_id

    def encode(self, text: str) -> list[int]:
        return (
            self._encode_slowly(text)
            if self.encoding is None
            else self.encoding.encode_ordinary(text)
        )

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        if self.gigatoken is not None:
            return [self.gigatoken(text) for text in texts]
        if self.encoding is None:
            return [np.array(self._encode_slowly(text), dtype=np.uint32) for text in texts]
        # The buffer skips one Python integer per token; no special token is allowed in text.
        encode_to_buffer = self.encoding._core_bpe.encode_to_tiktoken_buffer
        nothing: frozenset[str] = frozenset()
        return [np.frombuffer(encode_to_buffer(text, nothing), dtype=np.uint32) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = False) -> str:
        return self.reference.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def check_engine(self, texts: Iterable[str]) -> None:
        texts = list(texts)
        slowly = self._encode_slowly
        if self.gigatoken and _differs(self.path, "gigatoken", self.gigatoken, slowly, texts):
            self.gigatoken = None
        if self.encoding is None:
            return
        text = engines.first_difference(self.encoding.encode_ordinary, slowly, texts)
        if text is not None:
            self._fall_back(f"tiktoken gives other ids for {text[:60]!r}")

    def _encode_slowly(self, text: str) -> list[int]:
        return self.reference.encode(text, add_special_tokens=False).ids

    def _convert(self, definition: dict[str, Any]) -> None:
        slowly = self._encode_slowly
        self.gigatoken = _if_equal(self.path, slowly, lambda: engines.to_gigatoken(definition))
        try:
            self.encoding = engines.to_tiktoken(definition)
        except engines.NotConvertible as reason:
            return self._fall_back(str(reason))
        self.check_engine(engines.SAMPLE)

    def _fall_back(self, reason: str) -> None:
        self.encoding = None
        if self.gigatoken is None:
            logger.warning(
                f"tokenizer {self.path}: the slower `tokenizers` engine is used, because {reason}"
            )


def _if_equal(
    path: Path, reference: Callable[[str], list[int]], convert: Callable[[], engines.Encode]
) -> engines.Encode | None:
    """gigatoken's encoder, or None where it cannot run the tokenizer or gives other ids."""
    try:
        encode = convert()
    except engines.NotConvertible as reason:
        logger.debug(f"tokenizer {path}: {reason}")
        return None
    return None if _differs(path, "gigatoken", encode, reference, engines.SAMPLE) else encode


def _differs(
    path: Path,
    name: str,
    encode: engines.Encode,
    reference: Callable[[str], list[int]],
    texts: Iterable[str],
) -> bool:
    """Whether an engine gives other ids than the original on a text, which is then said."""
    text = engines.first_difference(lambda text: encode(text).tolist(), reference, texts)
    if text is not None:
        logger.warning(
            f"tokenizer {path}: {name} is not used, because it gives other ids for {text[:60]!r}"
        )
    return text is not None


def load_tokenizer(path: str | Path, fast: bool = True) -> Tokenizer:
    """The tokenizer of a file (.model or .json) or of a folder that holds one.

    fast=False keeps it on the library that defines it. Raises UserError.
    """
    file = _model_file(Path(path))
    if file.suffix == ".json":
        return BPETokenizer(file, fast)
    return SentencePieceTokenizer(file, fast)


def require_type(tokenizer: Tokenizer, name: str) -> None:
    """Refuse a --tokenizer-type that is not the kind of the file; our names and Megatron's."""
    if name not in TYPES:
        raise UserError(f"--tokenizer-type {name}: choose one of {', '.join(TYPES)}")
    if TYPES[name] not in ("", tokenizer.kind):
        raise UserError(
            f"--tokenizer-type {name} does not fit {tokenizer.path}, which is a {tokenizer.kind} "
            "file; leave the type out or give the other file"
        )


def file_hash(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _model_file(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise UserError(
            f"tokenizer {path} does not exist; give a sentencepiece .model, a tokenizer.json or a "
            "folder that holds one (tools/train_tokenizer.py makes both kinds)"
        )
    for name in ("tokenizer.model", "tokenizer.json"):
        if (path / name).is_file():
            return path / name
    models = sorted(path.glob("*.model"))
    if len(models) == 1:
        return models[0]
    raise UserError(
        f"tokenizer folder {path} holds {len(models)} .model files and no tokenizer.json; give the "
        "path of the file itself"
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        definition: dict[str, Any] = json.loads(path.read_bytes())
        if isinstance(definition["model"]["vocab"], dict):
            return definition
    except (ValueError, KeyError, TypeError):
        pass
    raise UserError(
        f"tokenizer {path}: not a BPE tokenizer.json of the `tokenizers` library; give such a file "
        "or a sentencepiece .model"
    )


def _reference_engine(path: Path) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        reference = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"tokenizer {path}: {error}; give a valid tokenizer.json") from None
    reference.no_truncation()
    reference.no_padding()
    reference.encode_special_tokens = True
    return reference


def _declared_names(folder: Path) -> dict[str, str]:
    """Names of the special tokens that the Hugging Face files beside a tokenizer.json declare."""
    names: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        if not (folder / file).is_file():
            continue
        declared = json.loads((folder / file).read_bytes())
        for key in ("bos_token", "eos_token", "pad_token"):
            value = declared.get(key)
            name = value.get("content") if isinstance(value, dict) else value
            if isinstance(name, str):
                names[key] = name
    return names


def _find(known: dict[str, int], declared: str | None, usual: Sequence[str]) -> int | None:
    for name in (declared, *usual):
        if name in known:
            return known[name]
    return None


def _present(index: int) -> int | None:
    return index if index >= 0 else None
