"""What adapters (LoRA) cost by kernels, for the layers of Qwen3-8B, and whether they are right.

    python examples/benchmarks/adapters_kernels.py --out docs/benchmarks/adapters.jsonl
    python examples/benchmarks/adapters_kernels.py --sweep      # other tiles, one change at a time

First results are compared with the torch reference, in bfloat16, and with themselves in another
order, bit by bit. Then each case is timed in a recorded graph of 36 layers, each with adapters of
its own, so that none is read from a cache: microseconds of a site's two launches, and of one that
only moves the bytes that they must. The last table is what a step gets in addition: all four sites
of all layers, and the launch that makes the step's chunks.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from jackfield.core.nn.operations import Operations
from jackfield.core.nn.step_operations.adapters import (
    CHUNK_TOKENS,
    AdapterChunks,
    AdapterTables,
    SiteWeights,
    chunk_count,
)
from jackfield.kernels.adapters.expand import expand
from jackfield.kernels.adapters.shrink import shrink
from jackfield.kernels.adapters.tiles import AdapterTiles, adapter_tiles
from jackfield.kernels.compile import Precompiler
from jackfield.plugins.operations.triton import TritonOperations

LAYERS = 36
UNIT = 8
"""Rank rows that lie one after the other"""
SITES: dict[str, tuple[int, tuple[int, ...]]] = {
    "qkv": (4096, (0, 4096, 5120, 6144)),
    "o": (4096, (0, 4096)),
    "gate_up": (4096, (0, 12288, 24576)),
    "down": (12288, (0, 4096)),
}
"""Inputs, and the bounds of the parts"""
STEPS = ((1, 1), (8, 1), (8, 8), (64, 1), (64, 8), (64, 64), (256, 8), (256, 64), (4096, 1))
"""(rows, adapters) of whole steps"""
MOST_DECODE_TOKENS, PROMPT_CHUNK = 512, 64
BOUND = 2e-2
"""Of a difference to the reference, beside outputs of about 1: bfloat16 has 8 bits."""
CHANGES: dict[str, Sequence[Any]] = {
    "splits": (2, 4, 8, 16, 32, 48, 64), "lanes": (16, 32, 64), "block_k": (64, 128, 256),
    "shrink_warps": (2, 4, 8), "shrink_stages": (2, 3, 4), "outputs": (32, 64, 128, 256),
    "ranks": (16, 32), "expand_warps": (2, 4, 8), "early": (False, True),
}  # fmt: skip
"""What --sweep tries, each beside the other defaults."""


class Layer(NamedTuple):
    """The pools of one layer's site."""

    a: torch.Tensor
    b: torch.Tensor


def pools(
    name: str, rank_rows: int, layers: int, device: torch.device, dtype: torch.dtype
) -> list[Layer]:
    """Create random numbers for so many rank rows, each of which has those of every layer."""
    inputs, bounds = SITES[name]
    parts = len(bounds) - 1
    width = parts * inputs + bounds[-1]
    matrix = torch.empty((rank_rows, layers * width), dtype=dtype, device=device).normal_()
    matrix.mul_(0.05)
    made = []
    for first in range(0, layers * width, width):
        a = matrix[:, first : first + parts * inputs].view(rank_rows, parts, inputs)
        made.append(Layer(a, matrix[:, first + parts * inputs : first + width]))
    return made


def site_of(name: str, layer: Layer, ranks: Sequence[Sequence[int]], seed: int = 0) -> SiteWeights:
    """Give each adapter units of the pools at random. ranks: [adapters][parts]"""
    device = layer.a.device
    most = max(16, *map(max, ranks))
    generator = torch.Generator().manual_seed(seed)
    units = torch.randperm(len(layer.a) // UNIT, generator=generator)
    rows = (units[:, None] * UNIT + torch.arange(UNIT)).flatten()
    table, used = torch.zeros(len(ranks), most, dtype=torch.int32), 0
    for place, counts in enumerate(ranks):
        table[place, : max(counts)] = rows[used : used + max(counts)]
        used += -(-max(counts) // UNIT) * UNIT
    scales = torch.rand(len(ranks), len(ranks[0]), generator=generator) + 0.5
    return SiteWeights(
        layer.a, layer.b, SITES[name][1], table.to(device),
        torch.tensor(ranks, dtype=torch.int32, device=device), scales.to(device),
    )  # fmt: skip


def chunk_inputs(rows: int, adapters: int, device: torch.device) -> tuple[Any, ...]:
    """Make arguments of `adapter_chunks`: adapters in turn, of a prompt in pieces."""
    tokens = torch.arange(rows)
    owners = tokens % adapters if rows <= MOST_DECODE_TOKENS else tokens * adapters // rows
    size = CHUNK_TOKENS if rows <= MOST_DECODE_TOKENS else PROMPT_CHUNK
    owners = torch.cat([owners, torch.tensor([-1])]).int().to(device)
    tables = AdapterTables(owners, torch.zeros(rows + 1, dtype=torch.int64, device=device))
    start = torch.arange(rows + 1, dtype=torch.int32, device=device)
    positions = torch.zeros(rows, dtype=torch.int64, device=device)
    return start[:-1], start, positions, tables, chunk_count(rows, adapters, size), size


def add(
    out: torch.Tensor,
    x: torch.Tensor,
    chunks: AdapterChunks,
    site: SiteWeights,
    tiles: AdapterTiles,
) -> None:
    """`Operations.add_adapters` by any tiles."""
    low, _ = shrink(x, *chunks, site.a, site.rank_rows, site.ranks, tiles)
    expand(out, low, *chunks, site.b, site.bounds, site.rank_rows, site.ranks, site.scales, tiles)


def ranks_of(name: str, rank: str, adapters: int) -> list[list[int]]:
    """Return the rank of each adapter and part; mixed: several, and parts without any."""
    parts = len(SITES[name][1]) - 1
    if rank != "mixed":
        return [[int(rank)] * parts] * adapters
    cycle = itertools.cycle((8, 64, 0, 16, 12))
    return [[next(cycle) for _ in range(parts)] for _ in range(adapters)]


def moved(chunks: AdapterChunks) -> AdapterChunks:
    """Return the chunks in another order, as are the tokens of each."""
    return AdapterChunks(chunks.places.flip(0), chunks.tokens.flip(0, 1).contiguous())


def check(
    name: str, rows: int, adapters: int, rank: str, device: torch.device, dtype: torch.dtype
) -> float:
    """Return the largest difference to the reference; infinite if results depend on an order."""
    ranks = ranks_of(name, rank, adapters)
    rank_rows = sum(-(-max(counts) // UNIT) * UNIT for counts in ranks) + 3 * UNIT
    site = site_of(name, pools(name, rank_rows, 1, device, dtype)[0], ranks)
    x = torch.randn(rows, SITES[name][0], device=device).to(dtype)
    base = torch.randn(rows, SITES[name][1][-1], device=device).to(dtype)
    operations, twin = TritonOperations(), Operations()
    inputs = chunk_inputs(rows, adapters, device)
    chunks, want_chunks = (one.adapter_chunks(*inputs) for one in (operations, twin))
    got, again, want = base.clone(), base.clone(), base.float()
    operations.add_adapters(got, x, chunks, site)
    operations.add_adapters(again, x, moved(chunks), site)
    twin.add_adapters(want, x, want_chunks, site)
    equal = all(map(torch.equal, chunks, want_chunks)) and torch.equal(got, again)
    error = (got.float() - want).abs() / want.abs().clamp(min=1.0)
    return float(error.max()) if equal and not got.isnan().any() else float("inf")


def graph_of(function: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Record what a function launches."""
    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def microseconds(function: Callable[[], None], seconds: float) -> float:
    """Return the median of replays of what a function launches."""
    graph, times = graph_of(function), []
    graph.replay()
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times) < 5:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) * 1000)
    return statistics.median(times)


def copy_bandwidth(device: torch.device) -> float:
    """Return bytes per microsecond of a large copy, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    return 2 * source.nbytes / microseconds(copy, 0.1)


def floor_bytes(name: str, rows: int, ranks: Sequence[Sequence[int]]) -> int:
    """Return what a site must move: its adapters once, x once, the output twice."""
    inputs, bounds = SITES[name]
    sizes = [inputs + end - first for first, end in itertools.pairwise(bounds)]
    weights = sum(rank * size for counts in ranks for rank, size in zip(counts, sizes, strict=True))
    return 2 * (weights + rows * (inputs + 2 * bounds[-1]))


class Bench:
    """One site with the pools of all layers."""

    def __init__(self, name: str, most_adapters: int, most_rank: int, device: torch.device) -> None:
        self.name, self.device = name, device
        self.layers = pools(name, most_adapters * most_rank, LAYERS, device, torch.bfloat16)
        self.operations = TritonOperations()

    def case(
        self, rows: int, adapters: int, rank: str, tiles: AdapterTiles | None = None
    ) -> Callable[[], None]:
        """Return what launches the site of every layer."""
        inputs, bounds = SITES[self.name]
        x = torch.randn(rows, inputs, device=self.device).bfloat16()
        out = torch.randn(rows, bounds[-1], device=self.device).bfloat16()
        chunks = self.operations.adapter_chunks(*chunk_inputs(rows, adapters, self.device))
        ranks = ranks_of(self.name, rank, adapters)
        first = site_of(self.name, self.layers[0], ranks)
        sites = [first._replace(a=layer.a, b=layer.b) for layer in self.layers]
        chosen = tiles or adapter_tiles(rows)

        def launch() -> None:
            for site in sites:
                add(out, x, chunks, site, chosen)

        return launch


def candidates(rows: int) -> Iterator[tuple[str, AdapterTiles]]:
    """Yield the default tiles, and those with one thing changed."""
    tiles = adapter_tiles(rows)
    yield "default", tiles
    for field, values in CHANGES.items():
        for value in values:
            if value != getattr(tiles, field):
                yield f"{field}={value}", tiles._replace(**{field: value})


def precompile(
    names: Sequence[str], rows: Sequence[int], ranks: Sequence[str], device: torch.device,
    sweep: bool,
) -> None:  # fmt: skip
    """Compile all kernels side by side."""
    with Precompiler(device):
        for name in names:
            layer = pools(name, 8 * 64, 1, device, torch.bfloat16)[0]
            for count, rank in itertools.product(rows, ranks):
                chunks = TritonOperations().adapter_chunks(*chunk_inputs(count, 1, device))
                site = site_of(name, layer, ranks_of(name, rank, 8))
                x = torch.empty(count, SITES[name][0], dtype=torch.bfloat16, device=device)
                out = torch.empty(count, SITES[name][1][-1], dtype=torch.bfloat16, device=device)
                for label, tiles in candidates(count):
                    if sweep or label == "default":
                        add(out, x, chunks, site, tiles)


def adapters_for(rows: int, most: Sequence[int]) -> list[int]:
    """Return numbers of adapters that a step of so many rows can have."""
    return [count for count in most if count <= rows]


def check_all(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether all are right; print those that are not."""
    worst = 0.0
    for name, rows in itertools.product(args.sites, args.rows):
        for adapters in adapters_for(rows, args.adapters)[-2:]:
            for rank in ("16", "mixed") if rows <= 64 else ("mixed",):
                error = check(name, rows, adapters, rank, device, dtype)
                worst = max(worst, error)
                if not error < BOUND:
                    print(f"WRONG {name}, {rows} rows, {adapters} adapters of {rank}: {error:.3g}")
    print(f"largest difference to the reference: {worst:.2g} (allowed: {BOUND})")
    return worst < BOUND


def time_sites(args: argparse.Namespace, bandwidth: float, device: torch.device) -> list[Any]:
    """Time every case; print a table of each site."""
    lines = []
    for name in args.sites:
        bench = Bench(name, max(args.adapters), max(map(int, args.ranks)), device)
        print(f"\n{name}: µs per site (µs to move the bytes)")
        print("rows  adapters" + "".join(f"{'rank ' + rank:>18}" for rank in args.ranks))
        for rows in args.rows:
            for adapters in adapters_for(rows, args.adapters):
                cells = []
                for rank in args.ranks:
                    took = microseconds(bench.case(rows, adapters, rank), args.seconds) / LAYERS
                    least = floor_bytes(name, rows, ranks_of(name, rank, adapters)) / bandwidth
                    lines.append({
                        "site": name, "rows": rows, "adapters": adapters, "rank": int(rank),
                        "microseconds": round(took, 2), "floor_microseconds": round(least, 2),
                    })  # fmt: skip
                    cells.append(f"{took:.2f} ({least:.2f})")
                print(f"{rows:<6}{adapters:<8}" + "".join(f"{cell:>18}" for cell in cells))
        del bench
    return lines


def time_steps(args: argparse.Namespace, device: torch.device) -> list[Any]:
    """Time all sites of all layers together, adapters of rank 16."""
    lines = []
    benches = [Bench(name, max(args.adapters), 16, device) for name in args.sites]
    print(f"\nrows  adapters  µs of chunks  µs of all sites of {LAYERS} layers, rank 16")
    for rows, adapters in STEPS:
        if rows not in args.rows or adapters not in args.adapters:
            continue
        cases = [bench.case(rows, adapters, "16") for bench in benches]
        inputs = chunk_inputs(rows, adapters, device)

        def step(cases: Sequence[Callable[[], None]] = cases) -> None:
            for case in cases:
                case()

        def divide(inputs: tuple[Any, ...] = inputs) -> None:
            for _ in range(10):
                benches[0].operations.adapter_chunks(*inputs)

        chunks, took = microseconds(divide, args.seconds) / 10, microseconds(step, args.seconds)
        lines.append({
            "rows": rows, "adapters": adapters, "rank": 16,
            "chunks_microseconds": round(chunks, 2), "step_microseconds": round(took, 1),
        })  # fmt: skip
        print(f"{rows:<6}{adapters:<10}{chunks:<14.1f}{took:.0f}")
    return lines


def sweep(args: argparse.Namespace, device: torch.device) -> list[Any]:
    """Time other tiles of adapters of rank 16; print those that are faster."""
    lines: list[Any] = []
    benches = [Bench(name, 8, 16, device) for name in args.sites]
    for rows in args.rows:
        results = {}
        for label, tiles in candidates(rows):
            try:
                results[label] = [
                    microseconds(bench.case(rows, adapters, "16", tiles), 0.01) / LAYERS
                    for bench in benches
                    for adapters in adapters_for(rows, (1, 8))
                ]
            except Exception as error:
                print(f"{rows} rows, {label}: {type(error).__name__}")
        before = sum(results["default"])
        print(f"\n{rows} rows, {before:.1f} µs by the default; sites: {', '.join(args.sites)}")
        for label, times in sorted(results.items(), key=lambda one: sum(one[1])):
            lines.append({"rows": rows, "tiles": label, "microseconds": times})
            if sum(times) <= 1.02 * before:
                each = " ".join(f"{one:.2f}" for one in times)
                print(f"  {label:18} {sum(times) / before - 1:+7.1%}   {each}")
    return lines


def main() -> int:
    """Check and time; 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON lines are appended here")
    parser.add_argument("--sites", nargs="+", choices=SITES, default=list(SITES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256, 4096])
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--ranks", nargs="+", default=["8", "16", "64"])
    parser.add_argument("--seconds", type=float, default=0.03, help="of timing, a case")
    parser.add_argument("--sweep", action="store_true", help="time other tiles in place of cases")
    args = parser.parse_args()
    device = torch.device("cuda")
    torch.manual_seed(1)
    began = time.monotonic()
    about = {
        "benchmark": "adapters_kernels",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": version("triton"),
    }
    print(json.dumps(about))
    ranks = ["16"] if args.sweep else sorted({"16", "64"} & set(args.ranks) or {"64"})
    precompile(args.sites, args.rows, ranks, device, args.sweep)
    print(f"compiled after {time.monotonic() - began:.0f} s")
    right = check_all(args, device, torch.bfloat16)
    print(f"checked after {time.monotonic() - began:.0f} s")
    if args.sweep:
        lines = sweep(args, device)
    else:
        bandwidth = copy_bandwidth(device)
        print(f"a copy moves {bandwidth / 1e6:.2f} TB/s")
        lines = time_sites(args, bandwidth, device) + time_steps(args, device)
    print(f"{'right' if right else 'WRONG'}, after {time.monotonic() - began:.0f} s")
    if args.out is not None:
        with args.out.open("a") as file:
            for line in lines:
                file.write(json.dumps({**about, **line}) + "\n")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
