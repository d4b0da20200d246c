"""What attention adds to a layer of one token, and what asking for the next weights saves.

    python examples/benchmarks/weights_ahead.py --models SmolLM3-3B GPT-2-XL Qwen3-8B
    python examples/benchmarks/weights_ahead.py --tiles --models MiniCPM-2B Qwen3-0.6B

A layer of one token waits for its attention, which reads a few kilobytes where contexts are short.
Meanwhile the weights of the next products can come to the L2 cache (`next_weights` of
`fused_decode_attention`). This times layers as a step has them (projection, attention, output, MLP;
recorded, each with weights of its own): without attention, with it, and by how much is asked for.

With `--tiles`: by how attention is cut, whether the new token has a program of its own, and whether
keys are loaded before the projection is there.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from jackfield.entrypoints.bench.kernels.token_layer import CONTEXT, MAX_MODEL_LEN, TokenLayer
from jackfield.entrypoints.bench.kernels.tune import layer_of
from jackfield.entrypoints.bench.report import Emitter, environment, say, table
from jackfield.entrypoints.bench.roofline import measure_ceilings
from jackfield.kernels.attention import fused_decode_attention as attention_kernel
from jackfield.kernels.attention.decode_splits import DecodeConfig
from jackfield.kernels.tuning import gemv_tiles

MEGABYTES = (None, 0, 4, 8, 16, 24)
"""Asked for; None: without attention."""


TILES = ((16, 2), (16, 4), (32, 2), (32, 4), (64, 2), (64, 4))
"""(block_n, num_warps) of attention"""
NUM_STAGES = 5
SPLIT_TILES = (1, 2, 4)


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


def configs_of(layer: TokenLayer) -> dict[Any, Any]:
    """Return the tiles that an engine takes for the products."""
    return {
        product: gemv_tiles(each.weights[0], each.gated) for product, each in layer.products.items()
    }


def seconds(layer: TokenLayer, megabytes: int | None) -> float:
    """Return the time of one layer."""
    with set_rules(AHEAD_BYTES=(megabytes or 0) << 20):
        attends, reads_ahead = megabytes is not None, bool(megabytes)
        return layer.seconds(configs_of(layer), attends=attends, reads_ahead=reads_ahead)


def run_cut(layer: TokenLayer, cut: Cut) -> float:
    """Return the seconds of one layer."""
    rules = {
        "MIN_SPLIT_TILES": cut.split_tiles, "OWN_ROWS": int(cut.own),
        "PRELOAD_BEHIND": 0, "PRELOAD_BYTES": attention_kernel.PRELOAD_BYTES * cut.preload,
    }  # fmt: skip
    with set_rules(**rules):
        config = DecodeConfig(cut.block_n, cut.num_warps, NUM_STAGES)
        return layer.seconds(configs_of(layer), repeats=7, attention=config)


def compile_cut(job: tuple[str, Cut]) -> None:
    """Compile in a process of its own, into Triton's cache."""
    model, cut = job
    run_cut(TokenLayer(layer_of(model), num_bytes=0), cut)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["SmolLM3-3B", "GPT-2-XL", "Qwen3-8B"])
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument(
        "--max-model-len", type=int, default=MAX_MODEL_LEN, help="decides the splits"
    )
    parser.add_argument("--tiles", action="store_true", help="time cuts of attention")
    parser.add_argument("--processes", type=int, default=8, help="that compile them (default: 8)")
    parser.add_argument("--output", help="a file of JSON lines, or - for standard output")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("weights_ahead.py: there is no CUDA device here to measure", file=sys.stderr)
        return 2
    emitter = Emitter(args.output, environment("cuda"))
    rate = measure_ceilings("cuda", "bfloat16").copy_bytes_per_second
    flags = (False, True)
    cuts = [
        Cut(*tiles, least, own, preload)
        for tiles, least, own, preload in itertools.product(TILES, SPLIT_TILES, flags, flags)
    ]
    if args.tiles:
        say(f"compiling {len(cuts)} cuts for each model in {args.processes} processes")
        with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
            pool.map(compile_cut, itertools.product(args.models, cuts), chunksize=1)
    for model in args.models:
        say(f"measuring {model}")
        shape = layer_of(model)
        layer = TokenLayer(shape, context=args.context, max_model_len=args.max_model_len)
        timed: list[tuple[dict[str, Any], float]] = (
            [(cut._asdict(), run_cut(layer, cut)) for cut in cuts]
            if args.tiles
            else [
                ({"attention": mega is not None, "megabytes": mega or 0}, seconds(layer, mega))
                for mega in MEGABYTES
            ]
        )
        for choice, took in timed:
            emitter.emit({
                "workload": "tiles of attention" if args.tiles else "weights ahead",
                "model": model,
                "at": {"context": args.context, "max_model_len": args.max_model_len, **choice},
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
