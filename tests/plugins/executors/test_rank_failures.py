"""A rank that dies, hangs or fails alone ends the engine with its number and cause, and leaves no
process behind."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import msgspec
import pytest

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import EngineStopped, RankFailed
from jackfield.core.parts.kv_transfer import TransferPlan
from jackfield.core.remote import processes
from jackfield.core.remote.frames import FrameReader, encode
from jackfield.core.step import Ping
from jackfield.core.worker.parts.kv_transfer import KVTransfer
from jackfield.plugins.executors import spawn
from jackfield.plugins.executors.followers import FollowerProcess
from jackfield.plugins.executors.messages import Step, ToFollower
from jackfield.plugins.executors.progress import COMPILERS, Progress, StallDetector

from helpers import make_checkpoint

PROMPT = [5 + (i * i) % 150 for i in range(80)]
DETECTED = 60.0
"""Seconds after which an engine that has not ended counts as hanging, on a busy machine too."""


@pytest.fixture(scope="module", autouse=True)
def forked_ranks() -> Iterator[None]:
    with forked.processes_of(processes):
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


def config(checkpoint: Path, **options: Any) -> EngineConfig:
    settings = {
        "model": str(checkpoint), "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True,
        "block_size": 4, "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 8,
        "num_gpu_blocks_override": 60, "tensor_parallel_size": 2, **options,
    }  # fmt: skip
    return EngineConfig(**settings)


def descriptors() -> list[str]:
    """Return what kinds of connections and shared memory this process has open."""
    gc.collect()
    names = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(name for name in names if name.startswith(("socket", "/memfd")))


def children() -> set[int]:
    own = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return {int(pid) for pid in own.split()}


async def lose(checkpoint: Path, act: Any, at: int, requests: int = 1, **options: Any) -> str:
    """Serve requests, and call `act` with the other rank's process at plan number `at`. Return why
    the engine ended."""
    engine = AsyncEngine(config(checkpoint, **options))
    await engine.start()
    executor: Any = engine.core.executor  # type: ignore[attr-defined]
    process = executor.followers[0].process
    submit, plans = executor.submit, 0

    def submitting(*args: Any) -> Any:
        nonlocal plans
        plans += 1
        if plans == at:
            act(process)
        return submit(*args)

    executor.submit = submitting
    began = time.monotonic()
    if at == 0:
        act(process)
        while engine.dead_reason is None and time.monotonic() < began + DETECTED:
            await asyncio.sleep(0.01)
    else:
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)

        async def serve(number: int) -> str:
            stream = engine.generate([5 + number, *PROMPT], params)
            return [output async for output in stream][-1].outputs[0].finish_reason or ""

        assert set(await asyncio.gather(*map(serve, range(requests)))) == {"error"}
    assert engine.dead_reason is not None and time.monotonic() < began + DETECTED
    with pytest.raises(type(executor.failure), match=re.escape(str(executor.failure))):
        executor.ask(Ping())
    with pytest.raises(EngineStopped):
        await engine.check_health()
    await engine.stop()
    assert process.poll() is not None
    return engine.dead_reason


def kill(process: Any) -> None:
    process.send_signal(signal.SIGKILL)


IDLE, PREFILL, DECODE = 0, 3, 20


@pytest.mark.parametrize(
    "at",
    [
        pytest.param(IDLE, marks=pytest.mark.slow, id="idle"),
        pytest.param(PREFILL, marks=pytest.mark.slow, id="prefill"),
        pytest.param(DECODE, id="decode"),
    ],
)
def test_a_rank_that_is_killed_ends_the_engine(checkpoint: Path, at: int) -> None:
    before = descriptors(), children()
    reason = asyncio.run(lose(checkpoint, kill, at))
    assert "rank 1 of 2 was ended by SIGKILL" in reason
    assert descriptors() == before[0]
    assert children() <= before[1]


def test_a_rank_that_is_stopped_ends_the_engine(checkpoint: Path) -> None:
    reason = asyncio.run(
        lose(checkpoint, lambda process: process.send_signal(signal.SIGSTOP), DECODE,
             rank_timeout=2.0)
    )  # fmt: skip
    assert "rank 1 has given no sign of life for 2 seconds" in reason


def test_ranks_that_wait_for_ever_end_the_engine(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 does not come to its part of a step, and the other rank, which lives, waits. Stacks
    cannot be written: a service may have closed standard error."""

    def closed(file: int) -> None:
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(faulthandler, "dump_traceback", closed)

    async def serve() -> str:
        engine = AsyncEngine(config(checkpoint, rank_timeout=4.0))
        await engine.start()
        executor: Any = engine.core.executor  # type: ignore[attr-defined]
        released = threading.Event()
        executor._joined.worker.step = lambda *_: released.wait(60)
        stream = engine.generate(PROMPT, SamplingParams(max_tokens=4))
        assert [output async for output in stream][-1].outputs[0].finish_reason == "error"
        released.set()
        await engine.stop()
        return engine.dead_reason or ""

    assert "rank 0 has made no progress in step or job" in asyncio.run(serve())


def test_a_rank_without_memory_ends_the_engine(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one rank fails; the other one waits for it."""
    # A fork begins with memory to spare.
    monkeypatch.setattr(processes, "subprocess", subprocess)

    def starve(process: Any) -> None:
        resource.prlimit(process.pid, resource.RLIMIT_AS, (1 << 20, 1 << 20))

    reason = asyncio.run(
        lose(checkpoint, starve, 1, 48, max_num_seqs=48, max_num_batched_tokens=4096,
             num_gpu_blocks_override=2000)
    )  # fmt: skip
    # Without any memory it may not even be able to tell why.
    assert "rank 1" in reason and ("memory" in reason or "ended with status" in reason)


def test_a_rank_that_is_killed_while_it_starts(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = FollowerProcess.send

    def killing(self: FollowerProcess, frame: bytes) -> None:
        send(self, frame)
        self.process.send_signal(signal.SIGKILL)

    monkeypatch.setattr(FollowerProcess, "send", killing)

    async def start() -> None:
        engine = AsyncEngine(config(checkpoint, distributed_timeout_seconds=20.0))
        with pytest.raises(RankFailed, match="rank 1 of 2 was ended by SIGKILL"):
            await engine.start()
        await engine.stop()

    before = descriptors(), children()
    asyncio.run(start())
    assert descriptors() == before[0]
    assert children() <= before[1]


def test_a_rank_that_hangs_before_it_joins(checkpoint: Path) -> None:
    async def start() -> None:
        engine = AsyncEngine(config(checkpoint, distributed_timeout_seconds=0.01))
        with pytest.raises(RankFailed, match="rank 1 of 2 has not begun to join the others"):
            await engine.start()
        await engine.stop()

    before = descriptors(), children()
    asyncio.run(start())
    assert descriptors() == before[0]
    assert children() <= before[1]


SCRIPT = """
import os, signal, sys
from jackfield import LLM, SamplingParams

llm = LLM(sys.argv[1], device="cpu", dtype="float32", skip_tokenizer_init=True, max_model_len=128,
          num_gpu_blocks_override=60, tensor_parallel_size=2)
output = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
assert len(output[0].outputs[0].token_ids) == 4
print(llm.engine.core.executor.followers[0].process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_ranks_end_with_a_script_that_is_killed(checkpoint: Path, tmp_path: Path) -> None:
    """The script has no `if __name__ == "__main__"`, and must not be imported by other ranks."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with forked.Tree(
        [sys.executable, str(script), str(checkpoint)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as run:  # fmt: skip
        output, errors = run.communicate(timeout=120)
    assert run.returncode == -signal.SIGKILL, errors
    pid, end = int(output.split()[-1]), time.monotonic() + DETECTED
    while _alive(pid):
        assert time.monotonic() < end, "the other rank is still there"
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    "lost",
    # What a lost rank does to an engine, and a dead engine to a server, has tests by day.
    [pytest.param(True, id="a rank is killed", marks=pytest.mark.slow),
     pytest.param(False, id="Ctrl-C")],
)  # fmt: skip
def test_a_server_ends_with_its_ranks(checkpoint: Path, lost: bool) -> None:
    """With status 1 where a rank was lost; Ctrl-C, which reaches all ranks, drains as ever."""
    flags = {"device": "cpu", "dtype": "float32", "max-model-len": "128", "port": "0",
             "num-gpu-blocks-override": "60", "tensor-parallel-size": "2"}  # fmt: skip
    server = forked.Tree(
        [sys.executable, "-m", "jackfield", "serve", str(checkpoint), "--skip-tokenizer-init",
         *(part for name, value in flags.items() for part in (f"--{name}", value))],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0,
    )  # fmt: skip
    with server:
        assert server.stdout is not None
        assert "Serving" in server.stdout.readline()
        processes = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        ranks = [p for p in processes if "follower" in Path(f"/proc/{p}/cmdline").read_text()]
        assert len(ranks) == 1
        if lost:
            os.kill(int(ranks[0]), signal.SIGKILL)
        else:
            os.killpg(server.pid, signal.SIGINT)
        _, errors = server.communicate(timeout=DETECTED)
    assert server.returncode == int(lost), errors
    assert ("rank 1 of 2 was ended by SIGKILL" in errors) == lost
    assert not _alive(int(ranks[0]))


# ---------------------------------------------------------------- progress


async def test_blocks_of_transfers_return_once_the_connector_has_closed_on_all_ranks(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its half on rank 1 raises when a save begins, which on rank 0 takes its time."""
    offload = {"kv_connector": "cpu_offload", "kv_connector_extra_config": {
        "kv_offloading_size": 0.01}}  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    async with AsyncEngine(config(checkpoint, kv_transfer_config=offload)) as engine:
        executor: Any = engine.core.executor  # type: ignore[attr-defined]
        follower, half = executor.followers[0], executor._joined.worker.part(KVTransfer).half._half
        may_save, save, send = threading.Event(), half.save, follower.send
        half.save = lambda *args: may_save.wait() and save(*args)

        def send_broken(frame: bytes) -> None:
            message = next(FrameReader[Any](ToFollower).read_frames(frame))
            if isinstance(message, Step) and "kv_transfer" in message.plan.parts:
                plan = msgspec.structs.replace(
                    message.plan, parts={"kv_transfer": TransferPlan(b"nothing of it")}
                )
                frame = encode(msgspec.structs.replace(message, plan=plan))
            send(frame)

        follower.send = send_broken
        tokens = [
            [output async for output in engine.generate(PROMPT, params)][-1].outputs[0].token_ids
            for _ in range(2)
        ]
        assert tokens[0] == tokens[1]
        async with asyncio.timeout(DETECTED):
            while not half._closing:
                await asyncio.sleep(0.001)
            assert engine.stats().kv_blocks_used
            may_save.set()
            while engine.stats().kv_blocks_used:
                await asyncio.sleep(0.001)
        assert engine.healthy and await engine.reset_prefix_cache()
    assert "kv connector 'cpu_offload' of jackfield" in caplog.text
    assert "out of use" not in caplog.text


def test_a_process_started_ahead_is_not_used_with_other_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would take another device for its own than rank 0 takes for that rank's."""
    # No forks, whose server would be started anew for the other devices.
    monkeypatch.setattr(processes, "subprocess", subprocess)
    spawn.start_ahead(2)
    used = spawn.take()
    (left,) = spawn._spares
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    new = spawn.take()
    assert left.process.poll() is not None and new.process.pid != left.process.pid
    for each in (used, new):
        assert each.process.poll() is None
        each.process.kill()  # Else it would import all that a rank needs before it ended.
        each.process.wait(DETECTED)
        each.connection.close()
        each.progress.close()


def test_compiling_is_progress_and_waiting_is_not() -> None:
    own, other = Progress.create(), Progress.create()
    detector = StallDetector([own, other], ticks=3)
    own.start(4)
    other.start(4)
    own.counted_call()

    def beat() -> str | None:
        other.beat(_ident())
        stall = detector.tick(awaited=True)
        return None if stall is None else stall.reason

    compiling = compile("def run(function): return function()", f"/x{COMPILERS[0]}x.py", "exec")
    scope: dict[str, Any] = {}
    exec(compiling, scope)
    assert [scope["run"](beat) for _ in range(9)] == [None] * 9
    assert [beat() for _ in range(2)] == [None] * 2
    assert "rank 1 has made no progress in step or job 4" in (beat() or "")


def test_time_passes_only_while_something_is_awaited() -> None:
    other = Progress.create()
    detector = StallDetector([Progress.create(), other], ticks=2)
    for _ in range(5):
        other.beat(_ident())
        assert detector.tick(awaited=False) is None
    assert detector.tick(awaited=False) is None
    assert detector.tick(awaited=False) == ("rank 1 has given no sign of life", 2)


def test_ranks_may_wait_for_other_engines_but_not_for_one_of_their_own() -> None:
    """Engines with common experts begin each step together (`Round`)."""
    own, other = Progress.create(), Progress.create()
    detector = StallDetector([own, other], ticks=2)

    def beat() -> bool:
        other.beat(_ident())
        return detector.tick(awaited=True) is not None

    own.await_engines(True)
    other.await_engines(True)
    assert [beat() for _ in range(9)] == [False] * 9
    other.await_engines(False)
    assert [beat() for _ in range(3)] == [False, False, True]


def test_a_long_step_may_take_a_device_long() -> None:
    other = Progress.create()
    detector = StallDetector([Progress.create(), other], ticks=2)
    stalls = []
    for _ in range(9):
        other.beat(_ident())
        stalls.append(detector.tick(awaited=True, tokens=3 * 8192))
    assert stalls[:8] == [None] * 8
    assert stalls[8] == ("no rank has made progress in step or job 0", 8)


def _ident() -> int:
    return threading.get_ident()
