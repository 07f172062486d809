#!/usr/bin/env python3
"""Turn text into token shards, {output-prefix}_{key}_document.bin/.idx/.json, in Megatron's format.

Input is JSON lines, .txt, parquet (jsonl and txt also as .gz or .zst), a Hugging Face dataset on
disk, a folder or glob of these, "-" for stdin, or hf:NAME[:CONFIG[:SPLIT]] streamed from the hub.
Empty documents are left out and counted. Broken characters (invalid UTF-8, lone surrogates) become
U+FFFD and are counted. The shard has its name only when it is whole.
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
    add("--input", nargs="+", required=True, help="files, folders, globs, - or hf:NAME")
    add("--output-prefix", required=True, help="start of the output names")
    add("--tokenizer-model", required=True, help=".model, tokenizer.json or the folder of one")
    add("--tokenizer-type", default="auto", help="bpe, sentencepiece or Megatron's name")
    add("--json-keys", nargs="+", default=["text"], help="keys or columns, one shard each")
    add("--append-eod", action="store_true", help="end every document with the end-of-text token")
    add("--keep-empty", action="store_true", help="keep empty documents (a lone end-of-text)")
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")
    add("--on-error", choices=["stop", "skip"], default="stop", help="a line that is no document")
    add("--resume", action="store_true", help="continue an interrupted run of this prefix")
    add("--dtype", choices=["uint16", "int32"], help="default: uint16 below 65,500 ids, else int32")
    add("--input-format", default="auto", choices=["auto", "jsonl", "txt", "parquet", "arrow"])
    add("--separator", help=r"divides .txt files into documents, e.g. '\n\n'; default: none")
    add("--split", default="train", help="split of a Hugging Face dataset on disk")
    add("--quiet", action="store_true", help="no progress line")
    return parser.parse_args()


def main() -> None:
    args = parse()
    from megaparcae.data.inputs import parse_separator
    from megaparcae.data.parts import PartSettings
    from megaparcae.data.preprocess import PreprocessOptions, preprocess
    from megaparcae.data.report import write_summary
    from megaparcae.data.tokenizer import load_tokenizer, require_type
    from megaparcae.log import setup_logging

    setup_logging()
    tokenizer = load_tokenizer(args.tokenizer_model)
    require_type(tokenizer, args.tokenizer_type)
    settings = PartSettings(
        keys=tuple(args.json_keys),
        append_eod=args.append_eod,
        keep_empty=args.keep_empty,
        skip_errors=args.on_error == "skip",
        dtype=args.dtype,
    )
    options = PreprocessOptions(
        inputs=tuple(args.input),
        output_prefix=args.output_prefix,
        settings=settings,
        num_workers=args.workers,
        input_format=args.input_format,
        split=args.split,
        separator=parse_separator(args.separator),
        resume=args.resume,
        quiet=args.quiet,
    )
    write_summary(sys.stdout, preprocess(options, tokenizer), tokenizer)


if __name__ == "__main__":
    run_command(main)
