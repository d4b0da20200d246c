"""Models with Jackfield and with vLLM on one GPU, in one run of few minutes.

    python examples/benchmarks/beside_peer.py run --models Qwen3-Next-12L DeepSeek-V2-Lite \\
        --workloads decode W3 --batch-sizes 1 64 --requests 8 --repeats 2 --max-model-len 4352 \\
        --keep-partial --deadline 280 --output beside.jsonl
    python examples/benchmarks/beside_peer.py serve --model Qwen3-8B --request-rate 33.7 39.7 \\
        --random-input-len 512 --random-output-len 128 --num-prompts 400 --max-model-len 8192 \\
        --ours "--ttft-target-ms 50" --ours "--ttft-target-ms 0" --output beside.jsonl

`run` is that of engines.py, `serve` is `jackfield bench serve`; options that `--help` does not
list go to it as they are. A peer takes about 70 s to start, so those of several models start side
by side, while each of our engines is started once, to compile its kernels. Once all are ready, they
are measured one after the other, each alone: peers wait for their lock files (`--lock-file`), and
our engine of a model starts when the model's peer has ended, and left its memory.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import fcntl
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from jackfield.entrypoints.bench.comparison import Comparison
from jackfield.entrypoints.bench.gpu_state import gpu_state, throttled
from jackfield.entrypoints.bench.process_tree import adopt_orphans, end_descendants
from jackfield.entrypoints.bench.report import Emitter, environment, say
from jackfield.entrypoints.bench.serve.servers import SERVERS
from jackfield.entrypoints.bench.workloads import WORKLOADS
from jackfield.examples.benchmarks.engines import ENGINES

BOUNDED = ["--gpu-memory-utilization", "0.4"]
"""Of our engines, beside peers that hold theirs."""
PEER_BYTES = {"run": 3_000_000_000, "serve": 40_000_000_000}
"""Of a peer's KV cache."""
STATE_BYTES = {
    "Mamba2-2.7B": 86_000_000, "Falcon-H1-1.5B": 39_000_000, "Qwen3-Next-12L": 14_000_000,
}  # fmt: skip
"""That vLLM takes for a request's states in bfloat16, in blocks of one size in all layers."""
STARTED = ("start", "server start")
"""What `jackfield bench` calls the record that an engine is ready."""
PROGRAMS = {
    "run": ("jackfield.examples.benchmarks.engines", "run"),
    "serve": ("jackfield", "bench", "serve"),
}
"""Of each mode: a module, and the words before its options."""
POLL_SECONDS = 0.2
LOG_LINES = 12


Emit: TypeAlias = "Callable[[Engine, dict[str, Any]], None]"


class Engine:
    """A model with one engine: `jackfield bench` in a process of its own."""

    running: ClassVar[set[int]] = set()
    """The processes of all of them."""

    def __init__(self, label: str, model: str, command: list[str], emit: Emit) -> None:
        """emit: called with the engine and each line that it writes."""
        self.label, self.model, self.command = label, model or "embedded", command
        self.state = "not begun"
        """… starting, waiting, measuring; measured or failed."""
        self.gpu: dict[str, Any] = {}
        """Its state right before this engine measures."""
        self._emit = emit
        self._process: subprocess.Popen[bytes] | None = None
        self._read = 0

    async def start(self, folder: Path, seconds: float, more: list[str]) -> bool:
        """Return whether it is ready; then it waits for its lock."""
        self.state = "starting"
        self._begin(folder, more)
        return await self._until(lambda _: self.state == "waiting", seconds)

    def _begin(self, folder: Path, more: list[str]) -> None:
        folder.mkdir()
        self._output, self._log, lock = folder / "lines.jsonl", folder / "log", folder / "lock"
        self._lock = lock.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self.command, *more, "--output", str(self._output), "--lock-file", str(lock)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(folder)}, start_new_session=True,
                preexec_fn=adopt_orphans,  # So its orphans are known as its own while it runs.
            )  # fmt: skip
        self.running.add(self._process.pid)

    async def measure(self, seconds: float) -> bool:
        """Let it measure, to its end, with nothing else that this program started but engines that
        wait. Return whether all went well."""
        self._end_others()
        self.gpu = gpu_state()
        self.state = "measuring"
        self._lock.close()
        if done := await self._until(lambda status: status == 0, seconds):
            self.state = "measured"
            self.end()
        if self.gpu:
            after = gpu_state()
            self._emit(self, {"date": now(), "workload": "gpu", "before": self.gpu, "after": after,
                              "throttled_s": throttled(self.gpu, after)})  # fmt: skip
        return done

    async def _until(self, condition: Callable[[int | None], bool], seconds: float) -> bool:
        assert self._process is not None
        limit = time.monotonic() + seconds
        while True:
            status = self._process.poll()
            self._collect()
            if condition(status):
                return True
            if status is not None:
                self.fail(f"ended with status {status} while {self.state}")
            elif time.monotonic() > limit:
                self.fail(f"still {self.state} after {seconds:g} s")
            else:
                await asyncio.sleep(POLL_SECONDS)
                continue
            self.end()
            return False

    def end(self) -> None:
        """End its processes, and those of engines that have ended by themselves."""
        if self._process is not None:
            self.running.discard(self._process.pid)
            self._end_others()
            self._process.poll()

    def _end_others(self) -> None:
        for pid in end_descendants(keep=self.running):
            say(f"process {pid} of an engine that has ended is still there")

    def _collect(self) -> None:
        """Hand on the whole lines that are new."""
        if not self._output.exists():
            return
        with self._output.open("rb") as file:
            file.seek(self._read)
            *lines, _ = file.read().split(b"\n")
        for line in lines:
            self._read += len(line) + 1
            record = json.loads(line)
            if self.state == "starting" and record["workload"] in STARTED:
                self.state = "waiting"
            self._emit(self, record)

    def fail(self, reason: str) -> None:
        """Say and write why it has no results, or not all."""
        lines = self._log.read_text(errors="replace").splitlines() if self._process else []
        tail = [line for line in lines if line.strip()][-LOG_LINES:]
        say("\n    ".join([f"{self.label}, {self.model}: {reason}", *tail]))
        self.state = "failed"
        self._emit(self, {"date": now(), "workload": self.label, "error": reason, "log": tail})


def now() -> str:
    """Return the date of a record."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def requests_at_once(args: argparse.Namespace) -> int:
    """Return how many requests the workloads have at once, at most."""
    names = {name.lower() for name in args.workloads}
    most = {1}
    for workload in (each for each in WORKLOADS.values() if each.id.lower() in names):
        if workload.kind == "decode":
            most |= {*(args.batch_sizes or workload.batches)}
        else:
            most.add(args.requests or workload.requests)
    return max(most)


def vllm_flags(args: argparse.Namespace, model: str) -> list[str]:
    """Return what vLLM needs beside other engines, and for a model's states.

    With the size of its cache given, it does not measure free memory, which fails while other
    processes give some back. For models with states, it refuses more requests at once than it has
    blocks.
    """
    options: dict[str, Any] = {
        "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": PEER_BYTES[args.mode]
    }  # fmt: skip
    if args.mode == "run" and model in STATE_BYTES:
        most = requests_at_once(args)
        options["max_num_seqs"] = most
        # Twice, because it keeps a second state of each request where it caches prefixes.
        options["kv_cache_memory_bytes"] += 2 * most * STATE_BYTES[model]
    if importlib.util.find_spec("flashinfer") is None:
        options["gdn_prefill_backend"] = "triton"
    if args.mode == "run":
        return ["--peer-options", json.dumps(options)]
    return [
        word
        for name, value in options.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]


class BesidePeer:
    """One run of all models and engines."""

    def __init__(self, args: argparse.Namespace, rest: list[str]) -> None:
        self.args, self.rest = args, rest
        facts = environment("auto")
        self.emitter = Emitter(args.output, {**facts, "run": facts["date"]})
        self.ceilings: str = args.ceilings
        """Rates of the device: our first engine measures them."""
        self.begin = time.monotonic()
        own = {" ".join(["jackfield", flags]).strip(): shlex.split(flags) for flags in args.ours}
        self.peer_label = f"{args.peer} (peer)" if args.peer == "jackfield" else args.peer
        self.peers = {
            model: self.engine(self.peer_label, model, args.peer, self.peer_flags(model))
            for model in args.models
        }
        self.own = {
            model: [
                self.engine(label, model, "jackfield", flags, BOUNDED)
                for label, flags in own.items()
            ]
            for model in args.models
        }
        self.folders = 0

    def peer_flags(self, model: str) -> list[str]:
        """Return the options of a model's peer."""
        if self.args.peer_flags is not None:
            return shlex.split(self.args.peer_flags)
        return vllm_flags(self.args, model) if self.args.peer == "vllm" else []

    def engine(
        self, label: str, model: str, name: str, flags: list[str], before: Iterable[str] = ()
    ) -> Engine:
        """Return an engine that has not begun."""
        command = [sys.executable, "-m", *PROGRAMS[self.args.mode], *self.args.workloads]
        command += ["--model", model, "--engine", name, *before, *self.rest, *flags]
        if self.args.batch_sizes:
            command += ["--batch-sizes", *map(str, self.args.batch_sizes)]
        if self.args.requests:
            command += ["--requests", str(self.args.requests)]
        return Engine(label, model, command, self.take)

    async def run(self) -> int:
        """Return the exit status, 1 if an engine has not all its results."""
        args = self.args
        engines = [*self.peers.values(), *(each for own in self.own.values() for each in own)]
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        adopt_orphans()
        with tempfile.TemporaryDirectory(prefix="beside-", ignore_cleanup_errors=True) as folder:
            self.folder = Path(folder)
            try:
                async with asyncio.timeout(args.deadline):
                    for first in range(0, len(args.models), args.side_by_side):
                        await self.measure_group(args.models[first : first + args.side_by_side])
            except (TimeoutError, asyncio.CancelledError) as error:
                timed_out = isinstance(error, TimeoutError)
                end = f"its {args.deadline:g} s" if timed_out else "a signal"
                for each in engines:
                    if each.state not in ("measured", "failed"):
                        each.fail(f"{each.state} when {end} ended the run")
            finally:
                end_descendants()
        print(Comparison(self.emitter.records, self.peer_label).text())
        return int(any(each.state != "measured" for each in engines))

    async def measure_group(self, models: list[str]) -> None:
        """Start the peers of these models side by side; then measure all engines in turn."""
        compiling = self.compile_all(models) if self.args.compile else asyncio.sleep(0)
        await asyncio.gather(
            compiling, *(self.start(self.peers[model], "none") for model in models)
        )
        self.report("the peers have started")
        for model in models:
            if self.peers[model].state == "waiting":
                await self.measure(self.peers[model])
            for each in self.own[model]:
                if await self.start(each, self.ceilings):
                    await self.measure(each)

    async def compile_all(self, models: list[str]) -> None:
        """Start each of our engines and end it, so that its kernels are compiled."""
        for each in (each for model in models for each in self.own[model]):
            trial = Engine(f"{each.label} (compiling)", each.model, each.command, lambda *_: None)
            if await self.start(trial, "none"):
                trial.end()
                self.report(f"{each.label}, {each.model}: compiled")

    async def start(self, engine: Engine, ceilings: str) -> bool:
        """Return whether it is ready."""
        self.folders += 1
        more = ["--ceilings", ceilings] if self.args.mode == "run" else []
        folder = self.folder / str(self.folders)
        return await engine.start(folder, self.args.start_timeout, more)

    async def measure(self, engine: Engine) -> None:
        """Let an engine measure while all others wait."""
        if await engine.measure(self.args.measure_timeout):
            self.report(f"{engine.label}, {engine.model}: measured")

    def report(self, text: str) -> None:
        """Tell how far the run is."""
        say(f"{time.monotonic() - self.begin:5.0f} s  {text}")

    def take(self, engine: Engine, record: dict[str, Any]) -> None:
        """Write a line of an engine, and keep its numbers for the table."""
        line = {"engine": "jackfield", "label": engine.label, "model": engine.model, **record}
        if engine.label == self.peer_label:
            line["engine"] = self.peer_label
            if line["workload"] in STARTED:
                line["at"] = {"not alone": "other engines start beside it"}
        if engine.gpu and "measured" in line:
            line["gpu_before"] = engine.gpu
        if self.args.commit:
            line["commit"] = self.args.commit
        if "ceilings" in line:
            self.ceilings = json.dumps(line["ceilings"])
        self.emitter.emit(line)


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and those for `jackfield bench`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    modes = parser.add_subparsers(dest="mode", required=True)
    for mode, peers in (("run", ENGINES), ("serve", SERVERS)):
        add = modes.add_parser(mode, allow_abbrev=False).add_argument
        add("--models", "--model", nargs="+", required=True)
        add("--workloads", nargs="+", default=[], help=f"of jackfield bench {mode}")
        add("--peer", choices=peers, default="vllm")
        if mode == "run":
            add("--batch-sizes", type=int, nargs="+", help="as engines.py has it")
            add("--requests", type=int, help="as engines.py has it")
        add("--ours", action="append", default=[], metavar="FLAGS",
            help="of our engine; each further --ours is another engine")  # fmt: skip
        add("--peer-flags", metavar="FLAGS", help="instead of what vLLM needs here")
        add("--side-by-side", type=int, default=4, metavar="N", help="peers that start at once")
        add("--compile", action=argparse.BooleanOptionalAction, default=True,
            help="start our engines beside the peers, too, to compile kernels")  # fmt: skip
        add("--deadline", type=float, default=600.0, metavar="SECONDS", help="end everything then")
        add("--start-timeout", type=float, default=200.0, metavar="SECONDS", help="of an engine")
        add("--measure-timeout", type=float, default=200.0, metavar="SECONDS", help="of an engine")
        add("--ceilings", default="measure", help="as engines.py has it, for our engine")
        add("--commit", help="what to record as the commit")
        add("--output", help="as jackfield bench has it")
    parser.set_defaults(batch_sizes=None, requests=None)
    args, rest = parser.parse_known_args(argv)
    args.ours = args.ours or [""]
    return args, rest


if __name__ == "__main__":
    raise SystemExit(asyncio.run(BesidePeer(*parse(None)).run()))
