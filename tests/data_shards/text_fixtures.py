"""Small tokenizers and corpora for the tests of preprocessing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from megaparcae.data.indexed import IndexedDataset
from megaparcae.data.parts import PartSettings
from megaparcae.data.preprocess import PreprocessOptions, Summary, preprocess

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "tests" / "data" / "sample.jsonl"


class CharacterTokenizer:
    """UTF-8 bytes + 3; 1 ends a text. `hook` sees every text first."""

    kind, engine, path, identity = "bpe", "bytes", Path("bytes"), "bytes"
    bos_id, pad_id = 0, 2

    def __init__(self, eos_id: int | None = 1, vocab_size: int = 259, hook=None) -> None:
        self.eos_id = self.eod_id = eos_id
        self.vocab_size, self.hook = vocab_size, hook

    def encode(self, text: str) -> list[int]:
        if self.hook is not None:
            result = self.hook(text)
            if result is not None:
                return result
        return [byte + 3 for byte in text.encode()]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(self.encode(text), dtype=np.uint32) for text in texts]

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        return bytes(i - 3 for i in map(int, ids) if i >= 3).decode()

    def check_engine(self, texts: Iterable[str]) -> None:
        list(texts)


def twenty(folder: Path) -> tuple[Path, list[str]]:
    """C20: 20 documents of 1 to 2000 characters."""
    texts = [(f"document {i} " * 200)[: max(1, i * 105)] for i in range(20)]
    path = folder / "c.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path, texts


def lines(folder: Path, *values: object, name: str = "c.jsonl") -> Path:
    """A JSON lines file; bytes are lines as they are."""
    path = folder / name
    encoded = [v if isinstance(v, bytes) else json.dumps(v).encode() for v in values]
    path.write_bytes(b"\n".join(encoded) + b"\n")
    return path


def run(path: Path | str, prefix: Path, tokenizer=None, **options) -> Summary:
    """Preprocess, quietly."""
    settings = {n: options.pop(n) for n in list(options) if n in PartSettings.__dataclass_fields__}
    chosen = {"num_workers": 2, "quiet": True, **options}
    inputs = chosen.pop("inputs", (str(path),))
    made = PreprocessOptions(
        inputs=inputs, output_prefix=str(prefix), settings=PartSettings(**settings), **chosen
    )
    return preprocess(made, tokenizer or CharacterTokenizer())


def documents(prefix: Path, key: str = "text") -> list[list[int]]:
    """All documents of a shard."""
    shard = IndexedDataset(f"{prefix}_{key}_document")
    return [shard.get(i).tolist() for i in range(shard.num_documents)]


def texts_of(prefix: Path, key: str = "text") -> list[str]:
    """All documents of a shard of CharacterTokenizer, decoded."""
    return [CharacterTokenizer().decode(ids) for ids in documents(prefix, key)]


def command(tool: str, *arguments: object, limit: str = "", **options) -> SimpleNamespace:
    """Run a tool as a user does, below a `ulimit` if given."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    shell = ["bash", "-c", f'ulimit {limit} && exec "$@"', "bash"] if limit else []
    return subprocess.run(
        [*shell, sys.executable, str(ROOT / "tools" / tool), *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        **options,
    )
