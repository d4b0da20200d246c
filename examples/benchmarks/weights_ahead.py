"""What it saves a step of one token to read weights ahead, while attention leaves memory idle.

    python examples/benchmarks/weights_ahead.py --models SmolLM3-3B GPT-2-XL Qwen3-8B

A layer of one token waits for its attention, which reads a few kilobytes where contexts are short.
Meanwhile the next products' weights could come to the L2 cache. This times layers as a step has
them (projection, attention, output, MLP; recorded, each with weights of its own), and the same with
a small kernel beside attention that asks for the first bytes of the weights which are read after
it. It bounds what a kernel of the step itself could gain by asking.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from jackfield.entrypoints.bench.kernels.timing import graph_seconds
from jackfield.entrypoints.bench.kernels.tune import layer_of
from jackfield.entrypoints.bench.kernels.tune_gemv import GemvProduct
from jackfield.entrypoints.bench.report import Emitter, environment, say, table
from jackfield.entrypoints.bench.roofline import measure_ceilings
from jackfield.entrypoints.bench.workloads import ARCHITECTURES
from jackfield.kernels.attention.decode_splits import choose_num_splits, workspace_elements
from jackfield.kernels.attention.fused_decode_attention import fused_decode_attention
from jackfield.kernels.tiles import prefetch_l2
from jackfield.kernels.tuning import gemv_tiles

LANE_BYTES, LANES = 1024, 32
BYTES = 1 << 29
"""Of weights that a measurement reads, so that the L2 cache does not help."""
MEGABYTES = (0, 4, 8, 16, 24)
HEADS = {"num_attention_heads": "n_head", "hidden_size": "n_embd"}
"""Names of sizes in config.json → others for the same."""


@triton.jit
def _prefetch_kernel(weight_ptr, num_bytes, LANES: tl.constexpr, LANE_BYTES: tl.constexpr):
    """weight_ptr: of bytes; each program asks for LANES times LANE_BYTES."""
    at = (tl.program_id(0) * LANES + tl.arange(0, LANES)) * LANE_BYTES
    prefetch_l2(weight_ptr + tl.minimum(at, num_bytes - LANE_BYTES), "1024")


class Layers:
    """Some layers of a model with random weights, and one sequence."""

    def __init__(self, model: str, context: int, device: torch.device) -> None:
        layer = layer_of(model)
        self.widths = [
            outputs * (2 if gated else 1) * inputs * 2 for outputs, inputs, gated in layer.products
        ]
        self.copies = max(2, BYTES // sum(self.widths))
        self.products = [GemvProduct(each, layer.centered, self.copies) for each in layer.products]
        sizes = ARCHITECTURES[model]

        def size(name: str) -> int:
            return int(sizes.get(name, sizes.get(HEADS.get(name, ""), 0)) or 0)

        self.heads = size("num_attention_heads")
        self.kv_heads = size("num_key_value_heads") or self.heads
        self.head_dim = size("head_dim") or size("hidden_size") // self.heads
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.splits = choose_num_splits(
            1, self.kv_heads, self.head_dim, torch.bfloat16, 4096, num_sms
        )

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=torch.bfloat16)

        blocks = -(-context // 16)
        self.qkv = random(1, width)
        self.cache = random(2, blocks + 1, 16, self.kv_heads, self.head_dim)
        self.table = torch.arange(blocks, dtype=torch.int32, device=device)[None]
        self.lengths = torch.tensor([context], dtype=torch.int32, device=device)
        self.slots = torch.tensor([context - 1], device=device)
        self.cos_sin = torch.randn(context, self.head_dim, device=device)
        self.counters = torch.zeros(self.kv_heads, dtype=torch.int32, device=device)
        floats = workspace_elements(1, self.heads, self.head_dim, self.splits)
        self.workspace = torch.empty(floats, device=device)
        self.side = torch.cuda.Stream(device)

    def attention(self) -> torch.Tensor:
        out = fused_decode_attention(
            self.qkv, self.heads, self.kv_heads, self.cache, self.table, self.lengths, self.slots,
            scale=self.head_dim**-0.5, counters=self.counters, workspace=self.workspace,
            num_splits=self.splits, cos_sin=self.cos_sin,
        )  # fmt: skip
        assert out is not None
        return out

    def ahead(self, weight: torch.Tensor, num_bytes: int) -> None:
        """Ask for the first bytes of a weight, beside what is launched next."""
        data = weight.view(torch.uint8).flatten()
        num_bytes = min(num_bytes, data.numel())
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            grid = (-(-num_bytes // (LANES * LANE_BYTES)),)
            _prefetch_kernel[grid](data, num_bytes, LANES, LANE_BYTES, num_warps=1)

    def all(self, megabytes: int) -> list[object]:
        """One step through all copies."""
        results: list[object] = []
        tiles = [gemv_tiles(each.weights[0], each.gated) for each in self.products]
        for copy in range(self.copies):
            for number, (each, chosen) in enumerate(zip(self.products, tiles, strict=True)):
                results.append(each.multiply(tuple(chosen), copy))
                if number == 0:
                    left = megabytes << 20
                    for later in self.products[1:]:
                        if left:
                            self.ahead(later.weights[copy], left)
                            left = max(0, left - later.weights[copy].nbytes)
                    results.append(self.attention())
        if megabytes:
            torch.cuda.current_stream().wait_stream(self.side)
        return results

    def work(self, megabytes: int) -> Callable[[], object]:
        return lambda: self.all(megabytes)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["SmolLM3-3B", "GPT-2-XL", "Qwen3-8B"])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--output", help="a file of JSON lines, or - for standard output")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("weights_ahead.py: there is no CUDA device here to measure", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    emitter = Emitter(args.output, environment("cuda"))
    rate = measure_ceilings("cuda", "bfloat16").copy_bytes_per_second
    for model in args.models:
        say(f"measuring {model}")
        layers = Layers(model, args.context, device)
        floor = sum(layers.widths) / rate
        for megabytes in MEGABYTES:
            seconds = graph_seconds([layers.work(megabytes)], device) / layers.copies
            emitter.emit({
                "workload": "weights ahead", "model": model,
                "at": {"context": args.context, "megabytes": megabytes},
                "measured": {
                    "layer_us": round(1e6 * seconds, 2), "share_of_floor": round(floor / seconds, 3)
                },
            })  # fmt: skip
    header = ["model", *emitter.records[0]["at"], *emitter.records[0]["measured"]]
    rows = [[line["model"], *line["at"].values(), *line["measured"].values()]
            for line in emitter.records]  # fmt: skip
    print(table(rows, header))
    return 0


if __name__ == "__main__":
    sys.exit(main())
