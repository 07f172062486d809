#!/usr/bin/env python3
"""Look at token shards: what is in them, whether they are whole, and join or divide them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megaparcae.errors import run_command


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("describe", help="counts, origin, histogram of document lengths")
    one.add_argument("prefix", nargs="+", help="shard, without .bin or .idx")
    one = commands.add_parser("verify", help="offsets, ids, ends of documents, checksums")
    one.add_argument("prefix", nargs="+", help="shard, without .bin or .idx")
    one = commands.add_parser("merge", help="one shard of several, documents in the given order")
    one.add_argument("prefix", nargs="+", help="shards, without .bin or .idx")
    one.add_argument("--output-prefix", required=True)
    one = commands.add_parser("split", help="several shards of one, with about equal tokens")
    one.add_argument("prefix", help="shard, without .bin or .idx")
    one.add_argument("--output-prefix", required=True, help="parts are {output-prefix}_{number}")
    one.add_argument("--parts", type=int, required=True)
    one = commands.add_parser("show", help="samples with their documents' borders, and their text")
    one.add_argument("prefix", nargs="*", help="shards, without .bin or .idx")
    one.add_argument("--config", help="a run's YAML instead of shards: the samples that it draws")
    one.add_argument("--set", dest="overrides", action="append", default=[], help="as in training")
    one.add_argument("--sequence-length", type=int, default=2048)
    one.add_argument("--packing", choices=("best_fit", "concatenate"), default="best_fit")
    one.add_argument("--tokenizer", help="folder or model file, to show the text")
    one.add_argument("--sample", type=int, default=0, help="number of the first sample")
    one.add_argument("--count", type=int, default=1, help="how many samples")
    return parser.parse_args()


def main() -> int:
    args = parse()
    from megaparcae.data import inspect, reshape, show
    from megaparcae.data.indexed import IndexedDataset

    match args.command:
        case "describe":
            print("\n\n".join(inspect.describe(IndexedDataset(prefix)) for prefix in args.prefix))
        case "verify":
            return max(_verify(IndexedDataset(prefix), inspect.verify) for prefix in args.prefix)
        case "merge":
            print(inspect.describe(reshape.merge(args.prefix, args.output_prefix)))
        case "split":
            for shard in reshape.split(args.prefix, args.output_prefix, args.parts):
                counts = f"{shard.num_documents:,} documents, {shard.num_tokens:,} tokens"
                print(f"{shard.prefix}: {counts}")
        case "show":
            options = {name: value for name, value in vars(args).items() if name != "command"}
            for text in show.samples(**options):
                print(text, end="\n\n")
    return 0


def _verify(shard, verify) -> int:
    findings = verify(shard)
    for finding in findings:
        print(f"{shard.prefix}: {finding}")
    if not findings:
        unknown = "" if shard.sidecar else " (no sidecar: checksums and ends not checked)"
        print(f"{shard.prefix}: {shard.num_documents:,} documents hold{unknown}")
    return 1 if findings else 0


if __name__ == "__main__":
    run_command(main)
