"""Decode attention by how its work is divided, over each type of cache: splits of a row, and tiles.

    python examples/benchmarks/decode_splits.py --output docs/benchmarks/kernels.jsonl

The backend gives each multiprocessor two programs, or four for few rows and for caches of 8 bits or
fewer (`choose_num_splits`). With more, less is waited for; with fewer, queries are read and results
joined less often. Prints each kernel's time, and the share of it in which its bytes are read at the
copy rate.
"""

from __future__ import annotations

import argparse

import torch

from jackfield.entrypoints.bench.kernels.cache_cases import (
    FORMATS,
    QWEN3_8B_CACHE,
    TINY_CACHE,
    CacheCases,
    Division,
)
from jackfield.entrypoints.bench.kernels.timing import graph_seconds, median_seconds
from jackfield.entrypoints.bench.report import Emitter, environment, table
from jackfield.entrypoints.bench.roofline import measure_ceilings
from jackfield.kernels.attention.decode_splits import DecodeConfig

CONFIGS = (DecodeConfig(32, 4, 5), DecodeConfig(64, 4, 3))
PROGRAMS = (2, 3, 4, 5, 6)
"""Of each multiprocessor."""


def divisions(rows: int, num_kv_heads: int, num_sms: int, default: int) -> list[Division]:
    """Return those to be tried; the backend's number of splits among them."""
    numbers = {max(1, programs * num_sms // (rows * num_kv_heads)) for programs in PROGRAMS}
    return [
        Division(splits, config) for config in CONFIGS for splits in sorted(numbers | {default})
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["8x32768", "19x32768", "8x2048", "32x4096"],
                        metavar="ROWSxTOKENS")  # fmt: skip
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--sizes", choices=("8b", "tiny"), default="8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", help="a file of JSON lines, or - for standard output")
    args = parser.parse_args()
    device = torch.device(args.device)
    tiny = args.sizes == "tiny"
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype_name = str(dtype).removeprefix("torch.")
    emitter = Emitter(args.output, environment(args.device))
    rate = measure_ceilings(args.device, dtype_name).copy_bytes_per_second
    for shape in args.shapes:
        rows, context = map(int, shape.split("x"))
        for name in args.formats:
            cases = CacheCases(TINY_CACHE if tiny else QWEN3_8B_CACHE, device, dtype, name)
            default = cases.num_splits(rows, context)
            for division in divisions(rows, cases.shapes.num_kv_heads, cases.num_sms, default):
                for make in (cases.fused_decode, cases.decode):
                    case = make(rows, context, division)
                    work = case.make()
                    timed = graph_seconds([work], device) if device.type == "cuda" else (
                        median_seconds(work, device, repeats=1, warmup=0))  # fmt: skip
                    emitter.emit({
                        "workload": "decode attention by division",
                        "at": {
                            "kernel": case.kernel, "rows": rows, "context": context,
                            "cache": cases.label, "splits": division.num_splits,
                            "chosen": division.num_splits == default,
                            "block_n": division.config.block_n,
                        },
                        "measured": {
                            "us": round(1e6 * timed, 2),
                            "share_of_floor": round(case.bytes / rate / timed, 3),
                        },
                    })  # fmt: skip
    rows_of_table = [[*line["at"].values(), *line["measured"].values()] for line in emitter.records]
    header = [*emitter.records[0]["at"], *emitter.records[0]["measured"]]
    print(table(rows_of_table, header))


if __name__ == "__main__":
    main()
