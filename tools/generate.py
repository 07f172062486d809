"""Continue text with an exported model: one prompt, interactively, or a jsonl file.

python tools/generate.py --model runs/tiny-hf --prompt "The sea" --num-loops 8
python tools/generate.py --model runs/tiny-hf --input prompts.jsonl --output done.jsonl
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megaparcae.errors import run_command


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="folder of tools/convert_to_hf.py")
    add("--prompt", help="text to continue; without it and --input: interactive")
    add("--input", type=Path, metavar="JSONL", help="prompts, one JSON object a line")
    add("--output", type=Path, metavar="JSONL", help="where the continuations go (with --input)")
    add("--key", default="prompt", help="key of the text in --input (default: prompt)")
    add("--batch-size", type=int, default=8, help="prompts at once in --input (default 8)")
    add("--max-new-tokens", type=int, default=128)
    add("--num-loops", type=int, metavar="T", help="passes through the core")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add("--top-k", type=int, default=0, help="sample among the k likeliest (0: off)")
    add("--top-p", type=float, default=1.0, help="sample among this probability mass (1: off)")
    add("--seed", type=int, default=0)
    add("--early-exit", choices=("kl", "entropy", "state"), help="stop a token that has settled")
    add("--exit-threshold", type=float, help="default: kl 5e-4, entropy 1e-3, state 3e-2")
    add("--loop-budget", type=int, metavar="B", help="cache slots along the loop axis")
    add(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of the arithmetic"
    )
    add("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    args = parser.parse_args()
    if (args.input is None) != (args.output is None):
        parser.error("--input and --output go together")
    return args


def main() -> None:
    args = parse()
    from megaparcae.hf.generate import GenerationOptions, Generator
    from megaparcae.hf.prompts import generate_file, speak
    from megaparcae.log import logger, setup_logging

    setup_logging()
    names = GenerationOptions.__dataclass_fields__
    options = GenerationOptions(**{name: getattr(args, name) for name in names})
    generator = Generator.load(args.model, dtype=args.dtype, device=args.device)
    if args.input is not None:
        meter = generate_file(
            generator, args.input, args.output, options, key=args.key, batch_size=args.batch_size
        )
    elif args.prompt is not None:
        meter = speak(generator, [args.prompt], options)
    else:
        logger.info("text to continue, a line each (end with Ctrl-D):")
        meter = speak(generator, (line.rstrip("\n") for line in sys.stdin), options)
    logger.info("%s", meter.summary())


if __name__ == "__main__":
    run_command(main)
