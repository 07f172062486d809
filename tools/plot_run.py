#!/usr/bin/env python3
"""A run's loss curve in the terminal and as a picture, beside the unigram entropy of its text.

python tools/plot_run.py runs/tiny --picture runs/tiny/loss.png
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megaparcae.errors import run_command


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="folder of the run (its checkpoint.dir)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="PNG, SVG or PDF to write")
    parser.add_argument(
        "--no-entropy", action="store_true", help="do not read the run's validation text"
    )
    return parser.parse_args()


def main() -> None:
    args = parse()
    from megaparcae.config.load import load_config
    from megaparcae.eval.curve import read_curve, terminal_chart, validation_table, write_picture
    from megaparcae.eval.unigram import unigram_entropy

    curve = read_curve(args.run)
    config = load_config(args.run / "config.yaml")
    level = None if args.no_entropy else unigram_entropy(config)
    width = min(shutil.get_terminal_size().columns, 100) - 10
    print(terminal_chart(curve, width=width, level=level))
    if level is not None:
        print("        ● training loss   ╌ unigram entropy of the validation text")
    print(f"\n{validation_table(curve, level)}")
    if args.picture is not None:
        write_picture(curve, args.picture, title=config.name, level=level)
        print(f"picture: {args.picture}")


if __name__ == "__main__":
    run_command(main)
