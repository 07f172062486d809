#!/usr/bin/env python3
"""Compare two runs of one model: losses, gradient norms and every parameter.

Layout, micro-batch size, ZeRO stage and activation checkpointing change only the order of sums.
Expect, relative to the second run and over tens of steps: in fp32 below 1e-5 of loss and norm and
1e-4 of a parameter (with optimizer.muon_dtype fp32; bf16 products part weights by 1e-2); in bf16
below 1e-2 of the loss and 5e-2 of norm and parameters. More is a fault.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megaparcae.errors import run_command


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first", type=Path, metavar="A", help="folder of a run (checkpoint.dir)")
    parser.add_argument("second", type=Path, metavar="B", help="folder of the run to measure by")
    parser.add_argument("--step", type=int, help="checkpoint to compare; the last common one")
    parser.add_argument("--limit", type=float, default=1e-4, help="exit 1 above it (%(default)s)")
    parser.add_argument("--top", type=int, default=20, help="parameters to show; 0 shows all")
    return parser.parse_args()


def main() -> int:
    args = parse()
    from megaparcae.train.compare import SERIES, compare_runs

    differences = compare_runs(args.first, args.second, args.step)
    print(f"{'largest relative difference':<44} {'':>10}  where")
    parameters = 0
    for difference in differences:
        parameters += difference.name not in SERIES
        if not args.top or parameters <= args.top:
            print(f"{difference.name:<44} {difference.largest:>10.2e}  {difference.where}")
    if args.top and parameters > args.top:
        print(f"... and {parameters - args.top} parameters that are closer")
    worst = max(differences, key=lambda difference: difference.largest)
    above = worst.largest > args.limit
    print(
        f"{'DIFFERENT' if above else 'same'}: {worst.name} is {worst.largest:.2e} apart, "
        f"limit {args.limit:.0e}"
    )
    return int(above)


if __name__ == "__main__":
    run_command(main)
