"""Turn an exported model, an authors' checkpoint or a Llama-style model into a training checkpoint.

python tools/convert_from_hf.py --input parcae-140m --output runs/parcae-140m
python tools/convert_from_hf.py --input my-llama --retrofit 2/4/2 --output runs/looped-llama
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megaparcae.errors import run_command


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--input", required=True, metavar="DIR", help="folder with config.json and weights"
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="run folder to write")
    parser.add_argument("--force", action="store_true", help="replace its step 0")
    retrofit = parser.add_argument_group("a looped model from a fixed-depth one")
    retrofit.add_argument(
        "--retrofit", metavar="P/R/C", help="layers for prelude, core and coda, such as 2/4/2"
    )
    retrofit.add_argument(
        "--mean-recurrence", type=int, default=8, help="loops of training (default 8)"
    )
    retrofit.add_argument(
        "--injection", choices=("diagonal", "linear", "additive"), default="diagonal"
    )
    retrofit.add_argument(
        "--drop-layers", action="store_true", help="allow a split that leaves layers unused"
    )
    return parser.parse_args()


def main() -> None:
    args = parse()
    from megaparcae.hf.convert import import_checkpoint
    from megaparcae.hf.load import load_folder
    from megaparcae.hf.retrofit import Split, retrofit
    from megaparcae.log import setup_logging

    setup_logging()
    if args.retrofit is None:
        loaded = load_folder(args.input)
    else:
        loaded = retrofit(
            args.input,
            Split.parse(args.retrofit),
            mean_recurrence=args.mean_recurrence,
            injection=args.injection,
            drop_layers=args.drop_layers,
        )
    print(import_checkpoint(loaded, args.output, force=args.force))


if __name__ == "__main__":
    run_command(main)
