"""How much Python the host runs for a step, for a token and for a request in mixed traffic.

    python examples/benchmarks/host_work.py
    python examples/benchmarks/host_work.py --launches

The workload `traffic` of `jackfield bench serve` over HTTP: 300 clients in other processes, mixed
lengths and options, departures in mid-stream. Server, scheduler, worker and sampler's books are the
real ones; nothing is computed. Operations return at once, steps are "recorded" and a replay does
nothing, so each step goes the way that a GPU's steps go (`MixedGraphs`, `DecodeGraphs`), and a step
ends when a device would have ended it. Tensors are on the CPU: that copies to a GPU are pinned, and
that events are recorded, is not in the numbers.

Counts by thread and by function, over steps with nearly all slots in use:

    calls       of functions, in Python and built in, by who calls them
    bytecodes   of the interpreter
    operations  of torch, each of which lets go of the interpreter lock
    numbers     that become objects of Python, from arrays and tensors

Counts do not depend on how busy the machine is. They vary a little with the mix of requests that
the steps happen to have.

`--launches` times instead how long launches take of decode steps with the same rows: one after the
other on one thread, so with all that they touch in the processor's caches.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import cProfile
import functools
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import jackfield
from jackfield import AsyncEngine, EngineConfig
from jackfield.core.hooks import hookimpl
from jackfield.core.nn.operations import Operations
from jackfield.core.protocols.attention import AttentionBackend
from jackfield.core.registry import Provenance, load_plugins
from jackfield.core.step import InProcess, StepPlan, StepResult, TableWrite
from jackfield.core.worker.threads import PendingStep
from jackfield.entrypoints.bench.engine.backends import event_loop
from jackfield.entrypoints.bench.report import table
from jackfield.entrypoints.bench.serve.clients import send_load
from jackfield.entrypoints.bench.serve.load import Load, Target
from jackfield.entrypoints.bench.workloads import ARCHITECTURES, WORKLOADS, draw
from jackfield.entrypoints.server.listen import Listen
from jackfield.entrypoints.server.server import listening
from jackfield.plugins.executors.inprocess import InProcessExecutor

VOCAB_SIZE = 32768
CLIENTS = 300
STEP_SECONDS, TOKEN_SECONDS = 0.016, 18e-6
"""Of a step that a device would compute: four times what an H200 needs for 0.6B, so that a host
that counts keeps up."""
NAME = "stand-in"
PACKAGE = str(Path(jackfield.__path__[0]).resolve())
PARTS = {
    "core/scheduling": "scheduler",
    "core/cache": "blocks and prefix hashes",
    "core/request.py": "scheduler",
    "core/step.py": "scheduler",
    "core/engine/step_loop.py": "step loop",
    "core/engine": "outputs of requests",
    "core/outputs.py": "outputs of requests",
    "core/output_parsing": "text of tokens",
    "core/text": "text of tokens",
    "core/metrics": "metrics",
    "core/worker/sampling": "sampler's books",
    "core/worker/graphs": "batch and graphs",
    "core/worker/batch.py": "batch and graphs",
    "core/worker/slot_table.py": "batch and graphs",
    "core/worker/launched_step.py": "results",
    "core/worker/runner.py": "model runner",
    "core/worker/packing.py": "sampler's books",
    "core/worker/threads.py": "threads",
    "core/worker": "worker",
    "core/nn": "operations",
    "entrypoints/openai": "OpenAI's routes",
    "entrypoints/http": "HTTP",
    "entrypoints": "HTTP",
}
"""By the beginning of a file's path; the first that fits."""
LIBRARIES = ("aiohttp", "asyncio", "msgspec", "torch", "numpy", "prometheus_client", "uvloop")


class NoOperations(Operations):
    """Computes nothing, and samples what stands in its output."""

    name = NAME
    samples = writes_tokens = True

    def write_tokens(self, *args: Any, **options: Any) -> None:
        """Leave the tokens as they are (`NoDevice.start`)."""

    def sample(self, *args: Any, **options: Any) -> None:
        """Leave the tokens as they are."""

    def edit_logits(self, *args: Any, **options: Any) -> None:
        """Leave the logits as they are."""


class NoAttention(AttentionBackend):
    """Returns the queries."""

    name = NAME
    graph_safe = mixed_graph_safe = True

    @classmethod
    def supports(cls, spec: Any, device: torch.device, dtype: torch.dtype) -> str | None:
        """Everything."""
        return None

    def __init__(self, setup: Any) -> None:
        pass

    def build_metadata(self, layout: Any) -> Any:
        """None is needed."""

    def forward(
        self,
        spec: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: Any,
        metadata: Any,
        **options: Any,
    ) -> torch.Tensor:
        """[num_tokens, num_heads, head_dim] → the same"""
        return query


class Counts:
    """What one thread does, by function."""

    def __init__(self) -> None:
        self.by_code: collections.Counter[CodeType] = collections.Counter()

    def begin(self) -> None:
        """Begin to count, on the thread that is counted."""

    def end(self) -> None:
        """Stop, on the same thread."""


class Calls(Counts):
    """Calls of functions, each with those of built-in functions that it makes."""

    def begin(self) -> None:
        """Begin to count."""
        self._profile = cProfile.Profile(subcalls=True, builtins=True)
        self._profile.enable()

    def end(self) -> None:
        """Stop."""
        self._profile.disable()
        for entry in self._profile.getstats():
            if isinstance(entry.code, CodeType):
                self.by_code[entry.code] += entry.callcount
                for call in entry.calls or ():
                    if isinstance(call.code, str):
                        self.by_code[entry.code] += call.callcount


class Bytecodes(Counts):
    """Bytecodes that the interpreter runs."""

    def begin(self) -> None:
        """Begin to count, in functions that are called from now on."""
        sys.settrace(self._enter)

    def end(self) -> None:
        """Stop."""
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        by_code, code = self.by_code, frame.f_code

        def count(frame: FrameType, event: str, argument: Any) -> Any:
            by_code[code] += event == "opcode"
            return count

        return count


class TorchOperations(Counts):
    """Operations that torch dispatches, views included, by the function that asks for them."""

    def begin(self) -> None:
        """Begin to count."""
        by_code = self.by_code

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(
                self, function: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                by_code[_own_code(sys._getframe(1))] += 1
                return function(*args, **(kwargs or {}))

        self._mode = Mode()
        self._mode.__enter__()

    def end(self) -> None:
        """Stop."""
        self._mode.__exit__(None, None, None)


class Numbers(Counts):
    """Numbers of arrays and tensors that become objects of Python, by `tolist`."""

    def begin(self) -> None:
        """Begin to count."""
        sys.setprofile(self._count)

    def end(self) -> None:
        """Stop."""
        sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and argument.__name__ == "tolist":
            owner = argument.__self__
            size = owner.numel() if isinstance(owner, torch.Tensor) else owner.size
            self.by_code[_own_code(frame)] += size


def _own_code(frame: FrameType | None) -> CodeType:
    """Return the innermost function of Jackfield's that calls this."""
    assert frame is not None
    first = frame
    while frame is not None:
        file = frame.f_code.co_filename
        if _is_own(file) and file != __file__:
            return frame.f_code
        frame = frame.f_back
    return first.f_code


KINDS: dict[str, type[Counts]] = {
    "calls": Calls, "bytecodes": Bytecodes, "operations": TorchOperations, "numbers": Numbers,
}  # fmt: skip


class Steps:
    """Steps of the server: how many there were, and what they had."""

    def __init__(self, slots: int, skip: int, count: int) -> None:
        self._slots, self._skip, self._count = slots, skip, count
        self._full = 0
        self.counts = False
        """Whether steps are counted now."""
        self.totals: collections.Counter[str] = collections.Counter()
        self.began, self.ended = asyncio.Event(), asyncio.Event()

    def add(self, plan: StepPlan) -> None:
        """Count a step that is submitted. Called on the event loop."""
        self._full += len(plan.slots) > 0.9 * self._slots
        if self._full > self._skip:
            self.began.set()
        if self.counts:
            self.totals += collections.Counter(
                steps=1, rows=len(plan.slots), tokens=sum(plan.samples),
                prompt_tokens=plan.total_tokens - len(plan.slots), requests=len(plan.starts),
                blocks=len(plan.table_writes),
            )  # fmt: skip
        if self.totals["steps"] >= self._count:
            self.ended.set()


class Ending:
    """A step that ends when a device would have computed it."""

    def __init__(self, step: PendingStep, due: float) -> None:
        self._step, self._due = step, due

    def wait(self) -> StepResult:
        """Sleep until then."""
        time.sleep(max(0.0, self._due - time.monotonic()))
        return self._step.wait()


class NoDevice(InProcessExecutor):
    """The worker of this process, over a device that computes nothing."""

    steps: Steps

    def __init__(self, config: Any, model_config: Any, plugins: Any) -> None:
        super().__init__(config, model_config, plugins)
        self._worker._recorder = lambda: lambda function: _nothing  # type: ignore[method-assign]
        self._due = 0.0

    async def start(self) -> Any:
        """Record all steps."""
        info = await super().start()
        assert self._thread is not None

        @torch.inference_mode()
        def record() -> None:
            runner: Any = self._worker.runner
            while runner.decode.graphs.missing():
                runner.decode.graphs.record(*runner.decode.graphs.missing()[0])
            while runner.mixed.graphs.record_next():
                pass
            ids = torch.arange(len(runner.sampler.outputs.chosen), dtype=torch.int32)
            for part in runner.sampler.outputs:
                part.copy_((1000 + ids).view(-1, *(1,) * (part.dim() - 1)))
            written, ran = runner.written, runner.written.ran
            written._ring[:, 1:] = 1000 + ids[: written._ring.shape[1] - 1]

            def ran_and_written() -> None:
                ran()
                place = written.place()
                place.numbers[0] = place.run

            written.ran = ran_and_written

        await self._thread.call(record)
        return info

    def submit(self, plan: StepPlan, in_process: InProcess) -> asyncio.Future[StepResult]:
        """Queue one step."""
        self.steps.add(plan)
        assert self._thread is not None

        def launch() -> PendingStep:
            step = self._worker.step(plan, in_process)
            seconds = STEP_SECONDS + TOKEN_SECONDS * plan.total_tokens
            self._due = max(self._due, time.monotonic()) + seconds
            return Ending(step, self._due)

        return self._thread.step(launch)

    async def time_launches(self, rows: int, steps: int, new_blocks: bool) -> list[float]:
        """Launch steps of the same rows, of slots without requests; return each one's seconds.
        new_blocks: a sixteenth of the rows begin a block in each, or one row in its turn."""
        assert self._thread is not None
        worker: Any = self._worker
        table, size = worker.runner.batch.table, worker.config.block_size

        def launch_all() -> list[float]:
            seconds = []
            lengths = table.length_bounds
            lengths[:rows] = np.arange(rows) % size if new_blocks else 1
            before = lengths[:rows].tolist()
            for step in range(steps):
                writes = [
                    TableWrite(slot, 0, (length + step) // size, (1 + step,))
                    for slot, length in enumerate(before)
                    if new_blocks and (length + step) % size == 0
                ]
                each = tuple(range(rows)), (1,) * rows, (True,) * rows
                plan = StepPlan(step, *each, table_writes=tuple(writes))
                began = time.perf_counter()
                worker.step(plan)
                if bool(writes) == new_blocks:
                    seconds.append(time.perf_counter() - began)
            return seconds

        return await self._thread.call(launch_all)

    async def on_threads(self, launching: Callable[[], None], waiting: Callable[[], None]) -> None:
        """Call a function on each of the two threads."""

        class Call:
            def wait(self) -> Any:
                waiting()

        assert self._thread is not None
        await self._thread.call(launching)
        await self._thread.step(Call)


class Plugin:
    """Registers what computes nothing."""

    jackfield_api = 3

    @hookimpl
    def register_executors(self, registry: Any) -> None:
        """Under the name of all of it."""
        registry.add(NAME, NoDevice)

    @hookimpl
    def register_operations(self, registry: Any) -> None:
        """The same."""
        registry.add(NAME, NoOperations)

    @hookimpl
    def register_attention_backends(self, registry: Any) -> None:
        """The same."""
        registry.add(NAME, NoAttention)


def _nothing() -> None:
    pass


def write_checkpoint(folder: Path) -> None:
    """Write a small model's configuration, and a tokenizer with a word for each token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    config = ARCHITECTURES["Qwen3-0.6B"] | {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": VOCAB_SIZE,
        "eos_token_id": 1, "bos_token_id": 0, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    words = {f"t{token}": token for token in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t1", "unk_token": "t0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))


@functools.cache
def _is_own(file: str) -> bool:
    return file.startswith(PACKAGE) and "site-packages" not in file


@functools.cache
def part_of(file: str) -> str:
    """Return the part of the code that a file belongs to."""
    if _is_own(file):
        path = file[len(PACKAGE) + 1 :]
        return next((part for begin, part in PARTS.items() if path.startswith(begin)), "other")
    return next((name for name in LIBRARIES if f"/{name}/" in file), "other libraries")


async def launch_times(counts: Sequence[int], steps: int) -> list[tuple[int, float, float]]:
    """Return per number of rows the least microseconds of a launch, without and with new blocks."""
    NoDevice.steps = Steps(256, 0, 0)
    plugins = load_plugins()
    plugins.add_plugin(Plugin(), Provenance("examples", "0", "host work"))
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder))
        config = EngineConfig(
            model=folder, load_format="dummy", device="cpu", dtype="float32", executor=NAME,
            operations=NAME, attention_backend=NAME, max_model_len=4096, block_size=16,
            num_gpu_blocks_override=1000, max_num_seqs=max(counts),
        )  # fmt: skip
        async with AsyncEngine(config, plugins=plugins) as engine:
            executor: Any = engine.core.executor  # type: ignore[attr-defined]
            least = [
                [
                    1e6 * min(await executor.time_launches(rows, steps, new_blocks))
                    for new_blocks in (False, True)
                ]
                for rows in counts
            ]
    return [
        (rows, round(same, 1), round(more, 1))
        for rows, (same, more) in zip(counts, least, strict=True)
    ]


async def count_work(skip: int, count: int, kind: type[Counts]) -> tuple[Steps, dict[str, Counts]]:
    """Serve the traffic; return what was counted, by thread."""
    workload = WORKLOADS["traffic"]
    steps = NoDevice.steps = Steps(256, skip, count)
    threads = {name: kind() for name in ("loop", "launch", "completion")}
    plugins = load_plugins()
    plugins.add_plugin(Plugin(), Provenance("examples", "0", "host work"))
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder))
        config = EngineConfig(
            model=folder, load_format="dummy", device="cpu", dtype="float32", executor=NAME,
            operations=NAME, attention_backend=NAME, max_model_len=workload.max_model_len,
            max_num_batched_tokens=8192, num_gpu_blocks_override=60000,
            itl_target_ms=0,  # Steps of this slow device would be shortened for it.
        )  # fmt: skip
        async with AsyncEngine(config, plugins=plugins) as engine:
            async with listening(engine, Listen(port=0)) as url:
                executor: Any = engine.core.executor  # type: ignore[attr-defined]
                requests = draw(workload, VOCAB_SIZE, 0, requests=4 * CLIENTS + 8 * count)
                load = Load(
                    chats=[[request] for request in requests], offsets=[0.0] * len(requests),
                    max_concurrency=CLIENTS,
                )  # fmt: skip
                target = Target(url=url, model=folder)
                clients = asyncio.create_task(send_load(target, load, processes=2))
                began = asyncio.create_task(steps.began.wait())
                ended = asyncio.create_task(steps.ended.wait())
                await asyncio.wait([clients, began], return_when="FIRST_COMPLETED")
                await executor.on_threads(threads["launch"].begin, threads["completion"].begin)
                steps.counts = True
                collected = [each["collections"] for each in gc.get_stats()]
                threads["loop"].begin()
                await asyncio.wait([clients, ended], return_when="FIRST_COMPLETED")
                threads["loop"].end()
                steps.counts = False
                for before, each in zip(collected, gc.get_stats(), strict=True):
                    steps.totals["collections of garbage"] += each["collections"] - before
                await executor.on_threads(threads["launch"].end, threads["completion"].end)
                if clients.done():
                    raise SystemExit(f"the clients ended too early: {clients.result()}")
                clients.cancel()
                await asyncio.gather(clients, return_exceptions=True)
    return steps, threads


def report(steps: Steps, threads: dict[str, Counts], what: str, functions: int) -> None:
    """Print the tables."""
    number = steps.totals["steps"]
    means = {name.replace("_", " "): total / number for name, total in steps.totals.items()}
    means.pop("steps")
    if what != "calls":
        # What counts makes garbage, too.
        means.pop("collections of garbage")
    print(f"{number} steps, with", ", ".join(f"{mean:.4g} {name}" for name, mean in means.items()))
    parts: collections.Counter[tuple[str, str]] = collections.Counter()
    each: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for thread, counts in threads.items():
        for code, calls in counts.by_code.items():
            parts[thread, part_of(code.co_filename)] += calls
            parts[thread, "all"] += calls
            file = code.co_filename.removeprefix(PACKAGE + "/").rpartition("python3.11/")[2]
            each[thread, file.rpartition("site-packages/")[2], code.co_name] += calls
    rate = f"{what} per step"
    rows: list[Any] = [(*key, round(calls / number, 1)) for key, calls in parts.most_common()]
    print(table(rows, ("thread", "part", rate)))
    rows = [(*key, round(calls / number, 1)) for key, calls in each.most_common(functions)]
    print(table(rows, ("thread", "file", "function", rate)))


def main() -> None:
    """Count, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--skip", type=int, default=100, help="steps before those that count")
    parser.add_argument("--steps", type=int, default=100, help="steps that count")
    parser.add_argument("--functions", type=int, default=40, help="lines of the second table")
    parser.add_argument("--launches", action="store_true", help="time launches instead")
    parser.add_argument("--count", choices=list(KINDS), default="calls", help="what to count")
    args = parser.parse_args()
    loop = event_loop()
    try:
        if args.launches:
            times = loop.run_until_complete(launch_times((1, 4, 64, 256), 600))
            print(table(times, ("rows", "us", "us with new blocks")))
            return
        work = count_work(args.skip, args.steps, KINDS[args.count])
        steps, threads = loop.run_until_complete(work)
    finally:
        loop.close()
    report(steps, threads, args.count, args.functions)


if __name__ == "__main__":
    main()
