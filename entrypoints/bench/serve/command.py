"""`jackfield bench serve`: load on any OpenAI-style server, or on one started here (W5, W7).

Closed loop: a fixed number of requests is open at a time. Open loop: requests arrive at a rate,
independent of earlier ones. Reports percentiles of TTFT, TPOT (after the first token), ITL (between
chunks) and E2E.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import sys
import time
import traceback
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import msgspec
from tqdm import tqdm

from .... import __version__
from ....core.errors import JackfieldError
from ...flags.engine_flags import fail
from ..engine.session import checkpoint
from ..measuring_lock import held_async
from ..report import Emitter, Record, environment, say, table, version_of
from ..types import rounded
from ..workloads import BenchRequest, Workload, model_config_dict
from .clients import LoadResult, on_event_loop, send_load
from .latency_stats import (
    cache_counters,
    late_preparations,
    launch_waits,
    quantile,
    result_file,
    summarize,
)
from .load import Load, Target, send
from .load import client as connect
from .serve_options import Way, chosen_workloads, draw_chats, parse, ways
from .servers import SERVED, Server, free_port, server_command, serving

BUSY_CLIENT = 0.85
"""Share of a core beyond which the client may delay chunks."""
CHANCE_HITS = 0.02
"""Prefix cache hits among prompts without common prefixes."""
WARM_UP_AT_MOST = 64
"""Most requests before an open loop."""


def run(argv: list[str]) -> int:
    args, flags = parse(argv)
    bench = ServeBench(args, chosen_workloads(args), flags)
    try:
        return on_event_loop(bench.run())
    except (JackfieldError, RuntimeError, OSError, aiohttp.ClientError) as error:
        return fail(error)


class ServeBench:
    def __init__(
        self, args: argparse.Namespace, workloads: Sequence[Workload], flags: Sequence[str]
    ) -> None:
        self.args = args
        self.workloads = workloads
        self.flags = flags
        self.vocab_size: int = args.vocab_size
        self.trial = 1000 * args.seed
        self.status = 0
        self.server: Server | None = None
        """The process, if started here."""

    async def run(self) -> int:
        args = self.args
        async with self._server() as (target, started):
            facts: Record = {
                **environment("auto"),
                "engine": args.engine or "server",
                "model": target.model if args.engine is None else args.model or "embedded",
            }
            if args.engine is None:
                facts["url"] = target.url
            else:
                facts["engine_version"] = (
                    version_of("vllm") if args.engine == "vllm" else __version__
                )
            if self.flags:
                facts["options"] = list(self.flags)
            if args.scale != 1.0:
                facts["scale"] = args.scale
            if args.idle_seconds:
                facts["idle_seconds"] = args.idle_seconds
            emitter = Emitter(args.output, facts)
            if started:
                emitter.emit({"workload": "server start", "measured": rounded(started)})
            await asyncio.sleep(args.idle_seconds)
            async with held_async(args.lock_file):
                for workload in self.workloads:
                    await self._measure(target, workload, emitter)
        print(overview(emitter.records), file=sys.stderr if emitter.output == "-" else sys.stdout)
        return self.status

    @contextlib.asynccontextmanager
    async def _server(self) -> AsyncIterator[tuple[Target, dict[str, float]]]:
        """Yield the target, and the start-up time if the server was started here."""
        args = self.args
        if args.engine is None:
            url = args.base_url or f"http://{args.host}:{args.port}"
            yield self._target(url, args.model or await first_model(url, args.api_key)), {}
            return
        from ....core.loading.checkpoint_folder import checkpoint_folder

        with checkpoint(args.model, tokenizer=True) as (model, dummy):
            self.vocab_size = int(model_config_dict(checkpoint_folder(model))["vocab_size"])
            port = free_port()
            length = max(each.max_model_len for each in self.workloads)
            command = server_command(
                args.engine, model, dummy=dummy, port=port, max_model_len=length, flags=self.flags
            )
            say(f"starting {args.engine}'s server with {args.model or 'the embedded model'}")
            timeout = args.ready_check_timeout_sec
            async with serving(command, port, timeout=timeout) as server:
                self.server = server
                target = self._target(server.url, SERVED)
                async with connect(target) as session:
                    result = await send(session, target, BenchRequest([1, 2, 3], 2))
                if result.error is not None:
                    raise RuntimeError(f"the first request failed: {result.error}")
                first = result.times[0] - server.began
                yield target, {"ready_s": server.ready_seconds, "first_token_s": first}

    def _target(self, url: str, model: str) -> Target:
        args = self.args
        return Target(
            url=url, model=model, endpoint=args.endpoint, stream=args.stream,
            ignore_eos=args.ignore_eos, api_key=args.api_key, extra_body=args.extra_body,
            timeout=args.timeout,
        )  # fmt: skip

    async def _measure(self, target: Target, workload: Workload, emitter: Emitter) -> None:
        """Measure each load; a share of the capacity refers to earlier ones."""
        capacity = 0.0
        for way in ways(workload, self.args):
            if way.share:
                if not capacity:
                    continue
                way = msgspec.structs.replace(way, rate=way.share * capacity)
            try:
                runs, record = await self._one(target, workload, way)
            except Exception as error:
                self.status = 1
                traceback.print_exc()
                emitter.emit({"workload": workload.id, "at": way.facts, "error": str(error)[:500]})
                continue
            capacity = max(capacity, record["measured"]["requests_per_second"])
            emitter.emit({"workload": workload.id, "at": way.facts, **record})
            self._keep(runs, workload, way, emitter.facts)

    async def _one(
        self, target: Target, workload: Workload, way: Way
    ) -> tuple[list[LoadResult], Record]:
        """Measure one load; return each run's outcome, and their summary."""
        args = self.args
        await self._warm_up(target, workload, way)
        metrics_before = await metrics_of(target)
        before = cache_counters(metrics_before)
        loop_before = self.server.loop_seconds() if self.server else None
        start = time.perf_counter()
        runs: list[LoadResult] = []
        for _ in range(workload.repeats):
            self.trial += 1
            chats = draw_chats(workload, self.vocab_size, self.trial, way.requests)
            load = way.load(workload, chats, args.seed + len(runs))
            runs.append(await self._send(target, load, way))
        record = summarize(runs, args.percentile_metrics, args.metric_percentiles)
        if self.server and loop_before is not None:
            loop_seconds = (self.server.loop_seconds() or loop_before) - loop_before
            share = loop_seconds / (time.perf_counter() - start)
            record["measured"]["server_loop_cpu_share"] = float(f"{share:.4g}")
        metrics_after = await metrics_of(target)
        after = cache_counters(metrics_after)
        waits = quantile(launch_waits(metrics_before), launch_waits(metrics_after), 0.99)
        if waits is not None:
            record["measured"]["launch_wait_p99_at_most_ms"] = waits * 1e3
        late = late_preparations(metrics_after)
        if late is not None:
            record["measured"]["late_preparations"] = late - (
                late_preparations(metrics_before) or 0.0
            )
        looked_up = after.get("queries", 0.0) - before.get("queries", 0.0)
        if looked_up > 0:
            num_hits = after.get("hits", 0.0) - before.get("hits", 0.0)
            record["measured"]["prefix_hit_rate"] = float(f"{num_hits / looked_up:.6g}")
        if way.share:
            record["measured"]["offered_requests_per_second"] = float(f"{way.rate:.6g}")
        if record["failed"]:
            self.status = 1
            say(f"{workload.id}: {record['failed']} failed, the first: {record['first_failure']}")
        doubts = []
        if record["measured"]["client_cpu_share"] > BUSY_CLIENT:
            doubts.append("the client was busy: give it more --client-processes")
        shared = workload.system or workload.turns > 1
        if not shared and record["measured"].get("prefix_hit_rate", 0.0) > CHANCE_HITS:
            doubts.append("an earlier run left these prompts in the cache: give another --seed")
        if doubts:
            record["doubt"] = "; ".join(doubts)
            say(f"{workload.id}: {record['doubt']}")
        return runs, record

    async def _warm_up(self, target: Target, workload: Workload, way: Way) -> None:
        """Warm up with the load's concurrency, for a few tokens each."""
        count = self.args.num_warmups
        if count is None:
            count = min(way.max_concurrency or WARM_UP_AT_MOST, way.requests)
        if count == 0:
            return
        self.trial += 1
        chats = draw_chats(workload, self.vocab_size, self.trial, count)
        short = [
            [
                BenchRequest(request.prompt, max(2, request.output // 8), request.temperature)
                for request in chat[:1]
            ]
            for chat in chats
        ]
        outcome = await send_load(target, Load(chats=short, offsets=[0.0] * len(short)))
        for result in outcome.results:
            if result.error is not None:
                raise RuntimeError(f"a request before the load failed: {result.error}")

    async def _send(self, target: Target, load: Load, way: Way) -> LoadResult:
        total = sum(map(len, load.chats))
        off = True if self.args.disable_tqdm else None  # None: show it on a terminal only.
        with tqdm(total=total, desc=way.name, unit="req", disable=off, leave=False) as bar:
            return await send_load(
                target,
                load,
                processes=self.args.client_processes,
                done=lambda _: bar.update(),
            )

    def _keep(
        self, runs: Sequence[LoadResult], workload: Workload, way: Way, facts: dict[str, Any]
    ) -> None:
        """Write the files that the flags request."""
        args = self.args
        title = f"{facts['engine']} {workload.id} {way.name}"
        if args.save_result or args.save_detailed:
            metadata = {
                "date": datetime.datetime.now().strftime("%Y%m%d-%H%M%S"),
                "backend": facts["engine"], "model_id": facts["model"],
                "num_prompts": way.requests, "request_rate": f"{way.rate:g}",
                "burstiness": way.burstiness, "max_concurrency": way.max_concurrency,
            }  # fmt: skip
            result = result_file(
                runs, metadata, args.percentile_metrics, args.metric_percentiles,
                detailed=args.save_detailed,
            )  # fmt: skip
            name = args.result_filename or f"{_file_name(title)}-{time.time():.0f}.json"
            args.result_dir.mkdir(parents=True, exist_ok=True)
            (args.result_dir / name).write_text(json.dumps(result))
        if args.plot is not None:
            from .plots import plot_load

            plot_load(runs[-1].results, args.plot, title)


def overview(records: Sequence[Record]) -> str:
    """Return a table with one row per load."""
    columns = [
        ("requests_per_second", "req/s"), ("output_tokens_per_second", "out tok/s"),
        ("ttft_p50_ms", "TTFT p50"), ("ttft_p99_ms", "p99"), ("tpot_p50_ms", "TPOT p50"),
        ("tpot_p99_ms", "p99"), ("e2el_p50_ms", "E2E p50"), ("e2el_p99_ms", "p99 ms"),
        ("prefix_hit_rate", "prefix hits"),
    ]  # fmt: skip
    rows = []
    for record in records:
        if "at" in record:
            facts = ", ".join(f"{key}={value}" for key, value in record["at"].items())
            numbers = [record.get("measured", {}).get(key) for key, _ in columns]
            rows.append([record["workload"], facts, *numbers, record.get("failed")])
    return table(rows, ["what", "load", *(name for _, name in columns), "failed"])


def _file_name(title: str) -> str:
    return "".join(letter if letter.isalnum() or letter in ".-" else "-" for letter in title)


async def metrics_of(target: Target) -> str:
    """Return a server's /metrics; empty if it has none."""
    try:
        async with connect(target) as session, session.get(f"{target.url}/metrics") as response:
            return await response.text() if response.status == 200 else ""
    except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError):
        return ""


async def first_model(url: str, api_key: str) -> str:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=30)
    where = f"{url.rstrip('/')}/v1/models"
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        try:
            async with session.get(where) as response:
                if response.status != 200:
                    raise RuntimeError(
                        f"{where} answers with status {response.status}; give --model"
                    )
                return str((await response.json(content_type=None))["data"][0]["id"])
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise RuntimeError(f"no server answers at {where}: {error}") from error
        except (ValueError, LookupError, TypeError):
            raise RuntimeError(f"{where} lists no model; give --model") from None
