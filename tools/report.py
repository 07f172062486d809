#!/usr/bin/env python3
"""One HTML page of a run: losses, loop health, speed, time, FLOPs, events, configuration.

python tools/report.py runs/tiny                 writes runs/tiny/report.html

The page needs nothing but itself and opens in any browser. It may be written while the run goes on.
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
    parser.add_argument("run", type=Path, help="folder of the run (its checkpoint.dir)")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="page to write; default RUN/report.html"
    )
    return parser.parse_args()


def main() -> None:
    args = parse()
    from megaparcae.report.page import write_report

    output = args.output or args.run / "report.html"
    write_report(args.run, output)
    print(output)


if __name__ == "__main__":
    run_command(main)
