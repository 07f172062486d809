"""python -m megaparcae.train --config YAML --set train.num_steps=100"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys

from megaparcae.errors import run_command


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m megaparcae.train",
        description="Pretrain a looped language model: one process, deepspeed, torchrun or srun.",
        epilog="A run that is asked to stop (SIGTERM, SIGUSR1, Ctrl-C) saves and exits with code "
        "75; the same command continues it.",
    )
    parser.add_argument("--config", required=True, metavar="YAML", help="the run's configuration")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        nargs="+",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override an option; may be repeated",
    )
    parser.add_argument(
        "--preflight",
        action="store_true",
        help="check machines, network, disk and data of the run, and train nothing",
    )
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # some launchers pass it
    return parser.parse_args(argv)


def main() -> int:
    arguments = parse_arguments(sys.argv[1:])
    from megaparcae.config.load import load_config

    overrides = [item for group in arguments.overrides for item in group]
    config = load_config(arguments.config, overrides)

    from megaparcae.launcher.ranks import network_variables, rank_variables

    os.environ.update(rank_variables(os.environ))
    os.environ.update(network_variables(os.environ))

    from megaparcae.engine.distributed import MeetingError, init_distributed, leave_together
    from megaparcae.log import logger, setup_logging
    from megaparcae.train.lost_rank import LostRankError
    from megaparcae.train.run import train
    from megaparcae.train.safety import TrainingError

    faulthandler.enable()  # a crash in native code shows where
    setup_logging(int(os.environ["RANK"]))
    try:
        process = init_distributed(config.train.device)
        code = train(config, process, only_check=arguments.preflight)
        if code:
            leave_together(code)
        return code
    except (MeetingError, LostRankError) as error:
        logger.debug("", exc_info=True)
        logger.error("error: %s", error)
        os._exit(1)  # to take down a communicator that misses a rank may take for ever
    except TrainingError as error:
        logger.debug("", exc_info=True)
        if process.rank == 0:  # all ranks come to it together
            logger.error("error: %s", error)
        leave_together(1)


if __name__ == "__main__":
    run_command(main)
