"""Any of our tokenizers as a fast tokenizer folder: sentencepiece models and tokenizer.json files.

The exported tokenizer encodes exactly as the one that wrote the shards: no token is added by
itself, and text never yields a special id ("<s>" in a document is three characters). Where
sentencepiece's own algorithm and the fast one would differ, the export is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    processors,
)

from megaparcae.errors import UserError

SPACE = "\u2581"
"""Sentencepiece's visible space."""

BOS_NAMES = ("<|bos|>", "<s>", "<|begin_of_text|>", "<bos>", "<|startoftext|>")
EOS_NAMES = ("<|eos|>", "</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|eod|>", "<eod>")
PAD_NAMES = ("<|pad|>", "<pad>", "[PAD]")
"""Special tokens by usual name, in the order in which data preparation looks for them."""

PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "  two leading spaces, trailing  ",
    "line one\nline two\n\n\tindented",
    "1234567890 3.14159 -2e10",
    "def f(x):\n    return x ** 2  # comment",
    "na\u00efve caf\u00e9 \u2014 \u201cquotes\u201d",
    "\u4f60\u597d\uff0c\u4e16\u754c \U0001f600\U0001f680",
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u03b1\u03b2\u03b3",
    "aaaaaaaaaaaaaaaa  bbbb",
    "<s> not a token </s>",
    "",
)
"""Texts on which the exported tokenizer must agree with the original."""


@dataclass(frozen=True)
class TokenizerFacts:
    """What the rest of the export needs to know."""

    vocab_size: int
    """Largest id + 1."""
    bos: int | None
    eos: int | None
    pad: int | None


def export_tokenizer(source: str | Path, folder: Path, max_length: int) -> TokenizerFacts:
    """Write tokenizer.json and tokenizer_config.json of the tokenizer at `source` into `folder`."""
    path = tokenizer_file(Path(source))
    if path.suffix == ".model":
        tokenizer = from_sentencepiece(path)
        check_same_ids(path, tokenizer)
        specials = _sentencepiece_specials(path)
        (folder / "tokenizer.model").write_bytes(path.read_bytes())
    else:
        tokenizer = Tokenizer.from_file(str(path))
        specials = _json_specials(path, tokenizer)
    specials.setdefault("pad_token", specials.get("eos_token"))
    specials = {name: token for name, token in specials.items() if token is not None}
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if tokenizer.encode("").ids:  # it would add BOS or the like
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "split_special_tokens": True,
        **specials,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    ids = {name: tokenizer.token_to_id(token) for name, token in specials.items() if token}
    return TokenizerFacts(
        vocab_size=max(tokenizer.get_vocab().values()) + 1,
        bos=ids.get("bos_token"),
        eos=ids.get("eos_token"),
        pad=ids.get("pad_token"),
    )


def tokenizer_file(source: Path) -> Path:
    """The .model or tokenizer.json file that a path or folder means."""
    if source.is_file():
        return source
    models = sorted(source.glob("*.model"))
    candidates = [source / "tokenizer.model", source / "tokenizer.json", *models]
    for path in candidates:
        if path.is_file():
            return path
    raise UserError(
        f"tokenizer {source} has neither tokenizer.json nor a sentencepiece .model file; "
        "name the file or its folder with --tokenizer"
    )


def from_sentencepiece(path: Path) -> Tokenizer:
    """The fast tokenizer that does what a sentencepiece BPE or unigram model does."""
    from sentencepiece import sentencepiece_model_pb2 as pb

    proto = pb.ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    except Exception as error:
        raise UserError(f"{path} is not a sentencepiece model; check --tokenizer") from error
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    unknown = pieces[proto.trainer_spec.unk_id][0]
    fallback = proto.trainer_spec.byte_fallback
    match proto.trainer_spec.model_type:
        case 2:
            vocab = {piece: i for i, (piece, _) in enumerate(pieces)}
            merges = bpe_merges({p.piece: p.score for p in proto.pieces if p.type == 1})
            model: models.Model = models.BPE(
                vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=fallback
            )
        case 1:
            model = models.Unigram(pieces, proto.trainer_spec.unk_id, byte_fallback=fallback)
        case _:
            raise UserError(f"{path} is neither a BPE nor a unigram model; train one of these")
    tokenizer = Tokenizer(model)
    _set_normalizer(tokenizer, proto.normalizer_spec)
    prefix = proto.normalizer_spec.add_dummy_prefix
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    for piece in proto.pieces:
        if piece.type in (2, 3):  # unknown and control: never found in text
            tokenizer.add_special_tokens([AddedToken(piece.piece, special=True, normalized=False)])
        elif piece.type == 4:
            tokenizer.add_tokens([AddedToken(piece.piece, normalized=False)])
    # sentencepiece never reads a control symbol out of the text, so "<s>" in a document is text.
    tokenizer.encode_special_tokens = True
    return tokenizer


def bpe_merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Every way to build a piece from two pieces, best piece first."""
    merges = []
    for piece, score in scores.items():
        splits = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        merges += [(score, *s) for s in splits if s[0] in scores and s[1] in scores]
    merges.sort(key=lambda merge: -merge[0])  # stable: shorter left halves first
    return [(left, right) for _, left, right in merges]


def _set_normalizer(tokenizer: Tokenizer, spec: object) -> None:
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:  # type: ignore[attr-defined]
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))  # type: ignore[attr-defined]
    if spec.remove_extra_whitespaces:  # type: ignore[attr-defined]
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:  # type: ignore[attr-defined]
        steps.append(normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def check_same_ids(path: Path, tokenizer: Tokenizer) -> None:
    """Refuse a conversion that doesn't give sentencepiece's own ids."""
    import sentencepiece

    original = sentencepiece.SentencePieceProcessor(model_file=str(path))
    # In a fast unigram model a control symbol can't be kept from matching text.
    probes = [t for t in PROBES if isinstance(tokenizer.model, models.BPE) or "<s>" not in t]
    for text in probes:
        theirs, ours = original.encode(text), tokenizer.encode(text, add_special_tokens=False).ids
        if theirs != ours:
            raise UserError(
                f"{path} can't be exported as a fast tokenizer: {text!r} gives {ours[:8]} instead "
                f"of {theirs[:8]}; train one with tools/train_tokenizer.py"
            )


def _sentencepiece_specials(path: Path) -> dict[str, str | None]:
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ids = {
        "bos_token": model.bos_id(),
        "eos_token": model.eos_id(),
        "unk_token": model.unk_id(),
        "pad_token": model.pad_id(),
    }
    found: dict[str, str | None] = {n: model.id_to_piece(i) for n, i in ids.items() if i >= 0}
    pieces = {model.id_to_piece(i) for i in range(model.get_piece_size()) if model.is_control(i)}
    return _fill(found, pieces)


def _json_specials(path: Path, tokenizer: Tokenizer) -> dict[str, str | None]:
    """From the files beside tokenizer.json, or from well-known names."""
    found: dict[str, str | None] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        beside = path.parent / name
        content = json.loads(beside.read_text()) if beside.is_file() else {}
        for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
            token = content.get(key)
            token = token.get("content") if isinstance(token, dict) else token
            if token is not None and tokenizer.token_to_id(token) is not None:
                found[key] = token
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    return _fill(found, added)


def _fill(found: dict[str, str | None], known: set[str]) -> dict[str, str | None]:
    """Well-known names for what isn't declared; a single document mark serves as BOS and EOS."""
    for key, names in (
        ("eos_token", EOS_NAMES),
        ("bos_token", BOS_NAMES),
        ("pad_token", PAD_NAMES),
    ):
        if key not in found:
            token = next((name for name in names if name in known), None)
            if token is not None:
                found[key] = token
    if "bos_token" not in found and "eos_token" in found:
        found["bos_token"] = found["eos_token"]
    return found
