"""`jackfield bench NAME`: the list of benchmarks and their modules."""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
import threading
from collections.abc import Iterator

from ...core.spelling import nearest

BENCHMARKS = {
    "latency": "milliseconds per token at batch 1 (W1), and a decode step by batch",
    "throughput": "many requests at once, in process (W2, W3, W4, W7)",
    "serve": "load on any OpenAI-style server, or on one started here (W5, W7)",
    "startup": "process start to ready to first token, cold and warm (W6)",
    "kv-compression": "what each KV compressor costs in quality, on any checkpoint",
    "kernels": "each kernel against what its bytes and products cost",
    "tune": "the best tiles for products of few tokens here, written where engines read them",
    "run": "any in-process workloads",
    "compare": "engines side by side, from files of results",
}
MODULES = {
    "latency": "engine.latency",
    "throughput": "engine.throughput",
    "serve": "serve.command",
    "startup": "engine.startup",
    "kv-compression": "kv_compression.command",
    "kernels": "kernels.command",
    "tune": "kernels.tune",
    "run": "engine.session",
    "compare": "comparison",
}


def run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        return 0
    name, rest = argv[0], argv[1:]
    if name not in BENCHMARKS:
        near = nearest(name, BENCHMARKS)
        hint = f"did you mean {near}?" if near else "`jackfield bench --help` lists them"
        print(f"jackfield bench: no such benchmark: {name}; {hint}", file=sys.stderr)
        return 2
    module = importlib.import_module(f".{MODULES[name]}", __package__)
    with _ended_in_order():
        status: int = module.run(rest)
    return status


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """Let SIGTERM end a benchmark, with its servers, as an error would."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _usage() -> str:
    lines = ["usage: jackfield bench WHAT [options]", "", "benchmarks:"]
    lines += [f"  {name:15} {text}" for name, text in BENCHMARKS.items()]
    lines += ["", "`jackfield bench WHAT --help` lists its options."]
    return "\n".join(lines)
