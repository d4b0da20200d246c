"""Is the device ever idle between two steps, and what does a step cost the host?

    python examples/benchmarks/timeline.py --model Qwen3-8B --rows 256 --streams
    python examples/benchmarks/timeline.py --rows 8 --device cpu --output -
    python examples/benchmarks/timeline.py --model Qwen3-8B --rows 256 --ranks 4
    python examples/benchmarks/timeline.py --model MiniCPM-2B --rows 1 --kernels

Requests decode in step; after a while some steps are watched. On the host, in microseconds a
step: planning it, taking its result in, handing outputs to streams (all on the event loop), and
launching it (on the launch thread). On the device, by torch's profiler: the share of the time in
which a kernel or a copy ran, and the gaps. Weights of Qwen3-8B are made up. `--streams`: each
request has a task that takes every token; else outputs are only read at the end. With `--ranks`,
also sending a plan to the others. Of what runs on the event loop, the processor time is reported,
too: on a busy machine it is what a step costs. With `--kernels`, those of one step are listed, each
with its start and what it took.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from jackfield import AsyncEngine, EngineConfig, OutputKind, SamplingParams
from jackfield.core.worker.serving_process import SWITCH_INTERVAL
from jackfield.entrypoints.bench.report import Emitter, add_output_options, environment, table
from jackfield.entrypoints.bench.workloads import ARCHITECTURES, write_model

GAP = 1.0
"""Microseconds; less is the pause between two launches in a graph."""
INPUTS = "_decode_inputs_kernel", "_step_inputs_kernel"
"""Of the kernels that a step begins with."""


class Watch:
    """Adds up what methods take, while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.seconds: dict[str, list[float]] = collections.defaultdict(list)
        self.processor: dict[str, list[float]] = collections.defaultdict(list)

    def method(self, owner: Any, name: str, part: str) -> None:
        """Time each call of `owner.name` as `part`."""
        plain: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(plain)
        def timed(*args: Any, **options: Any) -> Any:
            start, used = time.perf_counter(), time.thread_time()
            try:
                return plain(*args, **options)
            finally:
                if self.on:
                    self.processor[part].append(time.thread_time() - used)
                    self.seconds[part].append(time.perf_counter() - start)

        setattr(owner, name, timed)


async def measure(args: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    """Return what was measured of `args.steps` steps."""
    watch = Watch()
    kind = OutputKind.DELTA if args.streams else OutputKind.FINAL_ONLY
    params = SamplingParams(
        temperature=0.8, max_tokens=args.steps * 2 + 60, ignore_eos=True, detokenize=False,
        output_kind=kind,
    )  # fmt: skip
    config = EngineConfig(max_num_seqs=args.rows, **options)
    async with AsyncEngine(config) as engine:
        steps: Any = engine.core.steps
        watch.method(engine.core.scheduler, "schedule", "plan")
        watch.method(engine.core.scheduler, "update", "take in")
        watch.method(steps, "publish", "outputs")
        executor: Any = engine.core.executor
        if args.ranks == 1:
            watch.method(executor._worker, "step", "launch")
        else:
            watch.method(executor._joined.worker, "step", "launch")
            watch.method(executor, "_send", "send")

        async def generate_one(number: int) -> None:
            prompt = [(number * 7919 + place) % 500 for place in range(args.prompt)]
            async for _ in engine.generate(prompt, params):
                pass

        tasks = [asyncio.create_task(generate_one(number)) for number in range(args.rows)]
        await _all_decode(engine, args.rows)
        start = engine.stats().steps
        await _until(engine, start + 20)
        kinds = [ProfilerActivity.CUDA] if config.device != "cpu" else []
        context: Any = profile(activities=kinds) if kinds else contextlib.nullcontext()
        with context as profiler:
            first, watch.on, begin = engine.stats().steps, True, time.perf_counter()
            await _until(engine, first + args.steps)
            seconds, watch.on = time.perf_counter() - begin, False
            count = engine.stats().steps - first
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    measured: dict[str, Any] = {"step_ms": 1e3 * seconds / count}
    for part, times in sorted(watch.seconds.items()):
        name = part.replace(" ", "_")
        measured[f"{name}_us"] = 1e6 * statistics.median(times)
        if part != "launch":
            measured[f"{name}_processor_us"] = 1e6 * statistics.median(watch.processor[part])
    if kinds:
        measured |= device_facts(profiler, count)
    if kinds and args.kernels:
        print(table(kernels_of_a_step(profiler), ["kernel", "start_us", "us"]))
    return {name: float(f"{value:.4g}") for name, value in measured.items()}


def device_facts(profiler: Any, steps: int) -> dict[str, float]:
    """Busy share and gaps of the watched span."""
    cuda = torch.autograd.DeviceType.CUDA
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == cuda
    )
    busy, gaps, end = 0.0, [], spans[0][0]
    for begin, finish in spans:
        if begin - end > GAP:
            gaps.append(begin - end)
        busy += max(0.0, finish - max(begin, end))
        end = max(end, finish)
    span = end - spans[0][0]
    return {
        "busy_share": busy / span,
        "gaps_us_per_step": sum(gaps) / steps,
        "longest_gap_us": max(gaps, default=0.0),
        "launches_per_step": len(spans) / steps,
    }


def kernels_of_a_step(profiler: Any) -> list[list[Any]]:
    """Return name, start and duration, in us from the step's start, of what ran in a step in the
    middle of the watched span: from the kernel that makes its inputs to the next step's, which is
    the last."""
    cuda = torch.autograd.DeviceType.CUDA
    events = sorted(
        (event for event in profiler.events() if event.device_type == cuda),
        key=lambda event: event.time_range.start,
    )
    firsts = [number for number, event in enumerate(events) if event.name in INPUTS]
    if len(firsts) < 2:
        return []
    middle = (len(firsts) - 1) // 2
    step = events[firsts[middle] : firsts[middle + 1] + 1]
    begin = step[0].time_range.start
    return [
        [
            event.name[:60],
            round(event.time_range.start - begin, 2),
            round(event.time_range.end - event.time_range.start, 2),
        ]
        for event in step
    ]


async def _all_decode(engine: AsyncEngine, rows: int) -> None:
    while engine.stats().generation_tokens < 3 * rows or engine.stats().num_requests_running < rows:
        await asyncio.sleep(0.005)


async def _until(engine: AsyncEngine, step: int) -> None:
    while engine.stats().steps < step:
        await asyncio.sleep(0.001)


def main(argv: list[str] | None = None) -> int:
    """→ exit status"""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--model",
        default="",
        help=f"a folder, or one of {', '.join(ARCHITECTURES)} (default: embedded)",
    )
    parser.add_argument("--rows", type=int, default=256, help="requests that decode")
    parser.add_argument("--max-model-len", type=int, default=4352, help="of made-up models")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=50, help="steps to watch")
    parser.add_argument("--streams", action="store_true", help="take each token at once")
    parser.add_argument("--kernels", action="store_true", help="list those of one step")
    parser.add_argument("--ranks", type=int, default=1, help="tensor_parallel_size")
    parser.add_argument(
        "--overrides",
        type=json.loads,
        default={},
        metavar="JSON",
        help="values in place of those of the model's config.json",
    )
    parser.add_argument(
        "--options", type=json.loads, default={}, metavar="JSON", help="of the engine, besides"
    )
    parser.add_argument("--device", default="auto")
    add_output_options(parser)
    args = parser.parse_args(argv)
    if args.kernels and (args.device == "cpu" or not torch.cuda.is_available()):
        parser.error("--kernels: it lists those of a CUDA device; there is none, or --device cpu")
    sys.setswitchinterval(SWITCH_INTERVAL)
    options: dict[str, Any] = {"device": args.device, **args.options}
    if args.ranks > 1:
        options["tensor_parallel_size"] = args.ranks
    if args.overrides:
        options["hf_overrides"] = args.overrides
    emitter = Emitter(args.output, {**environment(args.device), "model": args.model or "embedded"})
    with tempfile.TemporaryDirectory() as folder:
        if args.model in ARCHITECTURES:
            options |= {
                "model": str(write_model(args.model, Path(folder))),
                "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16",
                "max_model_len": args.max_model_len,
            }  # fmt: skip
        elif args.model:
            options["model"] = args.model
        measured = asyncio.run(measure(args, options))
    at = {"rows": args.rows, "prompt": args.prompt, "steps": args.steps, "streams": args.streams}
    if args.ranks > 1:
        at["ranks"] = args.ranks
    for name in ("overrides", "options"):
        if given := getattr(args, name):
            at[name] = given
    emitter.emit({"workload": "timeline", "at": at, "measured": measured})
    print(table(list(measured.items()), ["what", "measured"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
