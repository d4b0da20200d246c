"""What attention adds to a layer of one token, and what asking for the next weights saves.

    python examples/benchmarks/weights_ahead.py --models SmolLM3-3B GPT-2-XL Qwen3-8B

A layer of one token waits for its attention, which reads a few kilobytes where contexts are short.
Meanwhile the weights of the next products can come to the L2 cache (`next_weights` of
`fused_decode_attention`). This times layers as a step has them (projection, attention, output, MLP;
recorded, each with weights of its own): without attention, with it, and by how much is asked for.
"""

from __future__ import annotations

import argparse
import sys

import torch

from jackfield.entrypoints.bench.kernels.token_layer import CONTEXT, MAX_MODEL_LEN, TokenLayer
from jackfield.entrypoints.bench.kernels.tune import layer_of
from jackfield.entrypoints.bench.report import Emitter, environment, say, table
from jackfield.entrypoints.bench.roofline import measure_ceilings
from jackfield.kernels.attention import fused_decode_attention as attention_kernel

MEGABYTES = (None, 0, 4, 8, 16, 24)
"""Asked for; None: without attention."""


def seconds(layer: TokenLayer, megabytes: int | None) -> float:
    """Return the time of one layer."""
    configs = layer.engine_configs()
    before = attention_kernel.AHEAD_BYTES
    try:
        attention_kernel.AHEAD_BYTES = (megabytes or 0) << 20
        return layer.seconds(configs, attends=megabytes is not None, reads_ahead=bool(megabytes))
    finally:
        attention_kernel.AHEAD_BYTES = before


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["SmolLM3-3B", "GPT-2-XL", "Qwen3-8B"])
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument(
        "--max-model-len", type=int, default=MAX_MODEL_LEN, help="decides the splits"
    )
    parser.add_argument("--output", help="a file of JSON lines, or - for standard output")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("weights_ahead.py: there is no CUDA device here to measure", file=sys.stderr)
        return 2
    emitter = Emitter(args.output, environment("cuda"))
    rate = measure_ceilings("cuda", "bfloat16").copy_bytes_per_second
    for model in args.models:
        say(f"measuring {model}")
        shape = layer_of(model)
        layer = TokenLayer(shape, context=args.context, max_model_len=args.max_model_len)
        for megabytes in MEGABYTES:
            took = seconds(layer, megabytes)
            emitter.emit({
                "workload": "weights ahead", "model": model,
                "at": {
                    "context": args.context, "max_model_len": args.max_model_len,
                    "attention": megabytes is not None, "megabytes": megabytes or 0,
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
