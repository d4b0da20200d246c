"""One process with one engine that runs workloads, printing each result at once.

`jackfield bench latency`, `throughput` and `run` differ in defaults; `startup` starts such
processes. Programs may pass other engines as peers.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from ....core.config import EngineConfig
from ....core.errors import JackfieldError
from ...flags.engine_flags import add_engine_options, engine_options, fail
from ...flags.parser import Parser
from ..measuring_lock import HELP as LOCK_HELP
from ..measuring_lock import held
from ..report import Emitter, add_output_options, environment, say, summary
from ..roofline import Ceilings, ModelShape, given_ceilings, measure_ceilings
from ..types import Backend, Bench, Measurement, Record
from ..workloads import (
    ARCHITECTURES,
    BenchRequest,
    Kind,
    Workload,
    choose,
    model_config_dict,
    write_model,
)
from .backends import JackfieldBackend

BEGAN = time.time()
IN_PROCESS: tuple[Kind, ...] = (
    "latency", "decode", "batch", "prefill", "context", "chats", "first", "minute",
)  # fmt: skip
MEASUREMENTS: dict[Kind, tuple[str, str]] = {
    "latency": ("latency", "measure_latency"),
    "decode": ("latency", "measure_decode"),
    "first": ("latency", "measure_first_token"),
    "batch": ("throughput", "measure_batch"),
    "minute": ("throughput", "measure_first_minute"),
    "prefill": ("throughput", "measure_prefill"),
    "context": ("throughput", "measure_context"),
    "chats": ("throughput", "measure_chats"),
}
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class Start(NamedTuple):
    model: str
    dummy: bool
    """Whether weights are random."""
    max_model_len: int
    device: str
    dtype: str
    peer_options: dict[str, Any]
    """For that engine only."""


class Peer(NamedTuple):
    """Another engine."""

    start: Callable[[Start], Backend]
    owns_device: bool = False
    """Whether it runs on a GPU that this process must not use, so the card is not measured."""


NO_PEERS: Mapping[str, Peer] = MappingProxyType({})


def add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="",
        help=f"{', '.join(ARCHITECTURES)} (made-up weights), a checkpoint folder or a hub name; "
        "none: the embedded tiny model",
    )
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="multiply lengths and counts of the workloads by this, to try them on a small machine",
    )


def make_parser(
    name: str,
    kinds: Sequence[Kind],
    default: Sequence[str],
    peers: Mapping[str, Peer] = NO_PEERS,
) -> Parser:
    parser = Parser(
        prog=f"jackfield bench {name}", description="Run workloads in process, and time them."
    )
    parser.add_argument(
        "workloads", nargs="*", default=list(default), metavar="WORKLOAD",
        help=f"of {', '.join(_ids(kinds))} (default: {' '.join(default)})",
    )  # fmt: skip
    add_model_options(parser)
    if peers:
        parser.add_argument("--engine", choices=("jackfield", *peers), default="jackfield")
        parser.add_argument("--peer-options", type=json.loads, default={}, metavar="JSON",
                            help="more arguments of vllm.LLM")  # fmt: skip
    else:
        parser.set_defaults(engine="jackfield", peer_options={})
    parser.add_argument("--repeats", type=int, help="timed runs, instead of the workload's own")
    parser.add_argument("--warmup", type=int, help="untimed runs before, instead of its own")
    parser.add_argument(
        "--requests", type=int, help="requests of a workload, instead of its own number"
    )
    parser.add_argument(
        "--batch-sizes", type=int, nargs="+", help="of the workload decode (default: its own)"
    )
    parser.add_argument(
        "--ceilings", default=None,
        help="what the card can do: measure, none, or the JSON that an earlier run measured "
        "(default: measure)",
    )  # fmt: skip
    parser.add_argument(
        "--deadline", type=float, help="start no workload after so many seconds of this process"
    )
    parser.add_argument(
        "--keep-partial", action="store_true", help="write medians so far after each repeat, too"
    )
    parser.add_argument("--lock-file", metavar="FILE", help=LOCK_HELP)
    parser.add_argument("--began", type=float, default=BEGAN, help=argparse.SUPPRESS)
    add_output_options(parser)
    add_engine_options(parser)
    return parser


def _ids(kinds: Sequence[Kind]) -> list[str]:
    from ..workloads import WORKLOADS

    return [each.id for each in WORKLOADS.values() if each.kind in kinds]


def run_workloads(
    name: str,
    argv: list[str],
    *,
    kinds: Sequence[Kind],
    default: Sequence[str],
    peers: Mapping[str, Peer] = NO_PEERS,
) -> int:
    """Measure and print; return the exit status, 1 if a workload failed."""
    parser = make_parser(name, kinds, default, peers)
    args = parser.parse_args(argv)
    try:
        workloads = [each.scaled(args.scale) for each in choose(args.workloads, kinds)]
    except ValueError as error:
        parser.error(str(error))
    if args.requests:
        workloads = [msgspec.structs.replace(each, requests=args.requests) for each in workloads]
    if args.batch_sizes:
        workloads = [
            msgspec.structs.replace(each, batches=tuple(args.batch_sizes))
            if each.kind == "decode"
            else each
            for each in workloads
        ]
    try:
        return Session(args, workloads, peers).run()
    except JackfieldError as error:
        return fail(error)


def run(argv: list[str], peers: Mapping[str, Peer] = NO_PEERS) -> int:
    """`jackfield bench run`: any in-process workloads."""
    return run_workloads("run", argv, kinds=IN_PROCESS, default=("W1",), peers=peers)


@contextlib.contextmanager
def checkpoint(model: str, *, tokenizer: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield the engine's model argument, and whether weights are random."""
    names = {name.lower(): name for name in ARCHITECTURES}
    if model.lower() not in names:
        yield model, False
        return
    with tempfile.TemporaryDirectory(prefix="jackfield-bench-") as folder:
        path = write_model(names[model.lower()], Path(folder), tokenizer=tokenizer)
        yield str(path), True


class Session:
    def __init__(
        self,
        args: argparse.Namespace,
        workloads: Sequence[Workload],
        peers: Mapping[str, Peer] = NO_PEERS,
    ) -> None:
        self.args = args
        self.peer = peers.get(args.engine)
        self.workloads = workloads
        self.options = engine_options(args)
        self.device = self._device()
        self.dtype = self.options.get("dtype", "auto")
        if self.dtype == "auto":
            self.dtype = "float32" if self.device == "cpu" else "bfloat16"

    def run(self) -> int:
        args = self.args
        with checkpoint(args.model) as (model, dummy):
            apart = time.time()
            ceilings = self._ceilings()
            apart = time.time() - apart
            backend = self._start(model, dummy)
            ready = time.time() - args.began - apart
            facts = {
                **environment(self.device),
                "engine": args.engine,
                "engine_version": backend.version,
                "model": args.model or "embedded",
                "dtype": self.dtype,
                "options": self.options | args.peer_options,
                "details": backend.details,
            }
            if args.scale != 1.0:
                facts["scale"] = args.scale
            if ceilings is not None:
                facts["ceilings"] = msgspec.to_builtins(ceilings)
            emitter = Emitter(args.output, facts)
            try:
                bench = self._bench(backend, model, ceilings)
                backend.run([BenchRequest([1, 2, 3], 1)])
                first = time.time() - args.began - apart
                times = {"ready_s": round(ready, 3), "first_token_s": round(first, 3)}
                started: Record = {"workload": "start", "measured": times}
                if ceilings is not None and args.ceilings in (None, "measure"):
                    started["at"] = {"not counted": "measuring the card, and loading torch for it"}
                emitter.emit(started)
                with held(args.lock_file):
                    status = self._measure_all(bench, emitter)
            finally:
                backend.close()
        print(summary(emitter.records), file=sys.stderr if emitter.output == "-" else sys.stdout)
        return status

    def _measure_all(self, bench: Bench, emitter: Emitter) -> int:
        status = 0
        for workload in self.workloads:
            if self.args.deadline and time.time() - self.args.began > self.args.deadline:
                emitter.emit({"workload": workload.id, "skipped": "the deadline had passed"})
                continue
            try:
                for record in _measurement(workload)(bench, workload):
                    if not record.get("partial") or self.args.keep_partial:
                        emitter.emit({"workload": workload.id, **record})
            except Exception as error:
                status = 1
                traceback.print_exc()
                emitter.emit({"workload": workload.id, "error": repr(error)[:500]})
        return status

    def _device(self) -> str:
        device = str(self.options.get("device", "auto"))
        if device != "auto":
            return device
        if self.peer is not None and self.peer.owns_device:
            return "cuda"
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

    def _ceilings(self) -> Ceilings | None:
        apart = self.peer is not None and self.peer.owns_device
        source = self.args.ceilings or ("none" if apart else "measure")
        if source == "none":
            return None
        if source != "measure":
            return given_ceilings(source)
        say("measuring what this device can do")
        return measure_ceilings(self.device, self.dtype)

    def _start(self, model: str, dummy: bool) -> Backend:
        length = self.options.get("max_model_len") or max(
            each.max_model_len for each in self.workloads
        )
        say(f"starting {self.args.engine} with {self.args.model or 'the embedded model'}")
        if self.peer is not None:
            options = self.args.peer_options
            return self.peer.start(Start(model, dummy, length, self.device, self.dtype, options))
        options = {
            "model": model, "max_model_len": length, "skip_tokenizer_init": True,
            "load_format": "dummy" if dummy else "auto",
        }  # fmt: skip
        return JackfieldBackend(EngineConfig.from_options(options | self.options))

    def _bench(self, backend: Backend, model: str, ceilings: Ceilings | None) -> Bench:
        config = model_config_dict(_folder(model))
        size = ITEM_BYTES[self.dtype]
        options = self.options | self.args.peer_options
        if (
            options.get("quantization")
            or options.get("kv_cache_dtype", "auto") != "auto"
            or config.get("quantization_config")
        ):
            ceilings = None  # Floors count bytes of the unquantized dtype.
        return Bench(
            backend=backend,
            vocab_size=int(config["vocab_size"]),
            shape=ModelShape.from_config(config, weight_bytes=size, kv_bytes=size),
            ceilings=ceilings,
            repeats=self.args.repeats,
            warmup=self.args.warmup,
        )


def _folder(model: str) -> Path:
    from ....core.loading.checkpoint_folder import checkpoint_folder

    return checkpoint_folder(model)


def _measurement(workload: Workload) -> Measurement:
    module, function = MEASUREMENTS[workload.kind]
    measurement: Measurement = getattr(importlib.import_module(f".{module}", __package__), function)
    return measurement


__all__ = ["Record", "Session", "add_model_options", "checkpoint", "run", "run_workloads"]
