"""Faster engines for a tokenizer file: equal ids, or not used.

tiktoken (7 times `tokenizers`) runs a byte-level BPE `tokenizer.json` whose vocabulary is in merge
order, since it merges the pair whose result has the lowest id where `tokenizers` takes the earliest
merge rule. gigatoken (optional) is many times faster again. It runs the split patterns that are
written into it, GPT-2's and Llama 3's among them, and sentencepiece's BPE with byte fallback. What
can be read off the file is checked here; `first_difference` compares two engines on text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import tiktoken

    Encode = Callable[[str], np.ndarray]
    """Ids (uint32 or int32) of a text, special tokens never among them."""

GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SAMPLE = (
    "The year 1851: it's \"Moby-Dick; or, The Whale\" (635 pp.), don't you'll WE'RE I'd?\n\n"
    "\tdef f(x):\r\n        return x**2 + 3.14159e-10  # 12345678\n   \n \n",
    "naïve café Ωμέγα Привет мир 你好，世界 こんにちは 한국어",
    "العربية हिन्दी ไทย 👩‍👩‍👧🇫🇷🤖 ﬁ½²e\u0301",
    "\x00\x01\x7f\u00a0\u2028\ufeff\ufffd \u3000 a  b   c    d\t\te",
    "\r\rf\n\n\n\ng <|eos|> </s> 1st2nd",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa0000000000000000-------------------================*****",
    " ",
    "",
)
"""Texts on which two engines would differ if their split patterns or merges did."""


class NotConvertible(Exception):
    """Why a tokenizer file cannot run under an engine."""


def to_tiktoken(definition: dict[str, Any]) -> tiktoken.Encoding:
    """The encoding of a parsed tokenizer.json; raises NotConvertible with the reason."""
    pattern = _split_pattern(definition)
    model = definition["model"]
    if model.get("type") != "BPE" or model.get("dropout") or model.get("byte_fallback"):
        raise NotConvertible("its model is not a plain BPE")
    if definition.get("normalizer") is not None:
        raise NotConvertible("it normalizes text")
    if any(model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix")):
        raise NotConvertible("its pieces have a prefix or suffix")
    added = definition.get("added_tokens") or []
    if not all(token["special"] for token in added):
        raise NotConvertible("it has added tokens that are not special")
    specials = {token["content"]: token["id"] for token in added}
    ranks = _ranks(model["vocab"], specials)
    _check_merge_order(model["vocab"], model["merges"])
    try:
        import tiktoken
    except ImportError:
        raise NotConvertible("tiktoken is not installed") from None
    try:
        return tiktoken.Encoding(
            "converted", pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials
        )
    except Exception as error:  # tiktoken raises plain ValueError for a pattern it cannot compile
        raise NotConvertible(f"tiktoken refuses it ({error})") from None


def to_gigatoken(definition: dict[str, Any]) -> Encode:
    """gigatoken's encoder of a parsed tokenizer.json; raises NotConvertible with the reason."""
    try:
        from gigatoken.gigatoken_rs import load_hf_json
    except ImportError:
        raise NotConvertible("gigatoken is not installed") from None
    added = [token for token in definition.get("added_tokens") or [] if not token["special"]]
    try:
        encode: Encode = load_hf_json(json.dumps({**definition, "added_tokens": added})).encode
    except Exception as error:  # RuntimeError, with the place in its source in further lines
        raise NotConvertible(f"gigatoken does not know it ({_first_line(error)})") from None
    return encode


def model_to_gigatoken(path: Path) -> Encode:
    """gigatoken's encoder of a sentencepiece model; raises NotConvertible with the reason."""
    try:
        from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json
    except ImportError:
        raise NotConvertible("gigatoken is not installed") from None
    try:
        definition = json.loads(sentencepiece_to_tokenizer_json(path.read_bytes()))
    except Exception as error:
        raise NotConvertible(f"gigatoken does not know it ({_first_line(error)})") from None
    return to_gigatoken(definition)


def first_difference(
    encode: Callable[[str], list[int]], reference: Callable[[str], list[int]], texts: Iterable[str]
) -> str | None:
    """The first text of which the two give other ids, None when there is none."""
    return next((text for text in texts if encode(text) != reference(text)), None)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def byte_characters() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: character -> byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


def _split_pattern(definition: dict[str, Any]) -> str:
    match definition.get("pre_tokenizer"):
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return GPT2_SPLIT
        case {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": pattern},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return str(pattern)
        case _:
            raise NotConvertible("its pre-tokenizer is not one split pattern over bytes")


def _ranks(vocabulary: dict[str, int], specials: dict[str, int]) -> dict[bytes, int]:
    """Bytes of every ordinary token -> id."""
    table = byte_characters()
    ordinary = {token: index for token, index in vocabulary.items() if token not in specials}
    try:
        ranks = {bytes(table[c] for c in token): index for token, index in ordinary.items()}
    except KeyError:
        raise NotConvertible("its vocabulary is not made of bytes") from None
    if not all(bytes([byte]) in ranks for byte in range(256)):
        raise NotConvertible("its vocabulary lacks some of the 256 bytes")
    if len(ranks) != len(ordinary):
        raise NotConvertible("two of its tokens have the same bytes")
    return ranks


def _check_merge_order(vocabulary: dict[str, int], merges: list[Any]) -> None:
    """The ids of merge results must rise with the rank of the merge."""
    last = -1
    for merge in merges:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        index = vocabulary.get(left + right, -1)
        if index <= last:
            raise NotConvertible("its vocabulary is not in merge order")
        last = index
