"""What each KV compressor costs in recall, by the share of the tokens that it keeps.

    python -m jackfield.examples.benchmarks.kv_recall --policies snap_kv --output kv.jsonl

A tiny model, which was trained for it (`train.py`) and finds what a prompt says without error, is
asked through the whole engine, before and after its cache is compacted. A curve shows what a policy
loses; which policy is best for another model it does not show.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jackfield.core.errors import ConfigError
from jackfield.core.registry import load_plugins
from jackfield.entrypoints.bench.report import Emitter, add_output_options, environment, say, table
from jackfield.entrypoints.flags.parser import Parser

from .evaluate import TASKS, WHOLE, draw, evaluate
from .tasks import COPIED
from .train import POSITIONS, train

MODEL = Path(__file__).parent / "model"
"""The weights that are in the source tree: `--train` with seed 0 makes the like."""
BY_CHANCE = "by_chance"
"""The compressor that the benchmark adds."""
RATIOS = (0.5, 0.2, 0.1, 0.05)
LENGTHS = (512,)
ROOM = 64
"""Tokens of questions and answers."""


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    options = Parser(prog="kv_recall", description=(__doc__ or "").splitlines()[0])
    options.add_argument(
        "--policies", nargs="+", metavar="NAME", help="KV compressors (default: all registered)"
    )
    options.add_argument(
        "--ratios", nargs="+", type=float, default=list(RATIOS), metavar="SHARE",
        help=f"shares of the tokens that stay (default: {' '.join(map(str, RATIOS))})",
    )  # fmt: skip
    options.add_argument(
        "--lengths", nargs="+", type=int, default=list(LENGTHS), metavar="TOKENS",
        help=f"tokens of the contexts (default: {' '.join(map(str, LENGTHS))})",
    )  # fmt: skip
    options.add_argument(
        "--samples", type=int, default=50, metavar="N", help="contexts per length (default: 50)"
    )
    options.add_argument("--seed", type=int, default=0, help="of the contexts (default: 0)")
    options.add_argument(
        "--kv-cache-dtype", default="auto", metavar="TYPE",
        help="type of cached keys and values, as of the server (default: the model's)",
    )  # fmt: skip
    options.add_argument(
        "--kv-compression-prompt-interval", type=int, default=0, metavar="TOKENS",
        help="compact prompts while they are computed, too, after every so many tokens",
    )  # fmt: skip
    options.add_argument(
        "--model", type=Path, default=MODEL, metavar="FOLDER",
        help="a checkpoint that --train has written (default: the one beside this program)",
    )  # fmt: skip
    options.add_argument(
        "--train", type=int, metavar="SEED",
        help="first train the model into the folder, in 5 to 10 minutes of one core",
    )  # fmt: skip
    add_output_options(options)
    return options


def run(argv: Sequence[str]) -> int:
    """Return the exit status."""
    options = parser().parse_args(argv)
    if options.samples < 1:
        raise ConfigError("--samples: must be at least 1", param="samples")
    for ratio in options.ratios:
        if not 0.0 < ratio <= 1.0:
            raise ConfigError(f"--ratios: {ratio} is not in (0, 1]", param="ratios")
    for length in options.lengths:
        if not 4 * COPIED <= length <= POSITIONS - ROOM:
            raise ConfigError(
                f"--lengths: {length} is not between {4 * COPIED} and {POSITIONS - ROOM}",
                param="lengths",
            )
    if options.train is not None:
        if options.model == MODEL:
            raise ConfigError("--train: needs --model, a folder to write to", param="train")
        logging.basicConfig(level=logging.INFO)
        options.model.mkdir(parents=True, exist_ok=True)
        accuracy = train(options.model, options.train)
        say(f"trained: {accuracy:.3f} of the answers right in the last stage")
    names = options.policies or sorted(load_plugins()["kv_compressor"])
    emitter = Emitter(options.output, environment("cpu"))
    for length in options.lengths:
        trials = draw(length, options.samples, options.seed)
        for policy in (WHOLE, BY_CHANCE, *names):
            ratios = [1.0] if policy == WHOLE else options.ratios
            stored, interval = options.kv_cache_dtype, options.kv_compression_prompt_interval
            for result in asyncio.run(
                evaluate(options.model, policy, ratios, trials, stored, interval)
            ):
                emitter.emit({
                    "benchmark": "kv_compression", "model": _name(options.model),
                    "kv_cache_dtype": stored, "prompt_interval": interval, "length": length,
                    "seed": options.seed, **result,
                })  # fmt: skip
    say(summary(emitter.records))
    return 0


def _name(model: Path) -> str:
    return "tiny-recall" if model == MODEL else model.name


def summary(records: Sequence[dict[str, Any]]) -> str:
    """Return the recall of each policy, share and length, a column per task."""
    shares: dict[tuple[int, str, float], dict[str, float]] = {}
    for record in records:
        key = record["length"], record["policy"], record["ratio"]
        shares.setdefault(key, {})[record["task"]] = record["recall"]
    rows = [
        (*key, *(f"{100 * recalls[task]:.0f} %" for task in TASKS))
        for key, recalls in shares.items()
    ]
    legend = "\n".join(f"{task}: {text}" for task, text in TASKS.items())
    return table(rows, ["tokens", "policy", "kept", *TASKS]) + "\n\n" + legend
