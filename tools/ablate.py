"""Compare Parcae with what it was made from: the paper's tables 2, 4 and 8 at a small scale.

Writes docs/{suite}.md, .png and .json into the output folder. Stop it at any time: the same command
goes on with the runs that are left.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megaparcae.errors import run_command
from megaparcae.log import setup_logging


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suites", nargs="+", choices=["table2", "table4", "table8"])
    parser.add_argument("--data", required=True, metavar="PREFIX", help="shard to train on")
    parser.add_argument("--vocab-size", type=int, required=True, help="of the shard's tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="folder of runs and report")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each config (default 3)")
    parser.add_argument("--steps", type=int, help="optimizer steps of each run (default: suite's)")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="change an option of all runs, such as model.hidden_size=128; may be repeated",
    )
    parser.add_argument("--workers", type=int, default=2, help="runs at a time (default 2)")
    parser.add_argument("--report-only", action="store_true", help="draw what has been run")
    return parser.parse_args()


def main() -> None:
    args = parse()
    setup_logging()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from megaparcae.eval.unigram import unigram_entropy
    from megaparcae.train.ablation import (
        execute,
        is_finished,
        nested_options,
        plan_jobs,
        read_outcome,
    )
    from megaparcae.train.ablation_report import write_report
    from megaparcae.train.ablation_suites import SUITES

    jobs = {
        name: plan_jobs(
            SUITES[name],
            data=args.data,
            seeds=args.seeds,
            out=args.out,
            num_steps=args.steps,
            options=nested_options([f"model.vocab_size={args.vocab_size}", *args.overrides]),
        )
        for name in args.suites
    }
    if not args.report_only:
        execute([job for some in jobs.values() for job in some], num_workers=args.workers)
    for name, some in jobs.items():
        level = unigram_entropy(some[0].config())
        outcomes = [read_outcome(job, level=level) for job in some if is_finished(job)]
        if outcomes:
            print(write_report(SUITES[name], outcomes, level, args.out / "docs"))


if __name__ == "__main__":
    run_command(main)
