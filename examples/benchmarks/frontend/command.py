"""The cost per streamed token in this process, without a model.

    python -m jackfield.examples.benchmarks.frontend chat --parts

Runs the real server, scheduler, detokenizer, parsers and sockets over an executor that returns at
once (`fake_executor.py`), with a client in a process of its own (`sink_client.py`). Processor time
is reported besides wall-clock time, which says little about the cost per token on a machine that
does other work.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec

from jackfield.core.config import EngineConfig
from jackfield.core.engine.async_engine import AsyncEngine
from jackfield.core.registry import load_plugins
from jackfield.core.text.tokenizer import Tokenizer
from jackfield.core.worker.serving_process import freeze
from jackfield.entrypoints.bench.engine.backends import event_loop
from jackfield.entrypoints.bench.report import (
    Emitter,
    Record,
    add_output_options,
    environment,
    say,
    summary,
)
from jackfield.entrypoints.bench.types import rounded
from jackfield.entrypoints.flags.parser import Parser
from jackfield.entrypoints.server.listen import Listen
from jackfield.entrypoints.server.server import listening

from .fake_executor import ScriptedExecutor
from .frontend_parts import STEP_PARTS, time_alone, watch_steps
from .frontend_processes import serving_fronts
from .sink_client import Drain, Drained

T = TypeVar("T")
Served: TypeAlias = tuple[ScriptedExecutor, str, AsyncEngine]
THOUGHT = (
    "The user wants the weather, so I should look it up first. The tool takes a city, and "
    "the city is plain from the question: it is Lisbon. Then I say what I am about to do. "
)
ANSWER = (
    "Here is what I found out about it. The harbour was quiet in the morning, and the boats came "
    "in one after another; by noon the market was full of people who wanted fish, bread and "
    'coffee. "It is always so on a Friday," said the woman at the gate, and she laughed.\n\n'
    "- First, look at the sky.\n- Then, ask somebody who lives there.\n\n"
    "It costs about 3 € there, ça va. "
)
CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Lisbon", "days": 3}}\n</tool_call>'
)
SINK = Path(__file__).with_name("sink_client.py")
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
STOPS = ["Observation:", "<|user|>", "\n\nHuman:"]


class Case(msgspec.Struct, frozen=True):
    """A kind of stream to measure."""

    name: str
    path: str = "/v1/chat/completions"
    stops: bool = False
    parsers: bool = False

    def body(self, tokens: int) -> Record:
        """Return the request's body."""
        body: Record = {"stream": True, "max_tokens": tokens, "ignore_eos": True}
        if self.path.endswith("/chat/completions"):
            body["messages"] = [{"role": "user", "content": "What is the weather in Lisbon?"}]
        else:
            body["prompt"] = "The weather in Lisbon is"
        if self.stops:
            body["stop"] = STOPS
        if self.parsers:
            body["tools"] = [TOOL]
        return body

    def script(self, tokenizer: Tokenizer, tokens: int) -> list[int]:
        """Return the token ids of the script; with parsers: reasoning, content, and a tool call at
        the end."""

        def ids(text: str, length: int = 0) -> list[int]:
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            return (token_ids * (length // len(token_ids) + 1))[:length] if length else token_ids

        if not self.parsers:
            return ids(ANSWER, tokens)
        begin, close, call = ids("<think>\n"), ids("</think>\n\n"), ids(CALL)
        budget = max(2, tokens - len(begin) - len(close) - len(call))
        return begin + ids(THOUGHT, budget // 2) + close + ids(ANSWER, budget - budget // 2) + call

    @property
    def options(self) -> Record:
        """The engine's options."""
        if not self.parsers:
            return {}
        return {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}


CASES = {
    case.name: case
    for case in (
        Case("chat"),
        Case("stops", stops=True),
        Case("parsers", parsers=True, stops=True),
        Case("completions", path="/v1/completions"),
    )
}


def flags() -> Parser:
    """Return this benchmark's parser."""
    parser = Parser(
        prog="frontend",
        description="Stream chats without a model, and tell the processor time a token.",
    )
    parser.add_argument(
        "cases", nargs="*", default=list(CASES), metavar="CASE",
        help=f"of {', '.join(CASES)} (default: all)",
    )  # fmt: skip
    parser.add_argument("--streams", type=int, default=256, help="open at once (default: 256)")
    parser.add_argument("--tokens", type=int, default=400, help="a stream (default: 400)")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs a case (default: 3)")
    parser.add_argument(
        "--api-server-count", type=int, default=1, metavar="N",
        help="front-end processes, as of `jackfield serve` (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--step-ms", type=float, default=0.0, metavar="MS",
        help="milliseconds that a step takes at least; 0: none (default). Front ends in other "
        "processes hold no step up: give them what they keep up with",
    )  # fmt: skip
    parser.add_argument(
        "--parts", action="store_true", help="tell where the microseconds go, too (chats only)"
    )
    add_output_options(parser)
    return parser


def run(argv: list[str]) -> int:
    """Return the exit status."""
    parser = flags()
    args = parser.parse_args(argv)
    for name in args.cases:
        if name not in CASES:
            parser.error(f"case: {name!r} is none of {', '.join(CASES)}")
    if args.api_server_count < 1 or (args.api_server_count > 1 and args.parts):
        parser.error("--api-server-count: must be at least 1, and 1 with --parts")
    if args.api_server_count > 1 and not args.step_ms > 0:
        parser.error("--api-server-count: needs --step-ms, or the engine runs ahead of them")
    emitter = Emitter(args.output, environment("cpu"))
    for name in args.cases:
        case = CASES[name]
        served = serving(
            case, args.streams, args.tokens, fronts=args.api_server_count, step_ms=args.step_ms
        )
        at: Record = {"case": name, "streams": args.streams, "tokens": args.tokens}
        if args.step_ms:
            at |= {"api_server_count": args.api_server_count, "step_ms": args.step_ms}
        work = _measure(case, served, at, args.repeats, args.parts)
        for record in on_loop(work):
            emitter.emit(record)
    print(summary(emitter.records))
    return 0


def on_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on an event loop as the server's."""
    loop = event_loop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


async def _measure(
    case: Case,
    served: contextlib.AbstractAsyncContextManager[Served],
    at: Record,
    repeats: int,
    parts: bool,
) -> list[Record]:
    """Measure one case; return its records, medians of the repeats."""
    streams, tokens = at["streams"], at["tokens"]
    at = {**at, "load": os.getloadavg()[0]}
    async with served as (executor, url, engine):
        say(f"{case.name}: {streams} streams of {tokens} tokens")
        runs = [await trial(case, executor, url, streams, tokens) for _ in range(repeats)]
        records: list[Record] = [
            {
                "workload": "frontend",
                "at": at,
                "measured": rounded(_medians(runs)),
                "repeats": {
                    name: [round(one[name], 2) for one in runs]
                    for name in ("cpu_us_per_token", "yardstick_ns")
                },
            }
        ]
        if parts and case.path.endswith("/chat/completions"):
            watch_steps(engine, executor)
            runs = [await trial(case, executor, url, streams, tokens) for _ in range(repeats)]
            body = msgspec.json.encode(case.body(tokens))
            alone = [time_alone(engine, body, executor.script, streams) for _ in range(repeats)]
            records.append(
                {
                    "workload": "frontend-parts",
                    "at": at,
                    "measured": rounded(_table(_medians(runs), _medians(alone))),
                }
            )
    return records


def _table(live: dict[str, float], alone: dict[str, float]) -> dict[str, float]:
    """Return the microseconds per token of each part; they add up to the total."""
    step = {part: live[f"{part} us"] for part in STEP_PARTS}
    total = live["cpu_us_per_token"]
    return {
        "stub executor": step["executor"],
        "scheduler": step["schedule"] + step["update"],
        **alone,
        "tokens to streams": step["publish"] - alone["detokenize"] - alone["stop strings"],
        "step metrics": step["metrics"],
        "outputs and handing to the transport": step["deliver"] - alone["parse"] - alone["encode"],
        "event loop and sockets": total - sum(step.values()),
        "total": total,
        "of it in the kernel": live["kernel_us_per_token"],
    }


def _medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(one[key] for one in runs) for key in runs[0]}


@contextlib.asynccontextmanager
async def serving(
    case: Case,
    streams: int,
    tokens: int,
    *,
    fronts: int = 1,
    step_ms: float = 0.0,
    **options: Any,
) -> AsyncIterator[Served]:
    """Run a server whose executor returns the case's script; yield (executor, address, engine).

    options: further engine options, where the engine runs in this process.
    """
    executor = ScriptedExecutor([0], streams, step_ms / 1e3)
    if fronts > 1:
        flags = [
            word
            for name, value in case.options.items()
            for word in (f"--{name.replace('_', '-')}", value)
        ]
        async with serving_fronts(executor, fronts, streams, flags) as (url, engine):
            assert engine.tokenizer is not None
            executor.script = case.script(engine.tokenizer, tokens)
            yield executor, url, engine
        return
    plugins = load_plugins()
    plugins["executor"].add("scripted", executor)
    options = {**case.options, **options}
    config = EngineConfig(executor="scripted", device="cpu", max_num_seqs=streams, **options)
    async with AsyncEngine(config, plugins=plugins) as engine:
        assert engine.tokenizer is not None
        executor.script = case.script(engine.tokenizer, tokens)
        async with listening(engine, Listen(port=0)) as url:
            freeze()
            yield executor, url, engine


async def trial(
    case: Case, executor: ScriptedExecutor, url: str, streams: int, tokens: int
) -> dict[str, float]:
    """Run all streams once; return what was measured while all of them were running."""
    executor.forget()
    host, _, port = url.removeprefix("http://").rpartition(":")
    body = msgspec.json.encode(case.body(tokens)).decode()
    order = Drain(host=host, port=int(port), path=case.path, body=body, streams=streams)
    client = await asyncio.create_subprocess_exec(
        sys.executable, str(SINK),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    before = loop_nanoseconds()
    out, _ = await client.communicate(msgspec.json.encode(order))
    after = loop_nanoseconds()
    drained = msgspec.json.decode(out, type=Drained)
    if drained.ok != streams:
        raise RuntimeError(
            f"{drained.ok} of {streams} streams ended well; the first: {drained.first}"
        )
    begin, end = executor.begin, executor.end
    if begin is None or end is None or begin.steps == end.steps:
        raise RuntimeError("never did all streams run together: more tokens, or fewer streams")
    count = streams * (end.steps - begin.steps)
    user, system = end.user - begin.user, end.system - begin.system
    others = [after - before for before, after in zip(begin.others, end.others, strict=True)]
    apart: dict[str, float] = {}
    if others:
        apart = {
            "engine_cpu_us_per_token": 1e6 * (user + system) / count,
            "fronts_cpu_us_per_token": 1e6 * sum(others) / count,
            "busiest_front_share": max(others) / (sum(others) or 1.0),
        }
        user += sum(others)
    return {
        **apart,
        "cpu_us_per_token": 1e6 * (user + system) / count,
        **({} if others else {"kernel_us_per_token": 1e6 * system / count}),
        "tokens_per_cpu_second": count / (user + system),
        "tokens_per_second": count / (end.wall - begin.wall),
        "frames_per_token": drained.frames / (streams * tokens),
        "bytes_per_token": drained.num_bytes / (streams * tokens),
        **{f"{part} us": (end.parts[part] - begin.parts[part]) / 1e3 / count for part in end.parts},
        "client_cpu_us_per_token": 1e6 * drained.cpu_seconds / (streams * tokens),
        "yardstick_ns": (before + after) / 2,
    }


def loop_nanoseconds() -> float:
    """Return the nanoseconds of processor time that an iteration of a fixed loop takes here and
    now.

    On a busy machine processor time is less comparable, too: threads that share a core or its
    caches slow each other down. Compare only measurements whose yardsticks are nearly equal.
    """
    turns = 40_000
    words: dict[int, str] = {}
    start = time.thread_time()
    for turn in range(turns):
        words[turn & 1023] = f"{turn}"
    return 1e9 * (time.thread_time() - start) / turns
