"""Command-line options that describe a cluster."""

from __future__ import annotations

import argparse

from megaparcae.plan.machines import MACHINES, Cluster, find_machine


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """--gpus and what the table of machines may get wrong."""
    group = parser.add_argument_group("plan for a cluster (with --gpus)")
    group.add_argument("--gpus", type=int, metavar="N", help="how many; plans the best layout")
    group.add_argument("--machine", default="h100", help=f"one of {', '.join(MACHINES)}")
    group.add_argument("--per-node", type=int, metavar="N", help="GPUs of a node")
    for option, unit in (
        ("memory", "GiB of a GPU"),
        ("peak", "TFLOP/s in bf16"),
        ("memory-speed", "GB/s"),
        ("intra", "GB/s of a GPU to others of its node"),
        ("inter", "GB/s of a GPU's share of the network cards"),
    ):
        group.add_argument(f"--{option}", type=float, metavar="X", help=unit)
    group.add_argument("--mfu", type=float, default=0.4, help="share of the peak while it computes")
    group.add_argument("--link-share", type=float, default=0.8, help="share of a link's speed")
    group.add_argument("--reserve", type=float, default=0.1, help="share of the memory left free")
    group.add_argument("--dollars", type=float, help="price of a GPU-hour")
    group.add_argument("--tokens", type=float, help="length of the run; else train.num_steps")
    group.add_argument("--top", type=int, default=8, metavar="N", help="layouts to show")
    group.add_argument("--as-is", action="store_true", help="the config's own layout only")
    group.add_argument("--output", metavar="RUN.yaml", help="write the run with the best layout")


def read_cluster(args: argparse.Namespace) -> Cluster:
    """The cluster that the options describe. Raises UserError."""
    changes = {
        name: getattr(args, name)
        for name in ("memory", "peak", "memory_speed", "intra", "inter", "per_node")
    }
    return Cluster(
        name=args.machine,
        machine=find_machine(args.machine, changes),
        gpus=args.gpus,
        mfu=args.mfu,
        link_share=args.link_share,
        reserve=args.reserve,
        dollars=args.dollars,
    )
