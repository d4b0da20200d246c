"""What attention adds to a layer of one token, and what asking for the next weights saves.

    python examples/benchmarks/weights_ahead.py --models SmolLM3-3B GPT-2-XL Qwen3-8B
    python examples/benchmarks/weights_ahead.py --early --models SmolLM3-3B Nemotron-Mini-4B

A layer of one token waits for its attention, which reads a few kilobytes where contexts are short.
Meanwhile the weights of the next products can come to the L2 cache (`next_weights` of
`fused_decode_attention`). This times layers as a step has them (projection, attention, output, MLP;
recorded, each with weights of its own): without attention, with it, and by how much is asked for.

With `--early`: by which of the kernels let the next one start at once, so that its first weights
are in registers when its input is there, and by whether keys are loaded before the projection.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from jackfield.entrypoints.bench.kernels.timing import graph_seconds
from jackfield.entrypoints.bench.kernels.tune import layer_of
from jackfield.entrypoints.bench.kernels.tune_gemv import GemvProduct
from jackfield.entrypoints.bench.report import Emitter, environment, say, table
from jackfield.entrypoints.bench.roofline import measure_ceilings
from jackfield.entrypoints.bench.workloads import ARCHITECTURES
from jackfield.kernels.attention import fused_decode_attention as attention_kernel
from jackfield.kernels.attention.decode_splits import (
    MIN_SPLIT_TILES,
    choose_num_splits,
    workspace_elements,
)
from jackfield.kernels.attention.fused_decode_attention import fused_decode_attention
from jackfield.kernels.tuning import gemv_tiles

BYTES = 1 << 29
"""Of weights that a measurement reads, so that the L2 cache does not help."""
MEGABYTES = (None, 0, 4, 8, 16, 24)
"""Asked for; None: without attention."""
AHEAD = 8
"""Megabytes asked for with `--early`."""
LONGER_SPLITS = (4, 8)
"""Tiles that a split has at least, tried with it."""
NEVER = 1 << 60
SHOWN = 8
"""Choices of a model that are reported, beside the rules'."""
HEADS = {"num_attention_heads": "n_head", "hidden_size": "n_embd"}
"""Names of sizes in config.json → others for the same."""


class Layers:
    """Some layers of a model with random weights, and one sequence."""

    def __init__(self, model: str, context: int, max_model_len: int, device: torch.device) -> None:
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
            1, self.kv_heads, self.head_dim, torch.bfloat16, max_model_len, num_sms
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

    def attention(self, next_weights: Sequence[torch.Tensor]) -> torch.Tensor:
        return fused_decode_attention(
            self.qkv, self.heads, self.kv_heads, self.cache, self.table, self.lengths, self.slots,
            scale=self.head_dim**-0.5, counters=self.counters, workspace=self.workspace,
            num_splits=self.splits, cos_sin=self.cos_sin, next_weights=next_weights,
        )  # fmt: skip

    def all(self, megabytes: int | None, early: Sequence[bool | None]) -> list[object]:
        """One step through all copies. early: of each product, as of `GemvConfig`."""
        results: list[object] = []
        tiles = [
            gemv_tiles(each.weights[0], each.gated)._replace(early=flag)
            for each, flag in zip(self.products, early, strict=True)
        ]
        for copy in range(self.copies):
            weights = [each.weights[copy] for each in self.products[1:]]
            for number, (each, chosen) in enumerate(zip(self.products, tiles, strict=True)):
                results.append(each.multiply(tuple(chosen), copy))
                if number == 0 and megabytes is not None:
                    results.append(self.attention(weights if megabytes else ()))
        return results

    def seconds(
        self,
        megabytes: int | None,
        device: torch.device,
        early: Sequence[bool | None] | None = None,
        **rules: int,
    ) -> float:
        """Of one layer. rules: of decode attention, by their names in its file."""
        flags = early or [None] * len(self.products)
        with set_rules(AHEAD_BYTES=(megabytes or 0) << 20, **rules):
            work = [lambda: self.all(megabytes, flags)]
            return graph_seconds(work, device) / self.copies


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


def early_starts(layers: Layers, device: torch.device) -> list[tuple[float, dict[str, Any]]]:
    """Return the seconds of a layer by who lets the next kernel start at once, the fastest first,
    after the rules' own choice ("by": "rule"). The fastest is also tried with longer splits."""
    by_rule = layers.seconds(AHEAD, device)
    timed: list[tuple[float, dict[str, Any]]] = []

    def add(products: Sequence[bool], attends: bool, preloads: bool, tiles: int) -> None:
        rules = {
            "EARLY_WIDTH": 0 if attends else NEVER, "PRELOAD_BEHIND": 0 if preloads else NEVER,
            "MIN_SPLIT_TILES": tiles,
        }  # fmt: skip
        choice = {
            "products": list(products), "attention": attends, "preload": preloads, "tiles": tiles,
        }  # fmt: skip
        timed.append((layers.seconds(AHEAD, device, products, **rules), choice))

    flags = [(False, True)] * (len(layers.products) + 2)
    for *products, attends, preloads in itertools.product(*flags):
        add(products, attends, preloads, MIN_SPLIT_TILES)
    _, best = min(timed, key=lambda each: each[0])
    for tiles, preloads in itertools.product(LONGER_SPLITS, (False, True)):
        add(best["products"], best["attention"], preloads, tiles)
    return [(by_rule, {"by": "rule"}), *sorted(timed, key=lambda each: each[0])]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["SmolLM3-3B", "GPT-2-XL", "Qwen3-8B"])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=4096, help="decides the splits")
    parser.add_argument("--early", action="store_true", help="time who lets the next one start")
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
        layers = Layers(model, args.context, args.max_model_len, device)
        floor = sum(layers.widths) / rate
        at = {"context": args.context, "max_model_len": args.max_model_len}
        timed: list[tuple[float, dict[str, Any]]]
        if args.early:
            workload = "early starts"
            timed = early_starts(layers, device)[: SHOWN + 1]
        else:
            workload = "weights ahead"
            timed = [
                (
                    layers.seconds(megabytes, device),
                    {"attention": megabytes is not None, "megabytes": megabytes or 0},
                )
                for megabytes in MEGABYTES
            ]
        for seconds, choice in timed:
            emitter.emit({
                "workload": workload, "model": model, "at": {**at, **choice},
                "measured": {
                    "layer_us": round(1e6 * seconds, 2), "share_of_floor": round(floor / seconds, 3)
                },
            })  # fmt: skip
    columns = list(emitter.records[-1]["at"])
    rows = [
        [line["model"], *(line["at"].get(name, "") for name in columns),
         *line["measured"].values(), line["at"].get("by", "")]
        for line in emitter.records
    ]  # fmt: skip
    print(table(rows, ["model", *columns, *emitter.records[0]["measured"], "by"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
