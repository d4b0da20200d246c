"""`jackfield bench tune`: measure how skinny products are best cut here, and write it down.

The file goes to `kernels/tuned/` under the device's name; engines read it from there and measure
nothing themselves. Every candidate's result is checked before it is timed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ..cli.options import Parser, fail
from .report import environment, say
from .workloads import ARCHITECTURES

ROWS = (8, 16, 32)
"""Beyond, what a product wins alone it loses in a step: measured with 64 on an H200."""
MODELS = ("Qwen3-0.6B", "Qwen3-8B")
SHARED_BYTES = 215_000
"""A multiprocessor's memory for tiles, less what the compiler wants."""
MEMORY = 600 << 20
"""Bytes of weights to go through, so that the L2 cache helps nobody."""
LAUNCHES = 24


def make_parser() -> Parser:
    parser = Parser(
        prog="jackfield bench tune",
        description="Measure how skinny products are best cut on this device.",
    )
    parser.add_argument("--models", nargs="+", default=MODELS, choices=sorted(ARCHITECTURES),
                        metavar="MODEL", help="whose layers (default: %(default)s)")  # fmt: skip
    parser.add_argument("--processes", type=int, default=8, help="that compile (default: 8)")
    parser.add_argument("--output", type=Path, help="default: kernels/tuned/DEVICE.json")
    return parser


def run(argv: list[str]) -> int:
    """→ exit status"""
    args = make_parser().parse_args(argv)
    try:
        return _run(args)
    except (ImportError, ConfigError) as error:
        return fail(error)


def _run(args: argparse.Namespace) -> int:
    import torch

    from ...kernels.tuning import file_for

    if not torch.cuda.is_available():
        raise ConfigError("bench tune: there is no CUDA device here to measure")
    jobs = [
        (product, rows, shape)
        for product in dict.fromkeys(p for model in args.models for p in products(model))
        for rows in ROWS
        for shape in candidates(product, rows)
    ]
    say(f"compiling {len(jobs)} candidates in {args.processes} processes")
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        compiled = pool.map(compile_one, jobs, chunksize=8)
    there = [job for job, done in zip(jobs, compiled, strict=True) if done]
    entries = []
    for product, rows in dict.fromkeys((product, rows) for product, rows, _ in there):
        shapes = [shape for p, r, shape in there if (p, r) == (product, rows)]
        entries.append(best(product, rows, shapes))
        say(json.dumps(entries[-1]))
    facts = environment("cuda")
    path = args.output or file_for(torch.cuda.get_device_name())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_page({**facts, "skinny": entries}))
    print(path)
    return 0


def products(model: str) -> list[tuple[int, int, bool]]:
    """The (outputs, inputs, gated) of a model's layers."""
    config = ARCHITECTURES[model]
    hidden, inner, head = (config[k] for k in ("hidden_size", "intermediate_size", "head_dim"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    found = [((heads + 2 * kv_heads) * head, hidden, False), (hidden, heads * head, False)]
    if "num_experts" not in config:
        found += [(inner, hidden, True), (hidden, inner, False)]
    return found


def candidates(product: tuple[int, int, bool], rows: int) -> Iterator[tuple[Any, ...]]:
    """Shapes worth a try, as tuples of `SkinnyShape`."""
    outputs, inputs, gated = product
    block_m = max(16, rows)
    for block_n, block_k, warps, stages in (
        (64, 64, 4, 6), (64, 128, 4, 4), (64, 256, 4, 3), (128, 64, 4, 4), (128, 128, 8, 3),
    ):  # fmt: skip
        if ((2 if gated else 1) * block_n + block_m) * block_k * 2 * stages > SHARED_BYTES:
            continue
        for split in (1, 2, 4):
            programs = -(-outputs // block_n) * split
            if split > 1 and (programs > 600 or inputs < 2 * block_k * split):
                continue
            for prefetch, early in ((0, True), (0, False), (1024, True), (16384, True)):
                if prefetch <= 1024 or outputs * inputs < 8 << 20:
                    yield block_m, block_n, block_k, split, warps, stages, prefetch, early


def compile_one(job: tuple[tuple[int, int, bool], int, tuple[Any, ...]]) -> bool:
    """In a process of its own: into Triton's cache. False where the device cannot run it."""
    import torch

    product, rows, shape = job
    try:
        _Product(product, rows, copies=1).skinny(shape, 0)
        torch.cuda.synchronize()
    except Exception as error:
        say(f"{job}: {error!r:.200}")
        return False
    return True


def best(
    product: tuple[int, int, bool], rows: int, shapes: list[tuple[Any, ...]]
) -> dict[str, Any]:
    """→ the entry of the file: the fastest, or no shape where the library is faster."""
    import torch

    from ...kernels.skinny import SkinnyShape
    from .timing import graph_seconds

    outputs, inputs, gated = product
    size = 2 * outputs * inputs * (2 if gated else 1)
    layer = _Product(product, rows, copies=max(2, min(LAUNCHES, MEMORY // size)))
    device = torch.device("cuda")

    def time(call: Any) -> float:
        works = [lambda i=i: call(i) for i in range(LAUNCHES)]
        return 1e6 * graph_seconds(works, device, repeats=5, warmup=1)

    library = time(layer.library)
    wanted = layer.library(0).float()
    timed = []
    for shape in shapes:
        error = (layer.skinny(shape, 0).float() - wanted).abs().max() / wanted.abs().max()
        if not error < 0.02:
            say(f"{product} {rows} {shape}: wrong by {float(error):.3f} of the largest")
            continue
        timed.append((time(lambda i, shape=shape: layer.skinny(shape, i)), shape))
    us, shape = min(timed)
    return {
        "outputs": outputs, "inputs": inputs, "gated": gated, "rows": rows,
        "shape": SkinnyShape(*shape)._asdict() if us < library else None,
        "us": round(us, 2), "library_us": round(library, 2),
    }  # fmt: skip


class _Product:
    """A layer's weights, copies of them, and both ways to multiply."""

    def __init__(self, product: tuple[int, int, bool], rows: int, copies: int) -> None:
        import torch

        from ...kernels.skinny import MAX_TILES, SkinnyWorkspace

        self.outputs, self.inputs, self.gated = product

        def random(*size: int) -> Any:
            return torch.randn(size, device="cuda", dtype=torch.bfloat16)

        self.x = random(rows, self.inputs)
        stacked = self.outputs * (2 if self.gated else 1)
        self.weights = [random(stacked, self.inputs) * 0.02 for _ in range(copies)]
        self.residual = None if self.gated else random(rows, self.outputs)
        self.workspace = SkinnyWorkspace(
            torch.empty(8 * rows * stacked, device="cuda"),
            torch.zeros(MAX_TILES, dtype=torch.int32, device="cuda"),
        )

    def skinny(self, shape: tuple[Any, ...], i: int) -> Any:
        from ...kernels.skinny import SkinnyShape, skinny

        return skinny(
            self.x, self.weights[i % len(self.weights)], residual=self.residual, gated=self.gated,
            shape=SkinnyShape(*shape), workspace=self.workspace,
        )  # fmt: skip

    def library(self, i: int) -> Any:
        import torch

        from ...kernels.silu_mul import silu_mul

        weight = self.weights[i % len(self.weights)].t()
        if self.residual is None:
            return silu_mul(torch.mm(self.x, weight))
        return torch.addmm(self.residual, self.x, weight)


def _page(facts: dict[str, Any]) -> str:
    """JSON, a line an entry."""
    entries = ",\n".join(f"  {json.dumps(entry)}" for entry in facts.pop("skinny"))
    return json.dumps(facts, indent=1)[:-2] + f',\n "skinny": [\n{entries}\n ]\n}}\n'
