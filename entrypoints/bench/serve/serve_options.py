"""Flags of `jackfield bench serve`, named as in `vllm bench serve`, and the loads that they
define."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...flags.foreign_options import Refused
from ...flags.parser import Parser
from ...flags.vllm_values import chosen
from ..engine.session import add_model_options
from ..measuring_lock import HELP as LOCK_HELP
from ..report import Record, add_output_options
from ..workloads import BenchRequest, Kind, Workload, choose, draw
from .latency_stats import METRICS
from .load import CHAT_ENDPOINT, Load, arrivals
from .servers import SERVERS

KINDS: tuple[Kind, ...] = ("http", "chats", "first")


def no_dataset(name: str) -> Sequence[str]:
    raise Refused(f"there is no {name} here: prompts are random token ids, or a WORKLOAD's")


RANDOM = Workload(
    id="random", title="random token ids", kind="http", models=(), prompt=(1024, 1024),
    output=(128, 128), requests=1000, repeats=1, headline="output_tokens_per_second",
    higher_is_better=True,
)  # fmt: skip


OF_VLLM = {
    "--backend": chosen(
        "--endpoint",
        {"openai-chat": ("--endpoint=/v1/chat/completions",)},
        dict.fromkeys(("vllm", "openai"), "--endpoint is /v1/completions"),
    ),
    "--dataset-name": chosen(
        "nothing",
        unneeded={"random": "prompts are random token ids"},
        otherwise=no_dataset,
    ),
}
"""Options of `vllm bench serve` → what they become."""


class Way(msgspec.Struct, frozen=True, kw_only=True):
    requests: int
    max_concurrency: int | None = None
    rate: float = math.inf
    burstiness: float = 1.0
    share: float = 0.0
    """If not 0, the rate as a share of the closed loops' best."""

    @property
    def facts(self) -> Record:
        facts: Record = {}
        if self.max_concurrency is not None:
            facts["max_concurrency"] = self.max_concurrency
        if self.share:
            facts["request_rate"] = f"{100 * self.share:.0f} % of capacity"
        elif self.rate != math.inf or self.max_concurrency is None:
            facts["request_rate"] = f"{self.rate:g}"
        if self.rate != math.inf and self.burstiness != 1.0:
            facts["burstiness"] = f"{self.burstiness:g}"
        return {**facts, "requests": self.requests}

    @property
    def name(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.facts.items())

    def load(self, workload: Workload, chats: list[list[BenchRequest]], seed: int) -> Load:
        if workload.burst:
            count = len(chats) - workload.streams
            bursts = [workload.interval * (1 + n // workload.burst) for n in range(count)]
            return Load(chats=chats, offsets=[0.0] * workload.streams + bursts)
        offsets = arrivals(len(chats), self.rate, self.burstiness, seed)
        return Load(chats=chats, offsets=offsets, max_concurrency=self.max_concurrency)


def checked(
    kind: type[int] | type[float], low: float, *, above: bool = False
) -> Callable[..., Any]:
    """Return a parser of numbers of at least `low`, or above it."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = kind(low) - 1
        if not (value > low if above else value >= low):
            words = "above" if above else "at least"
            raise argparse.ArgumentTypeError(f"must be a number {words} {low:g}, got {text!r}")
        return value

    return parse


def _metrics(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in METRICS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(METRICS)}")
    return names


def _percents(text: str) -> list[float]:
    try:
        percents = [float(each) for each in text.split(",")]
    except ValueError:
        percents = [-1.0]
    if not all(0 <= each <= 100 for each in percents):
        raise argparse.ArgumentTypeError(f"must be numbers from 0 to 100 and commas, got {text!r}")
    return percents


def _body(text: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return body


def make_parser() -> Parser:
    """Return the parser, whose unknown flags go to the server that --engine starts."""
    parser = Parser(
        prog="jackfield bench serve",
        usage="%(prog)s [WORKLOAD ...] [options]",
        description="Load an OpenAI-style server, and time its answers: one that runs, or one that "
        "is started here with --engine. Workloads: W5, streams, traffic, "
        "first-token, W7; none: random requests, as the "
        "options say.",
        epilog="With --engine, other options go to the command `serve` of that engine as they are.",
    )
    parser.other_options = OF_VLLM
    count, size = checked(int, 1), checked(int, 0)
    server = parser.add_argument_group("server")
    server.add_argument("--base-url", help="of one that runs (default: --host and --port)")
    server.add_argument("--host", default="127.0.0.1")
    server.add_argument("--port", type=count, default=8000)
    server.add_argument("--endpoint", default="/v1/completions",
                        help="path; /chat/completions is sent messages")  # fmt: skip
    server.add_argument("--api-key", default="", help="key to send")
    server.add_argument("--vocab-size", type=count, default=1024,
                        help="token ids are below it, if it runs (default: 1024)")  # fmt: skip
    server.add_argument("--engine", choices=SERVERS, help="start its server, with --model")
    server.add_argument("--ready-check-timeout-sec", type=checked(float, 0), default=600.0,
                        help="seconds for it to be ready")  # fmt: skip
    add_model_options(parser)
    load = parser.add_argument_group("load, instead of the workload's own")
    load.add_argument("--num-prompts", type=count, help="requests, or chats (default: 1000)")
    load.add_argument("--request-rate", type=checked(float, 0, above=True), nargs="+",
                      help="a second, however long they take; inf: all at once")  # fmt: skip
    load.add_argument("--open-loop", action=argparse.BooleanOptionalAction, default=True,
                      help="also at shares of the rate that closed loops reached")  # fmt: skip
    load.add_argument("--burstiness", type=checked(float, 0, above=True), default=1.0,
                      help="1: Poisson arrivals; less: in bunches; inf: evenly spaced")  # fmt: skip
    load.add_argument("--max-concurrency", type=count, nargs="+", help="requests open at most")
    load.add_argument("--random-input-len", type=count, nargs="+", metavar="N",
                      help="tokens of a prompt; two numbers: a range")  # fmt: skip
    load.add_argument("--random-output-len", type=count, nargs="+", metavar="N",
                      help="tokens of an answer; two numbers: a range")  # fmt: skip
    load.add_argument("--random-range-ratio", type=checked(float, 0), metavar="R",
                      help="lengths from (1 - R) to (1 + R) times those")  # fmt: skip
    load.add_argument("--random-prefix-len", type=size, help="tokens that all prompts begin with")
    load.add_argument("--temperature", type=checked(float, 0))
    load.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True)
    load.add_argument("--stream", action=argparse.BooleanOptionalAction, default=True)
    load.add_argument("--seed", type=size, default=0, help="of tokens and arrivals")
    load.add_argument("--num-warmups", type=size,
                      help="requests before it (default: as many as are open at once)")  # fmt: skip
    load.add_argument("--repeats", type=count, help="of each load; latencies are put together")
    load.add_argument("--extra-body", type=_body, default={}, metavar="JSON",
                      help="more fields of each request; null takes one out")  # fmt: skip
    load.add_argument("--timeout", type=checked(float, 0, above=True), default=600.0,
                      help="seconds for one request")  # fmt: skip
    load.add_argument("--client-processes", type=count, default=1,
                      help="that share the load, when one cannot keep up")  # fmt: skip
    load.add_argument("--idle-seconds", type=checked(float, 0), default=0.0, metavar="SECONDS",
                      help="without a request before the first load, in which a server prepares "
                      "for steps to come")  # fmt: skip
    load.add_argument("--lock-file", metavar="FILE", help=LOCK_HELP)
    _add_result_options(parser)
    return parser


def _add_result_options(parser: Parser) -> None:
    results = parser.add_argument_group("results")
    results.add_argument("--percentile-metrics", type=_metrics, default=list(METRICS),
                         help=f"of {','.join(METRICS)} (default: all)")  # fmt: skip
    results.add_argument("--metric-percentiles", type=_percents, default=[50.0, 90.0, 99.0],
                         help="default: 50,90,99")  # fmt: skip
    results.add_argument("--save-result", action="store_true",
                         help="a JSON file a load, as of vllm bench serve")  # fmt: skip
    results.add_argument("--save-detailed", action="store_true", help="with each request in it")
    results.add_argument("--result-dir", type=Path, default=Path())
    results.add_argument("--result-filename", help="of a single load")
    results.add_argument("--plot", type=Path, metavar="DIR", help="for plots (needs matplotlib)")
    results.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    add_output_options(parser)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return (flags and `workloads`, arguments for the server's command).

    Workloads come first, because a word after an unknown flag may be its value.
    """
    names = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
    parser = make_parser()
    args, rest = parser.parse_known_args(argv[len(names) :])
    if rest and args.engine is None:
        parser.parse_args(argv[len(names) :])
    args.workloads = names
    try:
        chosen_workloads(args)
    except ValueError as error:
        parser.error(str(error))
    return args, rest


def chosen_workloads(args: argparse.Namespace) -> list[Workload]:
    named_workloads = choose(args.workloads, KINDS) if args.workloads else [RANDOM]
    workloads = [_adapted(each.scaled(args.scale), args) for each in named_workloads]
    for each in workloads:
        if each.turns > 1 and args.endpoint.endswith(CHAT_ENDPOINT):
            raise ValueError(
                f"--endpoint: {each.id} takes /v1/completions, for token ids come back"
            )
    if args.result_filename and sum(1 for w in workloads for _ in ways(w, args)) > 1:
        raise ValueError("--result-filename: there are several loads, each with its own result")
    return workloads


def _adapted(workload: Workload, args: argparse.Namespace) -> Workload:
    changes: dict[str, Any] = {}
    for name, flag, value in (
        ("prompt", "--random-input-len", args.random_input_len),
        ("output", "--random-output-len", args.random_output_len),
    ):
        low, high = _lengths(flag, value) if value else getattr(workload, name)
        ratio = args.random_range_ratio
        if ratio is not None:
            if ratio >= 1 or low != high:
                raise ValueError(
                    f"--random-range-ratio: must be below 1, and {flag} one number, got {ratio:g}"
                )
            low, high = max(1, math.floor(low * (1 - ratio))), math.ceil(high * (1 + ratio))
        changes[name] = (low, high)
    if args.num_prompts is not None:
        changes["requests"] = args.num_prompts
    if args.random_prefix_len is not None:
        changes["system"] = args.random_prefix_len
    for name in ("temperature", "repeats"):
        if getattr(args, name) is not None:
            changes[name] = getattr(args, name)
    return msgspec.structs.replace(workload, **changes)


def _lengths(flag: str, bounds: Sequence[int]) -> tuple[int, int]:
    if len(bounds) > 2 or bounds[0] > bounds[-1]:
        raise ValueError(f"{flag}: one length or a range, got {' '.join(map(str, bounds))}")
    return bounds[0], bounds[-1]


def ways(workload: Workload, args: argparse.Namespace) -> Iterator[Way]:
    """Yield the flags' loads, or the workload's. One at a share of the capacity comes last, without
    a rate yet.
    """
    if args.max_concurrency or args.request_rate:
        for places in args.max_concurrency or [None]:
            for rate in args.request_rate or [math.inf]:
                yield Way(
                    requests=workload.requests, max_concurrency=places, rate=rate,
                    burstiness=args.burstiness,
                )  # fmt: skip
        return
    for places in workload.concurrency:
        yield Way(requests=_count(workload, places, args), max_concurrency=places)
    if not workload.concurrency:
        yield Way(requests=workload.requests)
    for share in workload.shares if args.open_loop else ():
        yield Way(requests=workload.requests, burstiness=args.burstiness, share=share)


def _count(workload: Workload, places: int, args: argparse.Namespace) -> int:
    """Return the number of requests: some for each client, but not too many for one."""
    if args.num_prompts is not None or len(workload.concurrency) == 1:
        return workload.requests
    return min(8 * places, max(workload.requests, 2 * places))


def draw_chats(
    workload: Workload, vocab_size: int, trial: int, count: int
) -> list[list[BenchRequest]]:
    """Return the turns of `count` chats, which share a prefix per trial."""
    usable = vocab_size - vocab_size // 150
    prefix = [(trial + 17 * token) % usable for token in range(workload.system)]
    turns = [
        draw(workload, vocab_size, 1000 * trial + turn, requests=count, turn=turn)
        for turn in range(workload.turns)
    ]
    turns[0] = [
        BenchRequest(prefix + request.prompt, request.output, request.temperature)
        for request in turns[0]
    ]
    chats = [list(chat) for chat in zip(*turns, strict=True)]
    if not workload.streams:
        return chats
    source = random.Random(f"{workload.id} {trial} streams")
    length, output = workload.stream
    streams = [
        [BenchRequest(source.choices(range(usable), k=length), output, group="stream")]
        for _ in range(workload.streams)
    ]
    return streams + [[msgspec.structs.replace(turn, group="burst") for turn in c] for c in chats]
