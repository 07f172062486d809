"""Scaling laws of looped models: plan an isoFLOP study, run it, fit the laws, predict from them."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megaparcae.errors import run_command
from megaparcae.log import setup_logging


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("grid", help="write run configs for budgets x mean recurrences")
    p.add_argument("--config", type=Path, required=True, help="YAML every run starts from")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change it")
    p.add_argument("--budgets", type=numbers, required=True, help="training FLOPs: 1e18,2e18,4e18")
    p.add_argument("--mus", type=numbers, required=True, help="mean recurrences, such as 1,2,4,8")
    p.add_argument("--flops", choices=["authors", "hardware"], default="authors", help="convention")
    p.add_argument("--out", type=Path, required=True, help="folder of the study")
    p = commands.add_parser("run", help="execute small runs, print commands for the others")
    p.add_argument("grid", type=Path, help="folder that `grid` wrote")
    p.add_argument("--max-flops", type=float, default=1e14, help="largest budget to execute here")
    p = commands.add_parser("fit", help="fit all laws, write a report")
    p.add_argument("runs", type=Path, help="grid folder or budget,mu,tokens,loss[,T,params] table")
    p.add_argument("--held-out", type=Path, help="table of runs to predict (budget not needed)")
    p.add_argument("--out", type=Path, required=True, help="folder of the report")
    p.add_argument("--restarts", type=int, default=1000, help="random starts of every law")
    p.add_argument("--draws", type=int, default=200, help="bootstrap draws for intervals")
    p = commands.add_parser("curves", help="fit L(T) of models that evaluate.py measured")
    p.add_argument("files", type=Path, nargs="+", help="written by evaluate.py --json")
    p.add_argument("--out", type=Path, required=True, help="folder of the report")
    p = commands.add_parser("predict", help="which mu, tokens and T for a budget")
    p.add_argument("--fit", required=True, help="fit.json, or paper:140m, paper:370m")
    p.add_argument("--budget", type=float, required=True, help="FLOPs (with serving, if given)")
    p.add_argument("--served-tokens", type=float, default=0.0, help="tokens served over the life")
    p.add_argument("--serving-flops", type=float, help="most forward FLOPs per served token")
    p.add_argument("--max-mu", type=int, help="largest mu (default: the largest measured)")
    return parser.parse_args()


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> None:
    setup_logging()
    args = parse()
    {"grid": grid, "run": run, "fit": fit, "curves": curves, "predict": predict}[args.command](args)


def grid(args: argparse.Namespace) -> None:
    from megaparcae.scaling.costs import study_costs
    from megaparcae.scaling.grid import write_grid

    costs = study_costs(args.flops)
    print(*write_grid(args.config, args.set, args.budgets, args.mus, args.out, costs), sep="\n")


def run(args: argparse.Namespace) -> None:
    from megaparcae.scaling.grid import execute_small

    for command in execute_small(args.grid, args.max_flops):
        print(shlex.join(command))


def fit(args: argparse.Namespace) -> None:
    from megaparcae.scaling.report import fit_and_report

    print(fit_and_report(args.runs, args.held_out, args.out, args.restarts, args.draws))


def curves(args: argparse.Namespace) -> None:
    from megaparcae.scaling.curves import fit_evaluations

    print(fit_evaluations(args.files, args.out))


def predict(args: argparse.Namespace) -> None:
    from megaparcae.scaling.predict import Predictor, Question, describe

    asked = Question(args.budget, args.served_tokens, args.serving_flops, args.max_mu)
    print(describe(Predictor.load(args.fit), asked))


if __name__ == "__main__":
    run_command(main)
