"""Measure the project's parts, each in turn with what it has to beat; medians, ratios, spread.

python tools/benchmark.py loader --json loader.json
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megaparcae.bench.options import SUITES, add_options, from_arguments
from megaparcae.errors import run_command


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    suites = parser.add_subparsers(dest="suite", required=True, metavar="SUITE")
    for name, options in SUITES.items():
        suite = suites.add_parser(name, help=options.__doc__, description=options.__doc__)
        add_options(suite, options)
        suite.add_argument("--json", type=Path, metavar="OUT", help="write the figures here too")
    return parser.parse_args()


def main() -> None:
    args = parse()
    options = from_arguments(SUITES[args.suite], args)
    from importlib import import_module

    from megaparcae.engine.distributed import choose_device
    from megaparcae.log import setup_logging

    os.environ.setdefault("DS_ACCELERATOR", choose_device("auto"))  # deepspeed looks at it
    setup_logging(level="WARNING")  # the tables say the rest
    report = import_module(f"megaparcae.bench.{args.suite}").run(options)
    report.show()
    if args.json is not None:
        report.write(args.json)


if __name__ == "__main__":
    run_command(main)
