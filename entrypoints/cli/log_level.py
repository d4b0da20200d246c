"""`--log-level` of commands that end by themselves: what is logged, with its time."""

from __future__ import annotations

import argparse
import logging


def add_log_level(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--log-level",
        default="warning",
        choices=("debug", "info", "warning"),
        help="least level that is logged",
    )


def start_logging(args: argparse.Namespace) -> None:
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
