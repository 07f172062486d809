#!/usr/bin/env python3
"""Train a tokenizer: byte-level BPE (tokenizer.json) or sentencepiece BPE (tokenizer.model).

bpe: split pattern of the paper, <|bos|>, <|eos|>, <|pad|> are ids 0, 1, 2; the fastest to run.
sentencepiece: bytes for unknown characters, <unk>, <s>, </s>, <pad> are ids 0 to 3.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megaparcae.errors import run_command


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--type", choices=["bpe", "sentencepiece"], default="bpe", help="default: bpe")
    add("--input", nargs="+", required=True, help="as for preprocess_data.py")
    add("--json-key", default="text", help="key or column of the text (default: text)")
    add("--vocab-size", type=int, required=True, help="ids, special tokens included")
    add("--output", required=True, help="folder of the tokenizer")
    add("--max-bytes", type=float, default=0, help="train on the first so many bytes, 0: all")
    add("--workers", type=int, default=os.cpu_count() or 1, help="threads (default: all cores)")
    add("--quiet", action="store_true", help="no progress")
    return parser.parse_args()


def main() -> None:
    args = parse()
    os.environ.setdefault("RAYON_NUM_THREADS", str(args.workers))
    from pathlib import Path

    from megaparcae.data.inputs import find_sources
    from megaparcae.data.tokenizer import load_tokenizer
    from megaparcae.data.train_tokenizer import train_bpe, train_sentencepiece, training_texts
    from megaparcae.log import setup_logging

    setup_logging()
    sources = find_sources(args.input)
    texts = training_texts(sources, args.json_key, int(args.max_bytes), args.quiet)
    folder = Path(args.output)
    if args.type == "bpe":
        path = train_bpe(texts, args.vocab_size, folder, not args.quiet)
    else:
        path = train_sentencepiece(texts, args.vocab_size, folder, args.workers, not args.quiet)
    tokenizer = load_tokenizer(path)
    sample = list(training_texts(sources, args.json_key, 1_000_000, quiet=True))
    num_tokens = sum(len(ids) for ids in tokenizer.encode_batch(sample))
    ratio = sum(len(text.encode()) for text in sample) / max(num_tokens, 1)
    print(f"{path}: {tokenizer.vocab_size:,} ids, {ratio:.3f} bytes/token on the first MB of text")
    if tokenizer.vocab_size < args.vocab_size:
        print(f"the text has no more than {tokenizer.vocab_size:,} pieces worth an id")


if __name__ == "__main__":
    run_command(main)
