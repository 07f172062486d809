#!/usr/bin/env python3
"""Loss and perplexity at any numbers of loops or with early exit; CORE; tasks of lm-eval.

python tools/evaluate.py --model runs/tiny --num-loops 1,4,8          the run's validation rows
torchrun --nproc-per-node 8 tools/evaluate.py --model DIR --data SHARD_PREFIX TEXT_FILE ...
python tools/evaluate.py --model DIR --core BUNDLE --tasks extended --results core.jsonl
python tools/evaluate.py --model EXPORT --lm-eval table3,perplexity
python tools/evaluate.py --model DIR --early-exit kl,entropy,state --picture exit.png
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
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="run, checkpoint, export, authors' folder")
    add("--num-loops", metavar="T,T,...", help="depths (default: the mean of training)")
    add("--tokenizer", metavar="PATH", help="default: the model's")
    add("--data", nargs="+", default=[], help="shard prefixes, or text files (txt, jsonl, ...)")
    add("--packing", choices=("best_fit", "concatenate"), help="of shards; default: the run's")
    add("--max-rows", type=int, help="measure the loss on the first rows only")
    add("--json-key", default="text", help="key of the text in jsonl files (default: text)")
    add("--core", metavar="DIR", help="bundle: core.yaml, eval_data/, eval_meta_data.csv")
    add("--tasks", default="core", help="core, extended, bundle or labels with commas")
    add("--seeds", default=None, metavar="N,N,...", help="of few-shot examples (three by default)")
    add("--max-items", type=int, help="ask this many items of each task (--core, --lm-eval)")
    add("--results", type=Path, metavar="JSONL", help="keep CORE results here, and resume")
    add("--lm-eval", metavar="TASKS", help="table3, perplexity or names; needs an export")
    add("--lm-eval-path", metavar="DIR", help="folder with task files of your own")
    add("--early-exit", metavar="RULES", help="kl, entropy, state: loss by mean loops per token")
    add("--picture", type=Path, metavar="PNG", help="draw the curve of --early-exit")
    add("--start", choices=("zero", "drawn"), default="zero", help="state h_0; drawn: as trained")
    add("--seed", type=int, help="of drawn start states (default: the run's)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the arithmetic")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--batch-tokens", type=int, default=16384, help="tokens at once (default 16384)")
    add("--json", type=Path, metavar="FILE", help="write everything measured here")
    return parser.parse_args()


def main() -> None:
    args = parse()
    from megaparcae.train.evaluation import evaluate

    tables = evaluate(args)
    if tables:
        print(tables)


if __name__ == "__main__":
    run_command(main)
