"""How attention of one row is cut into programs, by the time of the layer that it is in.

    python examples/benchmarks/attention_cuts.py --models MiniCPM-2B GPT-2-XL Qwen3-0.6B

What is fastest alone is not in a layer, where attention begins while the projection ends. This
times layers of one token as a step has them (recorded, each with weights and keys of its own): by
tiles of keys, warps, the least that a split has, whether the new token has a program of its own,
and whether keys are loaded before the projection is there.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
from typing import NamedTuple

from jackfield.entrypoints.bench.kernels.layer_sweep import changed_rules, sweep, sweep_parser
from jackfield.entrypoints.bench.kernels.token_layer import TokenLayer
from jackfield.entrypoints.bench.kernels.tune import layer_of
from jackfield.entrypoints.bench.report import say
from jackfield.kernels.attention import fused_decode_attention as attention_kernel
from jackfield.kernels.attention.decode_splits import DecodeConfig

MODELS = ("MiniCPM-2B", "GPT-2-XL", "Qwen3-0.6B")
TILES = ((16, 2), (16, 4), (32, 2), (32, 4), (64, 2), (64, 4))
"""(block_n, num_warps)"""
NUM_STAGES = 5
SPLIT_TILES = (1, 2, 4)
FLAGS = (False, True)


class Cut(NamedTuple):
    """How attention of one row is cut into programs."""

    block_n: int
    num_warps: int
    split_tiles: int
    """That a split has at least"""
    own: bool
    """Whether the new token has a program of its own"""
    preload: bool
    """Whether keys may be loaded before the projection is there"""


CUTS = [
    Cut(*tiles, least, own, preload)
    for tiles, least, own, preload in itertools.product(TILES, SPLIT_TILES, FLAGS, FLAGS)
]


def seconds(layer: TokenLayer, cut: Cut) -> float:
    """Return the time of one layer."""
    rules = {
        "MIN_SPLIT_TILES": cut.split_tiles, "OWN_ROWS": int(cut.own),
        "PRELOAD_BEHIND": 0, "PRELOAD_BYTES": attention_kernel.PRELOAD_BYTES * cut.preload,
    }  # fmt: skip
    with changed_rules(attention_kernel, **rules):
        config = DecodeConfig(cut.block_n, cut.num_warps, NUM_STAGES)
        return layer.seconds(layer.engine_configs(), repeats=7, attention=config)


def compile_cut(job: tuple[str, Cut]) -> None:
    """Compile in a process of its own, into Triton's cache."""
    model, cut = job
    seconds(TokenLayer(layer_of(model), num_bytes=0), cut)


def compile_all(args: argparse.Namespace) -> None:
    say(f"compiling {len(CUTS)} cuts for each model in {args.processes} processes")
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        pool.map(compile_cut, itertools.product(args.models, CUTS), chunksize=1)


def main() -> int:
    parser = sweep_parser(__doc__, MODELS)
    parser.add_argument("--processes", type=int, default=8, help="that compile (default: 8)")
    return sweep(parser, "tiles of attention", CUTS, Cut._asdict, seconds, compile_all)


if __name__ == "__main__":
    sys.exit(main())
