"""Turn a training checkpoint into a Hugging Face folder, or into the authors' format.

python tools/convert_to_hf.py --checkpoint runs/tiny --output runs/tiny-hf
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
        "--checkpoint", required=True, metavar="DIR", help="run folder, or one of its step folders"
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--format",
        choices=("hf", "official"),
        default="hf",
        help="hf: transformers; official: config.json and pytorch_model.bin of the authors",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="type of the weights (default: bfloat16 for hf, float32 for official)",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="tokenizer to export (default: the run's)",
    )
    parser.add_argument("--shard-gb", type=float, default=5.0, help="largest file (default 5)")
    parser.add_argument(
        "--keep-padding", action="store_true", help="keep the padded rows of the vocabulary"
    )
    parser.add_argument("--force", action="store_true", help="replace an existing folder")
    return parser.parse_args()


def main() -> None:
    args = parse()
    from megaparcae.hf.convert import DTYPES, export_checkpoint
    from megaparcae.hf.export import ExportOptions
    from megaparcae.log import setup_logging

    setup_logging()
    default = "bfloat16" if args.format == "hf" else "float32"
    options = ExportOptions(
        dtype=DTYPES[args.dtype or default],
        shard_bytes=int(args.shard_gb * 1e9),
        force=args.force,
        keep_padding=args.keep_padding,
    )
    output = export_checkpoint(
        args.checkpoint,
        args.output,
        kind=args.format,
        tokenizer=args.tokenizer,
        options=options,
    )
    print(output)


if __name__ == "__main__":
    run_command(main)
