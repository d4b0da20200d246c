"""How attention of one row is cut into programs, by the time of the layer that it is in.

    python examples/benchmarks/attention_cuts.py --models MiniCPM-2B GPT-2-XL Qwen3-0.6B

What is fastest alone is not in a layer, where attention begins while the projection ends. This
times layers of one token as a step has them (recorded, each with weights and keys of its own): by
tiles of keys, warps, the least that a split has, whether the new token has a program of its own,
and whether keys are loaded before the projection is there.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch

from jackfield.entrypoints.bench.kernels.token_layer import CONTEXT, MAX_MODEL_LEN, TokenLayer
from jackfield.entrypoints.bench.kernels.tune import layer_of
from jackfield.entrypoints.bench.report import Emitter, environment, say, table
from jackfield.entrypoints.bench.roofline import measure_ceilings
from jackfield.kernels.attention import fused_decode_attention as attention_kernel
from jackfield.kernels.attention.decode_splits import DecodeConfig

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


@contextlib.contextmanager
def set_rules(**rules: int) -> Iterator[None]:
    """Change what decode attention goes by."""
    before = {name: getattr(attention_kernel, name) for name in rules}
    try:
        for name, value in rules.items():
            setattr(attention_kernel, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(attention_kernel, name, value)


def seconds(layer: TokenLayer, cut: Cut) -> float:
    """Return the time of one layer."""
    rules = {
        "MIN_SPLIT_TILES": cut.split_tiles, "OWN_ROWS": int(cut.own),
        "PRELOAD_BEHIND": 0, "PRELOAD_BYTES": attention_kernel.PRELOAD_BYTES * cut.preload,
    }  # fmt: skip
    with set_rules(**rules):
        config = DecodeConfig(cut.block_n, cut.num_warps, NUM_STAGES)
        return layer.seconds(layer.engine_configs(), repeats=7, attention=config)


def compile_cut(job: tuple[str, Cut]) -> None:
    """Compile in a process of its own, into Triton's cache."""
    model, cut = job
    seconds(TokenLayer(layer_of(model), num_bytes=0), cut)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["MiniCPM-2B", "GPT-2-XL", "Qwen3-0.6B"])
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument(
        "--max-model-len", type=int, default=MAX_MODEL_LEN, help="decides the splits"
    )
    parser.add_argument("--processes", type=int, default=8, help="that compile (default: 8)")
    parser.add_argument("--output", help="a file of JSON lines, or - for standard output")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("attention_cuts.py: there is no CUDA device here to measure", file=sys.stderr)
        return 2
    emitter = Emitter(args.output, environment("cuda"))
    rate = measure_ceilings("cuda", "bfloat16").copy_bytes_per_second
    say(f"compiling {len(CUTS)} cuts for each model in {args.processes} processes")
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        pool.map(compile_cut, itertools.product(args.models, CUTS), chunksize=1)
    for model in args.models:
        say(f"measuring {model}")
        shape = layer_of(model)
        layer = TokenLayer(shape, context=args.context, max_model_len=args.max_model_len)
        for cut in CUTS:
            took = seconds(layer, cut)
            emitter.emit({
                "workload": "tiles of attention",
                "model": model,
                "at": {
                    "context": args.context, "max_model_len": args.max_model_len, **cut._asdict(),
                },
                "measured": {
                    "layer_us": round(1e6 * took, 2),
                    "share_of_floor": round(shape.num_bytes / rate / took, 3),
                },
            })  # fmt: skip
    rows = [
        [line["model"], *line["at"].values(), *line["measured"].values()]
        for line in emitter.records
    ]
    first = emitter.records[0]
    print(table(rows, ["model", *first["at"], *first["measured"]]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
