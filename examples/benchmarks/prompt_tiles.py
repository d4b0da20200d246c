"""Attention of prompts by its tiles.

    python examples/benchmarks/prompt_tiles.py --output docs/benchmarks/kernels.jsonl

A tile has queries times the heads that share a key, by keys. Large ones read keys less often; small
ones leave room for a second program on a multiprocessor, which computes while the first one begins
or ends: with prompts of a thousand tokens, a large part of the time. Prints each tile's time, its
rate, and whether the backend chooses it.
"""

from __future__ import annotations

import argparse

import torch

from jackfield.entrypoints.bench.kernels.cache_cases import (
    FORMATS,
    QWEN3_06B_CACHE,
    QWEN3_8B_CACHE,
    TINY_CACHE,
    CacheCases,
)
from jackfield.entrypoints.bench.kernels.timing import graph_seconds, median_seconds
from jackfield.entrypoints.bench.report import Emitter, environment, table
from jackfield.kernels.attention.paged_attention_prefill import PrefillConfig, prefill_config

SIZES = {"8b": QWEN3_8B_CACHE, "0.6b": QWEN3_06B_CACHE, "tiny": TINY_CACHE}
TILES = (
    PrefillConfig(64, 64, 4, 3), PrefillConfig(64, 128, 4, 3), PrefillConfig(128, 32, 4, 3),
    PrefillConfig(128, 64, 4, 2), PrefillConfig(128, 64, 4, 3), PrefillConfig(128, 64, 8, 3),
    PrefillConfig(128, 128, 8, 2), PrefillConfig(128, 128, 8, 3), PrefillConfig(256, 64, 8, 2),
    PrefillConfig(256, 64, 8, 3), PrefillConfig(256, 64, 8, 4),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["1x512", "4x300", "4x1200", "2x4096"],
                        metavar="ROWSxTOKENS")  # fmt: skip
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["8b", "0.6b"])
    parser.add_argument("--format", choices=FORMATS, default="auto", help="of the cache")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", help="a file of JSON lines, or - for standard output")
    args = parser.parse_args()
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    emitter = Emitter(args.output, environment(args.device))
    for size in args.sizes:
        cases = CacheCases(SIZES[size], device, dtype, args.format)
        shapes = cases.shapes
        group = shapes.num_heads // shapes.num_kv_heads
        for rows, tokens in (map(int, shape.split("x")) for shape in args.shapes):
            chosen = prefill_config(tokens, group, shapes.head_dim, dtype, True, False)
            for tile in sorted({*TILES, chosen}):
                case = cases.prefill(rows, tokens, tile)
                record = {
                    "workload": "prompt attention by tiles",
                    "at": {
                        "size": size, "rows": rows, "tokens": tokens, "cache": cases.label,
                        **tile._asdict(), "chosen": tile == chosen,
                    },
                }  # fmt: skip
                try:
                    work = case.make()
                    timed = graph_seconds([work], device) if device.type == "cuda" else (
                        median_seconds(work, device, repeats=1, warmup=0))  # fmt: skip
                except Exception as error:  # What a card has no room for is no candidate.
                    emitter.emit({**record, "error": f"{type(error).__name__}: {error}"[:200]})
                    continue
                rate = case.flops / timed / 1e12
                measured = {"us": round(1e6 * timed, 2), "tflops": round(rate, 1)}
                emitter.emit({**record, "measured": measured})
    lines = [line for line in emitter.records if "measured" in line]
    print(table([[*line["at"].values(), *line["measured"].values()] for line in lines],
                [*lines[0]["at"], *lines[0]["measured"]]))  # fmt: skip


if __name__ == "__main__":
    main()
