"""`jackfield debug`: replay what an engine has recorded."""

from __future__ import annotations

import argparse
import asyncio
import sys

from ...core.errors import JackfieldError
from ...core.recording.recording import Recording
from ...core.registry import load_plugins
from ..flags.engine_flags import fail
from ..flags.parser import Parser
from ..replay import Difference, Replayed, replay, replay_config
from .log_level import add_log_level, start_logging


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="jackfield debug",
        description="Replay the steps that an engine has recorded (--record-steps of serve, or "
        "record_steps of an engine) against a worker of the same model, and compare the results "
        "bit for bit. The first step, row and field that differ are named.",
    )
    parser.add_argument("action", choices=("replay",), help="replay: compute the steps again")
    parser.add_argument("file", metavar="FILE", help="a recording")
    parser.add_argument("--model", help="checkpoint of the model; default: the recorded one")
    parser.add_argument("--executor", help="executor by name; default: the recorded one")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="where it runs; default: the recorded one"
    )
    add_log_level(parser)
    return parser


def run(argv: list[str]) -> int:
    """Return 0 if all results are equal, 1 if one differs."""
    args = make_parser().parse_args(argv)
    start_logging(args)
    options = {name: getattr(args, name) for name in ("model", "executor", "device")}
    changes = {name: value for name, value in options.items() if value is not None}
    try:
        recording = Recording(args.file)
        header = recording.header
        config = replay_config(header.config, header.info, **changes)
        plugins = load_plugins(disable=config.disable_plugins)
        replayed = asyncio.run(replay(recording, config, plugins))
    except Difference as difference:
        print(f"jackfield: the replay differs: {difference}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 1
    except JackfieldError as error:
        return fail(error)
    print(_summary(replayed))
    return 0


def _summary(replayed: Replayed) -> str:
    lines = [f"equal: {replayed.num_steps} steps, {replayed.num_tokens} tokens"]
    if replayed.cut_off:
        lines.append("the recording ends within an object, as after a crash; the rest was replayed")
    lines += [
        f"{name}: {there or 'none'} in the recording, {here or 'none'} here"
        for name, (there, here) in replayed.other_versions.items()
    ]
    return "\n".join(lines)
