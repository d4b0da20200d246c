"""A layer's products by the number of tokens: which steps with prompts use the card well.

    python examples/benchmarks/prompt_products.py --output docs/benchmarks/kernels.jsonl

A step of 512 tokens is a few tiles of the library's products high: one row more may begin a tile.
Times the products of one layer, one after the other in a graph and with weights of their own, with
each of the libraries that torch can ask, and prints the rate beside that of a large product.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from jackfield.entrypoints.bench.kernels.timing import graph_seconds, median_seconds
from jackfield.entrypoints.bench.kernels.tune import products
from jackfield.entrypoints.bench.report import Emitter, environment, table
from jackfield.entrypoints.bench.roofline import measure_ceilings

LIBRARIES = ("cublas", "cublaslt")
TOKENS = (128, 256, 384, *range(448, 705, 32), 768, 896, 1024, 2048)
COPIES = 4
"""Layers with weights of their own, more than the L2 cache holds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="Qwen3-8B")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--divide", type=int, default=1, help="sizes by this, to try the program")
    parser.add_argument("--output", help="a file of JSON lines, or - for standard output")
    args = parser.parse_args()
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    emitter = Emitter(args.output, environment(args.device))
    peak = measure_ceilings(args.device, str(dtype).removeprefix("torch.")).matmul_flops
    layer = [
        (outputs * (2 if gated else 1) // args.divide, inputs // args.divide)
        for outputs, inputs, gated in products(args.model)
    ]
    weights = [
        [torch.randn(shape, device=device, dtype=dtype) for shape in layer] for _ in range(COPIES)
    ]

    def work_of(copy: int, tokens: int) -> Callable[[], object]:
        inputs = [torch.randn(tokens, size, device=device, dtype=dtype) for _, size in layer]
        return lambda: [x @ weight.T for x, weight in zip(inputs, weights[copy], strict=True)]

    for library in LIBRARIES if on_gpu else LIBRARIES[:1]:
        if on_gpu:
            torch.backends.cuda.preferred_blas_library(library)
        for tokens in args.tokens:
            works = [work_of(copy, tokens) for copy in range(COPIES)]
            timed = graph_seconds(works, device) if on_gpu else (
                median_seconds(works[0], device, repeats=1, warmup=0))  # fmt: skip
            flops = 2.0 * tokens * sum(outputs * inputs for outputs, inputs in layer)
            emitter.emit({
                "workload": "products of a layer by tokens", "model": args.model,
                "at": {"library": library, "tokens": tokens},
                "measured": {
                    "us": round(1e6 * timed, 2), "us_per_token": round(1e6 * timed / tokens, 4),
                    "tflops": round(flops / timed / 1e12, 1),
                    "share_of_large": round(flops / timed / peak, 3),
                },
            })  # fmt: skip
    header = [*emitter.records[0]["at"], *emitter.records[0]["measured"]]
    rows = [[*line["at"].values(), *line["measured"].values()] for line in emitter.records]
    print(table(rows, header))


if __name__ == "__main__":
    main()
