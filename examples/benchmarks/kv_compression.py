"""What KV compression costs and gives: time of a compaction, and requests that run at once.

    python examples/benchmarks/kv_compression.py compaction
    python examples/benchmarks/kv_compression.py requests
    python examples/benchmarks/kv_compression.py requests --requests 32 --tokens 32768 \
        --fitting 5 --prompt-interval 4096 --cells fp8:none fp8:0.5 auto:none auto:0.5
    python examples/benchmarks/kv_compression.py compaction --layers 2 --tokens 300 --device cpu
    python examples/benchmarks/kv_compression.py requests --model "" --tokens 64 \
        --output-tokens 16 --requests 6 --fitting 2 --device cpu

`compaction`: caches of one request with the shapes of Qwen3-8B and random content, compacted by
each policy into fresh blocks, and with `--in-place` also within the first of its own: time on the
device, launches, the time in which the device was busy, and extra memory.

`requests`: Qwen3-8B with made-up weights and a cache that holds `--fitting` whole requests of type
auto (of fp8 twice as many, in the same bytes; of int8 and int4 likewise what fits in them, for
heads of 128 channels); more requests than that arrive at once. For each share that stays and each
type of cache: requests that ran at once while others waited, output tokens per second from the
first request to the last token, and the time between two tokens of a request. In place of a share,
a cell may have levels (auto:8@1024,4@8192). With `--until-full`, a setting ends some steps after
the last prompt that there is room for: fewer seconds, and numbers of steps without prompts alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch

from jackfield import AsyncEngine, EngineConfig, OutputKind, SamplingParams
from jackfield.core.cache.level_options import chooses, parse_levels
from jackfield.core.errors import JackfieldError
from jackfield.core.nn.attention import Attention
from jackfield.core.nn.context import BuildContext
from jackfield.core.nn.operations import Operations
from jackfield.core.parts.kv_compression import Compaction
from jackfield.core.protocols.attention import AttentionSpec
from jackfield.core.registry import load_plugins
from jackfield.core.worker.parts.compacted_layers import compacted_layers
from jackfield.core.worker.parts.compaction import Compactor
from jackfield.core.worker.parts.query_ring import QueryRing
from jackfield.core.worker.slot_table import SlotTable
from jackfield.entrypoints.bench.report import (
    Emitter,
    add_output_options,
    environment,
    percentile,
    say,
    table,
)
from jackfield.entrypoints.bench.workloads import ARCHITECTURES, write_model

QWEN3_8B = AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5)
NUM_LAYERS = 36
BLOCK_SIZE = 16
WHOLE = "none"
MORE_BLOCKS = {
    "fp8": 2, "fp8_e4m3": 2, "fp8_e5m2": 2,
    "int8": 512 / 264, "int8_int4": 512 / 200, "int4": 512 / 136,
}  # fmt: skip
"""Blocks of a type in the room of one with 16 bits, for heads of 128 channels: 4 bytes of scale and
zero come with each token and head."""
POLL_SECONDS = 0.01
SETTLED = 8
"""Steps without a prompt after which no further request is expected to be admitted."""


# ------------------------------------------------------------ the time of a compaction


def compactor_of(
    policy: str, args: argparse.Namespace, in_place: bool
) -> tuple[Compactor, Compaction]:
    """Return what compacts a request's caches, and the compaction."""
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if device.type == "cuda":
        from jackfield.plugins.operations.triton import TritonOperations

        operations: Operations = TritonOperations()
    else:
        operations = Operations()
    columns = -(-args.tokens // BLOCK_SIZE)
    kept = max(16, int(args.ratio * args.tokens))
    fresh = -(-kept // BLOCK_SIZE)
    layers = []
    for _ in range(args.layers):
        layer = Attention(QWEN3_8B, BuildContext(device, dtype, operations))
        shape = (2, 1 + columns + fresh, BLOCK_SIZE, QWEN3_8B.num_kv_heads, QWEN3_8B.head_dim)
        layer.kv_cache = torch.randn(shape, device=device, dtype=dtype)
        layers.append(layer)
    slots = SlotTable(
        num_slots=1, max_model_len=args.tokens + 16, block_size=BLOCK_SIZE, device=device,
        compacts=True,
    )  # fmt: skip
    order = torch.randperm(columns, dtype=torch.int32) + 1
    slots.block_table[0, :columns] = order.to(device)
    compressor = load_plugins()["kv_compressor"].load(policy)()
    ring, seen = None, compacted_layers(layers, args.tokens + 16)
    if compressor.num_queries:
        ring = QueryRing(seen, 1, compressor.num_queries, device, dtype)
        for layer in layers:
            assert layer.query_ring is not None
            layer.query_ring.normal_()
    compactor = Compactor(
        compressor, policy, seen, slots, BLOCK_SIZE, operations, dtype=dtype, ring=ring
    )
    targets = tuple(range(1 + columns, 1 + columns + fresh))
    if in_place:
        targets = tuple(order[:fresh].tolist())
    return compactor, Compaction(0, args.tokens, kept, (targets,))


def device_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the time from the first launch to the end of the last one."""
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def launches(work: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Return the kernels and copies that `work` launches, and the time in which they run."""
    if device.type != "cuda":
        return {}
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize(device)
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    seconds: dict[str, float] = {}
    for event in events:
        name = event.name[:80]
        seconds[name] = seconds.get(name, 0.0) + event.time_range.elapsed_us() / 1e3
    longest = sorted(seconds.items(), key=lambda each: -each[1])[:5]
    return {
        "launches": len(events),
        "busy_ms": round(sum(seconds.values()), 3),
        "longest": {name: round(value, 3) for name, value in longest},
    }


@torch.inference_mode()
def measure_compaction(policy: str, args: argparse.Namespace, in_place: bool) -> dict[str, Any]:
    """Return the median time of one compaction, and what it launches."""
    device = torch.device(args.device)
    compactor, compaction = compactor_of(policy, args, in_place)

    def work() -> None:
        failures = compactor.run([compaction])
        if failures:
            raise RuntimeError(failures[0])

    first = device_seconds(work, device)
    # A policy that takes seconds is not repeated.
    repeats = 1 if first > 5 else args.repeats
    seconds = [device_seconds(work, device) for _ in range(repeats)]
    measured: dict[str, Any] = {"ms": round(1e3 * statistics.median(seconds), 3)}
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        measured["extra_mib"] = round((torch.cuda.max_memory_allocated(device) - before) / 2**20)
        if first <= 5:
            measured |= launches(work, device)
    return measured


def run_compaction(args: argparse.Namespace, emitter: Emitter) -> None:
    """Measure each policy."""
    policies = args.policies or sorted(load_plugins()["kv_compressor"])
    for policy, in_place in product(policies, (False, True) if args.in_place else (False,)):
        say(f"compacting with {policy}" + " in place" * in_place)
        at = {"policy": policy, "tokens": args.tokens, "layers": args.layers, "ratio": args.ratio}
        at |= {"in_place": True} if in_place else {}
        try:
            measured = measure_compaction(policy, args, in_place)
        except torch.OutOfMemoryError as error:
            emitter.emit({"workload": "kv_compaction", "at": at, "error": str(error)[:200]})
            continue
        emitter.emit({"workload": "kv_compaction", "at": at, "measured": measured})
        if args.device == "cuda":
            torch.cuda.empty_cache()
    rows = [
        [
            r["at"]["policy"] + ", in place" * r["at"].get("in_place", False),
            *(r.get("measured", {}).get(key) for key in COMPACTION_COLUMNS),
        ]
        for r in emitter.records
    ]
    say(table(rows, ["policy", *COMPACTION_COLUMNS]))


COMPACTION_COLUMNS = ("ms", "launches", "busy_ms", "extra_mib")


# ------------------------------------------------------------ requests at once


async def serve(engine: AsyncEngine, args: argparse.Namespace) -> dict[str, Any]:
    """Generate for all requests at once, and count those that run."""
    rng = random.Random(1)
    prompts = [rng.choices(range(10, 1000), k=args.tokens) for _ in range(args.requests)]
    params = params_of(args.output_tokens)
    gaps: list[float] = []
    firsts: list[float] = []
    samples: list[tuple[float, int, int]] = []
    before = engine.stats()
    began = time.perf_counter()

    async def generate(prompt: list[int]) -> None:
        last = None
        async for output in engine.generate(prompt, params):
            assert output.error is None, output.error
            now = time.perf_counter()
            if last is None:
                firsts.append(now - began)
            else:
                gaps.append(now - last)
            last = now

    async def watch() -> None:
        while True:
            stats = engine.stats()
            samples.append(
                (time.perf_counter(), stats.num_requests_running, stats.num_requests_waiting)
            )
            await asyncio.sleep(POLL_SECONDS)

    watching = asyncio.create_task(watch())
    streams = [asyncio.create_task(generate(prompt)) for prompt in prompts]
    full: dict[str, Any] = {}
    try:
        if args.until_full:
            full = await when_full(engine, streams, firsts, gaps, args.full_steps)
        else:
            await asyncio.gather(*streams)
        seconds = time.perf_counter() - began
        after = engine.stats()
    finally:
        watching.cancel()
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    busy = [
        (until - since, running)
        for (since, running, waiting), (until, _, _) in pairwise(samples)
        if waiting
    ]
    total = sum(length for length, _ in busy)
    compactions = after.kv_compactions - before.kv_compactions
    took = after.kv_compaction_seconds - before.kv_compaction_seconds
    output_tokens = after.generation_tokens - before.generation_tokens
    return {
        "running_mean": round(sum(t * n for t, n in busy) / total, 2) if total else None,
        "running_most": max(n for _, n, _ in samples),
        "output_tokens_per_second": round(output_tokens / seconds, 1),
        "step_p50_ms": round(1e3 * percentile(gaps, 50), 3),
        "step_p90_ms": round(1e3 * percentile(gaps, 90), 3),
        "first_token_mean_s": round(statistics.mean(firsts), 3),
        "seconds": round(seconds, 3),
        "compactions": compactions,
        "compaction_ms": round(1e3 * took / compactions, 3) if compactions else None,
        "blocks_returned": after.kv_blocks_returned - before.kv_blocks_returned,
        "preemptions": after.num_preemptions - before.num_preemptions,
        **full,
    }


def params_of(output_tokens: int) -> SamplingParams:
    """Return parameters of a request that generates so many tokens."""
    return SamplingParams(
        temperature=0, max_tokens=output_tokens, ignore_eos=True, detokenize=False,
        output_kind=OutputKind.DELTA,
    )  # fmt: skip


async def when_full(
    engine: AsyncEngine,
    streams: list[asyncio.Task[None]],
    firsts: list[float],
    gaps: list[float],
    steps: int,
) -> dict[str, Any]:
    """Wait until every running request decodes and no other is admitted; measure the steps then.

    firsts, gaps: to which each request adds the time of its first token, and those between others.
    """

    async def decode(steps: int) -> bool:
        """Return whether the same requests decoded for so many steps."""
        running, began, seen = engine.stats().num_requests_running, len(firsts), len(gaps)
        while len(gaps) < seen + steps * max(1, running):
            await asyncio.sleep(POLL_SECONDS)
            if any(stream.done() for stream in streams):
                await asyncio.gather(*(stream for stream in streams if stream.done()))
                raise RuntimeError("a request ended before the cache was full: more output tokens")
            if engine.stats().num_requests_running != running or len(firsts) != began:
                return False
        return running == began

    measured = False
    while not measured:
        settled = await decode(SETTLED)
        first, began = len(gaps), time.perf_counter()
        measured = settled and await decode(steps)
    seconds = time.perf_counter() - began
    own = gaps[first:]
    return {
        "full_running": engine.stats().num_requests_running,
        "full_tokens_per_second": round(len(own) / seconds, 1),
        "full_step_p50_ms": round(1e3 * percentile(own, 50), 3),
    }


def engine_options(
    args: argparse.Namespace, model: str, ratio: str, cache_type: str
) -> dict[str, Any]:
    """Return the options of one setting."""
    length = args.tokens + args.output_tokens
    num_blocks = args.blocks or args.fitting * -(-(length + 1) // BLOCK_SIZE)
    options: dict[str, Any] = {
        "device": args.device, "max_model_len": length + 1, "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": 1 + int(MORE_BLOCKS.get(cache_type, 1) * num_blocks),
        "kv_cache_dtype": cache_type,
        "max_num_seqs": args.requests, "enable_prefix_caching": False, **args.options,
    }  # fmt: skip
    if model:
        options |= {"model": model, "load_format": "dummy", "skip_tokenizer_init": True}
    if "@" in ratio:
        options |= {"kv_compression_levels": ratio}
        if chooses(parse_levels(ratio)):
            options |= {"kv_compression": args.policy}
    elif ratio != WHOLE:
        options |= {"kv_compression": args.policy, "kv_compression_ratio": float(ratio)}
    if ratio != WHOLE:
        options |= {"kv_compression_interval": args.interval}
        options |= {"kv_compression_prompt_interval": args.prompt_interval}
    return options


async def measure_requests(options: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Start an engine, warm it up, and measure."""
    started = time.perf_counter()
    async with AsyncEngine(EngineConfig.from_options(options)) as engine:
        # Once a prompt of full length, compacted as the others: its kernels are then compiled.
        prompts = [[9] * args.tokens, *([9 - n] * min(900, args.tokens) for n in range(3))]
        params = params_of(min(4, args.output_tokens))

        async def drain(prompt: list[int]) -> None:
            async for _ in engine.generate(prompt, params):
                pass

        await asyncio.gather(*map(drain, prompts))
        say(f"ready after {time.perf_counter() - started:.1f} s")
        return {"kv_blocks": engine.info.num_blocks, **await serve(engine, args)}


def run_requests(args: argparse.Namespace, emitter: Emitter) -> None:
    """Measure each setting in an engine of its own."""
    began, longest = time.perf_counter(), 0.0
    cells = args.cells or [f"{kind}:{ratio}" for kind in args.cache_types for ratio in args.ratios]
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_model(args.model, Path(folder))) if args.model else ""
        for cell in cells:
            since = time.perf_counter()
            if args.deadline is not None and since - began + longest > args.deadline:
                say(f"{cell}: left out, as the one before it took {longest:.0f} s (--deadline)")
                continue
            cache_type, _, ratio = cell.partition(":")
            say(f"cache {cache_type}, ratio {ratio}")
            at = {
                "ratio": ratio, "cache": cache_type, "requests": args.requests,
                "tokens": args.tokens, "output_tokens": args.output_tokens,
                "policy": None if ratio == WHOLE else args.policy,
            }  # fmt: skip
            if ratio != WHOLE and args.prompt_interval:
                at |= {"prompt_interval": args.prompt_interval}
            workload = "kv_requests_until_full" if args.until_full else "kv_requests"
            record = {"workload": workload, "model": args.model or "embedded", "at": at}
            try:
                options = engine_options(args, model, ratio, cache_type)
                measured = asyncio.run(measure_requests(options, args))
            except (JackfieldError, RuntimeError) as error:
                emitter.emit({**record, "error": str(error)[:200]})
                continue
            emitter.emit({**record, "measured": measured})
            say(f"{cell}: {json.dumps(measured)}")
            longest = time.perf_counter() - since
            if args.device == "cuda":
                torch.cuda.empty_cache()
    rows = [
        [r["at"]["cache"], r["at"]["ratio"],
         *(r.get("measured", {}).get(key) for key in REQUEST_COLUMNS)]
        for r in emitter.records
    ]  # fmt: skip
    say(table(rows, ["cache", "ratio", *REQUEST_COLUMNS]))
    for record in emitter.records:
        if "error" in record:
            say(f"{record['at']['cache']}, {record['at']['ratio']}: {record['error']}")


REQUEST_COLUMNS = (
    "running_mean", "running_most", "output_tokens_per_second", "step_p50_ms", "compaction_ms",
    "preemptions", "seconds", "full_running", "full_step_p50_ms", "full_tokens_per_second",
)  # fmt: skip


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["compaction", "requests"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, help="of each prompt (default: 32768; 8192)")
    group = parser.add_argument_group("compaction")
    group.add_argument("--policies", nargs="+", help="default: all")
    group.add_argument("--ratio", type=float, default=0.5, help="share that stays (default: 0.5)")
    group.add_argument("--layers", type=int, default=NUM_LAYERS)
    group.add_argument("--repeats", type=int, default=5)
    group.add_argument("--in-place", action="store_true", help="also within the cache's own blocks")
    group = parser.add_argument_group("requests")
    group.add_argument("--model", default="Qwen3-8B", choices=["", *ARCHITECTURES])
    group.add_argument("--requests", type=int, default=24)
    group.add_argument("--output-tokens", type=int, default=1024)
    group.add_argument("--fitting", type=int, default=8, help="whole requests that fit, type auto")
    group.add_argument("--blocks", type=int, help="of the cache, type auto, instead of --fitting")
    group.add_argument("--ratios", nargs="+", default=[WHOLE, "0.5", "0.25"])
    group.add_argument("--cache-types", nargs="+", default=["auto", "fp8"])
    group.add_argument(
        "--cells",
        nargs="+",
        metavar="TYPE:RATIO|LEVELS",
        help="instead of --cache-types and --ratios",
    )
    group.add_argument(
        "--deadline", type=float, metavar="SECONDS",
        help="begin no cell that would end later, if it took as long as the one before it",
    )  # fmt: skip
    group.add_argument(
        "--until-full", action="store_true", help="end once the cache is full and all decode"
    )
    group.add_argument("--full-steps", type=int, default=64, help="that are measured then")
    group.add_argument(
        "--prompt-interval", type=int, default=0, help="see --kv-compression-prompt-interval"
    )
    group.add_argument("--policy", default="key_norm")
    group.add_argument("--interval", type=int, default=0, help="see --kv-compression-interval")
    group.add_argument(
        "--options", type=json.loads, default={}, metavar="JSON", help="more engine options"
    )
    add_output_options(parser)
    args = parser.parse_args()
    args.tokens = args.tokens or (32768 if args.what == "compaction" else 8192)
    emitter = Emitter(args.output, environment(args.device))
    if args.what == "compaction":
        run_compaction(args, emitter)
    else:
        run_requests(args, emitter)
    return 0


if __name__ == "__main__":
    sys.exit(main())
