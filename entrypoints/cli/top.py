"""`jackfield top`: what a server does, in the terminal, from its /metrics."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from ..flags.parser import Parser
from .client import VISIBLE, add_url

LABELS = {"le", "finished_reason", "status"}
PREFIXES = ("jackfield:", "vllm:")
BARS = " ▁▂▃▄▅▆▇█"
BAR_WIDTH, PLOT_WIDTH = 20, 60
TIMEOUT_SECONDS = 10.0
MAX_BYTES = 16 << 20
"""Largest response that is read."""
HOME, CLEAR_BELOW, CLEAR_LINE = "\x1b[H", "\x1b[J", "\x1b[K"
OPEN, CLOSE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""Another screen without a cursor, and back."""


class Unreachable(OSError):
    """A server gives no metrics."""


class Snapshot(NamedTuple):
    at: float
    """Seconds."""
    values: dict[str, float]
    """Sample without its prefix → its sum over all series."""
    by_label: dict[str, dict[str, float]]
    """Sample → value of its label of LABELS → sum."""
    usage: float
    """Share of the KV cache in use, the mean of all engines."""
    model: str

    def get(self, name: str) -> float:
        return self.values.get(name, 0.0)


def read(url: str) -> Snapshot:
    """Return a server's metrics. Raises Unreachable."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=TIMEOUT_SECONDS) as response:
            text = response.read(MAX_BYTES).decode()
        return parse(text, time.monotonic())
    except (OSError, ValueError) as error:
        raise Unreachable(f"{url}/metrics: {error}") from error


def parse(text: str, at: float) -> Snapshot:
    """Raises ValueError for what is no metrics."""
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[str, float] = defaultdict(float)
    by_label: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    model, names = "", dict[str, str]()
    usages: list[float] = []
    for family in text_string_to_metric_families(text):
        own = family.name.removeprefix(PREFIXES[0]).removeprefix(PREFIXES[1])
        if names.setdefault(own, family.name) != family.name:  # The same under another prefix.
            continue
        for sample in family.samples:
            name = sample.name.removeprefix(PREFIXES[0]).removeprefix(PREFIXES[1])
            values[name] += sample.value
            for label in LABELS & sample.labels.keys():
                by_label[name][sample.labels[label]] += sample.value
            if name == "kv_cache_usage_perc":
                usages.append(sample.value)
            model = model or sample.labels.get("model_name", "")
    if "num_requests_running" not in values:
        raise ValueError("there are no metrics of an engine")
    usage = sum(usages) / len(usages) if usages else 0.0
    return Snapshot(at, values, by_label, usage, model)


class View:
    """Turns snapshots into lines, and remembers the last ones for plots."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._last: Snapshot | None = None
        self._history: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=PLOT_WIDTH))

    def lines(self, now: Snapshot) -> list[str]:
        """Return the view of what was since the last snapshot; at first, since the start."""
        last = self._last or Snapshot(now.at, {}, {}, 0.0, "")
        self._last = now
        seconds = now.at - last.at

        def rise(name: str) -> float:
            return max(now.get(name) - last.get(name), 0.0)

        def rate(name: str) -> float:
            return rise(name) / seconds if seconds > 0 else 0.0

        def plotted(label: str, name: str, value: float, form: str = ".0f") -> str:
            history = self._history[name]
            history.append(value)
            return f"{label:<12}{value:>9{form}}  {plot(history)}"

        def share(hits: str, queries: str) -> str:
            return f"{rise(hits) / rise(queries):.1%}" if rise(queries) else "-"

        hits = share("prefix_cache_hits_total", "prefix_cache_queries_total")
        filled = round(now.usage * BAR_WIDTH)
        statuses = now.by_label.get("http_requests_total", {})
        before = last.by_label.get("http_requests_total", {})
        http = {status: count - before.get(status, 0.0) for status, count in statuses.items()}
        reasons = now.by_label.get("request_success_total", {})
        return [
            f"{now.model.translate(VISIBLE)}  {self._url.translate(VISIBLE)}",
            "",
            plotted("running", "num_requests_running", now.get("num_requests_running")),
            plotted("waiting", "num_requests_waiting", now.get("num_requests_waiting")),
            plotted("prompt/s", "prompt_tokens_total", rate("prompt_tokens_total"), ".1f"),
            plotted("tokens/s", "generation_tokens_total", rate("generation_tokens_total"), ".1f"),
            "",
            f"{'KV cache':<12}{now.usage:>9.1%}  [{'█' * filled}{'·' * (BAR_WIDTH - filled)}]",
            f"{'prefix hits':<12}{hits:>9}  preemptions {now.get('num_preemptions_total'):.0f}",
            "",
            *(
                f"{label:<12}{_quantiles(name, now, last)}"
                for label, name in (
                    ("first token", "time_to_first_token_seconds"),
                    ("next token", "inter_token_latency_seconds"),
                    ("queue", "request_queue_time_seconds"),
                    ("request", "e2e_request_latency_seconds"),
                )
            ),
            "",
            f"{'finished':<12}{_counts(reasons)}",
            f"{'HTTP':<12}{_counts(http)}",
        ]


def plot(values: Sequence[float]) -> str:
    """Return a bar per value, in eighths of the largest; empty below any."""
    most = max(values, default=0.0)
    if most <= 0:
        return BARS[0] * len(values)
    top = len(BARS) - 1
    return "".join(BARS[max(round(value / most * top), value > 0)] for value in values)


def _counts(counts: dict[str, float]) -> str:
    shown = [f"{name.translate(VISIBLE)} {count:.0f}" for name, count in sorted(counts.items())]
    return "  ".join(shown) or "-"


def _quantiles(name: str, now: Snapshot, last: Snapshot) -> str:
    buckets = now.by_label.get(f"{name}_bucket", {})
    before = last.by_label.get(f"{name}_bucket", {})
    counts = {float(bound): count - before.get(bound, 0.0) for bound, count in buckets.items()}
    if not counts or max(counts.values()) <= 0:
        return f"{'-':>9}"
    return "  ".join(f"p{p} ≤ {_time(quantile(counts, p / 100)):<8}" for p in (50, 95, 99))


def quantile(counts: dict[float, float], share: float) -> float:
    """Return the bound of a histogram below which so many values are. counts: cumulative."""
    bounds = sorted(counts)
    target = share * counts[bounds[-1]]
    return next(bound for bound in bounds if counts[bound] >= target)


def _time(seconds: float) -> str:
    if seconds == float("inf"):
        return "∞"
    return f"{seconds * 1000:g} ms" if seconds < 1 else f"{seconds:g} s"


def make_parser() -> Parser:
    parser = Parser(prog="jackfield top", description="Watch a running server.")
    add_url(parser)
    parser.add_argument(
        "--interval",
        type=_seconds,
        default=1.0,
        metavar="SECONDS",
        help="between two looks (default: 1)",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="print one view of one interval, and end; so where the output is no terminal",
    )
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"must be seconds from 0.1 to 3600, got {text!r}")
    return seconds


def run(argv: list[str]) -> int:
    args = make_parser().parse_args(argv)
    if args.once or not sys.stdout.isatty():
        try:
            view = View(args.url)
            view.lines(read(args.url))
            time.sleep(args.interval)
            print("\n".join(view.lines(read(args.url))))
        except Unreachable as error:
            print(f"jackfield top: {error}", file=sys.stderr)
            return 1
        return 0
    return _watch(args.url, args.interval)


def _watch(url: str, interval: float) -> int:
    """Redraw until interrupted; a server that is away may come back."""
    view = View(url)
    sys.stdout.write(OPEN)
    try:
        while True:
            try:
                lines = view.lines(read(url))
            except Unreachable as error:
                view, lines = View(url), [str(error).translate(VISIBLE)]
            columns, rows = shutil.get_terminal_size()
            lines = [line[:columns] + CLEAR_LINE for line in lines[: rows - 1]]
            sys.stdout.write(HOME + "\n".join(lines) + "\n" + CLEAR_BELOW)
            sys.stdout.flush()
            time.sleep(interval)
    except KeyboardInterrupt:
        return 0
    finally:
        sys.stdout.write(CLOSE)
        sys.stdout.flush()
