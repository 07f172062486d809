"""Behind tools/evaluate.py: processes, a model from any folder, and what is measured of it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from megaparcae.engine.distributed import choose_device, init_distributed
from megaparcae.errors import UserError
from megaparcae.eval.core import SEEDS, CoreOptions
from megaparcae.eval.loss import loss_table
from megaparcae.eval.ranks import Ranks
from megaparcae.eval.results import result_table, scores
from megaparcae.eval.run import LossOptions, depths, integers, loss_rows, measure_core, measure_loss
from megaparcae.eval.scoring import Scorer
from megaparcae.hf.load_model import LoadedModel, load_model
from megaparcae.launcher.ranks import rank_variables, ranks_exist
from megaparcae.log import logger, setup_logging

Report = dict[str, object]


def evaluate(args: argparse.Namespace) -> str:
    """Measure what the command line asks for, write --json, and return tables for the terminal."""
    ranks, device = _join(args.device)
    setup_logging(ranks.index)
    if args.lm_eval:
        _check_lm_eval(args, ranks)
    if args.early_exit:
        _check_early_exit(args, ranks)
    loaded = load_model(args.model, device)
    config = loaded.model.config
    trained_with = loaded.run.train.seed if loaded.run else 0
    scorer = Scorer(
        loaded.model,
        num_loops=depths(args.num_loops, config.recurrence.mean_recurrence, config.architecture),
        start=args.start,
        seed=trained_with if args.seed is None else args.seed,
        dtype=getattr(torch, args.dtype),
    )
    logger.info("%s: T = %s", loaded.folder, ", ".join(map(str, scorer.num_loops)))
    report: Report = {"model": str(loaded.folder), "num_loops": list(scorer.num_loops)}
    if config.architecture == "looped":
        report["mean_recurrence"] = config.recurrence.mean_recurrence
    tables = []
    if args.early_exit:
        tables.append(_early_exit(args, loaded, device, report))
    elif args.data or not (args.core or args.lm_eval):
        tables.append(_loss(args, loaded, scorer, ranks, report))
    if args.core:
        tables.append(_core(args, loaded, scorer, ranks, report))
    if args.lm_eval:
        tables.append(_lm_eval(args, scorer.num_loops, device, report))
    if args.json is not None and ranks.index == 0:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return "\n\n".join(tables) if ranks.index == 0 else ""


def _join(wanted_device: str) -> tuple[Ranks, torch.device]:
    """The process group of a launcher; alone without one."""
    if not ranks_exist(os.environ):
        return Ranks(), torch.device(choose_device(wanted_device))
    os.environ.update(rank_variables(os.environ))
    process = init_distributed(wanted_device)
    return Ranks(process.rank, process.world_size), process.device


def _loss(
    args: argparse.Namespace, loaded: LoadedModel, scorer: Scorer, ranks: Ranks, report: Report
) -> str:
    tokenizer = args.tokenizer or loaded.tokenizer
    losses = measure_loss(scorer, _text(args), run=loaded.run, tokenizer=tokenizer, ranks=ranks)
    report["loss"] = [dataclasses.asdict(one) for one in losses]
    return loss_table(losses)


def _text(args: argparse.Namespace) -> LossOptions:
    return LossOptions(
        data=tuple(args.data),
        packing=args.packing,
        max_rows=args.max_rows,
        key=args.json_key,
        batch_tokens=args.batch_tokens,
    )


def _check_early_exit(args: argparse.Namespace, ranks: Ranks) -> None:
    """What can be said before the model is loaded."""
    from megaparcae.hf.exit_curve import parse_rules

    parse_rules(args.early_exit)
    if ranks.count > 1:
        raise UserError("--early-exit runs in one process; start it without torchrun or deepspeed")


def _early_exit(
    args: argparse.Namespace, loaded: LoadedModel, device: torch.device, report: Report
) -> str:
    from megaparcae.hf.exit_curve import draw_exit_curve, exit_curve, exit_table, parse_rules
    from megaparcae.hf.load_model import as_exported

    tokenizer = args.tokenizer or loaded.tokenizer
    rows = loss_rows(loaded.model.config, _text(args), run=loaded.run, tokenizer=tokenizer)
    tokens = [row.tokens for row in rows.read(range(len(rows.lengths)))]
    model = as_exported(loaded.model).to(device, getattr(torch, args.dtype))
    rules = parse_rules(args.early_exit)
    points = exit_curve(model, tokens, rules, batch_tokens=args.batch_tokens)
    if args.picture is not None:
        draw_exit_curve(points, args.picture, f"early exit, {args.model}")
    report["early_exit"] = [dataclasses.asdict(point) for point in points]
    return exit_table(points)


def _core(
    args: argparse.Namespace, loaded: LoadedModel, scorer: Scorer, ranks: Ranks, report: Report
) -> str:
    options = CoreOptions(
        tasks=args.tasks,
        seeds=SEEDS if args.seeds is None else tuple(integers("--seeds", args.seeds)),
        max_items=args.max_items,
        batch_tokens=args.batch_tokens,
    )
    results = measure_core(
        scorer,
        args.core,
        options,
        tokenizer=args.tokenizer or loaded.tokenizer,
        identity=loaded.identity(),
        results=args.results,
        ranks=ranks,
    )
    report["tasks"] = [dataclasses.asdict(one) for one in results]
    report["scores"] = [dataclasses.asdict(one) for one in scores(results, options.seeds)]
    return result_table(results, options.seeds)


def _check_lm_eval(args: argparse.Namespace, ranks: Ranks) -> None:
    """What can be said before the model is loaded."""
    from megaparcae.eval.harness import require_lm_eval

    if ranks.count > 1:
        raise UserError("--lm-eval runs in one process; start it without torchrun or deepspeed")
    if args.start != "zero":
        raise UserError("--start=drawn is not for --lm-eval: an export has its own start state")
    if not (Path(args.model) / "tokenizer.json").is_file():
        raise UserError(
            f"--lm-eval needs an export with a tokenizer, and {args.model} is none; make one with "
            "tools/convert_to_hf.py"
        )
    require_lm_eval()


def _lm_eval(
    args: argparse.Namespace, num_loops: Sequence[int], device: torch.device, report: Report
) -> str:
    from megaparcae.eval.harness import evaluate_harness, harness_table
    from megaparcae.hf.generate import Generator

    exported = Generator.load(args.model, dtype=args.dtype, device=str(device))
    found = evaluate_harness(
        exported.model,
        exported.tokenizer,
        args.lm_eval,
        num_loops=num_loops,
        batch_size=max(1, args.batch_tokens // exported.model.config.max_position_embeddings),
        limit=args.max_items,
        include_path=args.lm_eval_path,
    )
    report["lm_eval"] = found
    return harness_table(found)
