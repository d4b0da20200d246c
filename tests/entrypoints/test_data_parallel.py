"""Two engines behind one server: tokens of one engine, requests where their prefix is, and that a
member's death costs its own requests alone.

One server for all, in whatever order they come: a start costs each member an import of torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import re
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import forked
import httpx
import pytest
from serving import Server, engine_config, running, save_random

from jackfield import AsyncEngine, EngineConfig, OutputKind, SamplingParams
from jackfield.core.data_parallel import member as members
from jackfield.core.data_parallel import restarts
from jackfield.core.data_parallel.pooled_cores import PooledCores
from jackfield.core.errors import ConfigError, EngineOverloaded, EngineStopped, InvalidRequest
from jackfield.core.recording.recording import Recording
from jackfield.core.remote import processes
from jackfield.core.remote.client import remote_engine
from jackfield.core.remote.server import EngineServer
from jackfield.entrypoints.http.options import ServerOptions

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
ASKED: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 20},
    {"temperature": 1.2, "max_tokens": 12},
    {"temperature": 1.2, "n": 3, "max_tokens": 6},
    {"temperature": 1.2, "seed": 7, "stop": ("e",), "max_tokens": 40},
    {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1, "max_tokens": 3},
    {"structured_outputs": {"json": SCHEMA}, "max_tokens": 30},
]
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def forked_members() -> Iterator[None]:
    with forked.processes_of(processes):
        yield


@pytest.fixture(scope="module", autouse=True)
def members_that_always_come_back() -> Iterator[None]:
    """However often they have been killed by other tests."""
    with mock.patch.multiple(restarts, FIRST_PAUSE=0.01, LONGEST_PAUSE=0.1, MAX_RESTARTS=100):
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("model"))


def descriptors() -> list[str]:
    """Return what kinds of connections and shared memory this process has open."""
    gc.collect()
    names = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(re.sub(r"\[\d+\]", "", n) for n in names if n.startswith(("socket", "/memfd")))


def children() -> set[int]:
    tasks = Path("/proc/self/task").glob("*/children")
    return {int(pid) for task in tasks for pid in task.read_text().split()}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded")


@pytest.fixture(scope="module")
def server(checkpoint: Path, recorded: Path) -> Iterator[Server]:
    """Nothing is left of it at its end."""
    before = descriptors(), children()
    config = engine_config(
        checkpoint, data_parallel_size=2, max_num_batched_tokens=8, max_waiting_requests=2,
        max_num_seqs=2, record_steps=str(recorded / "steps"),
    )  # fmt: skip
    with running(config, ServerOptions(enable_admin=True)) as server:
        yield server
    assert (descriptors(), children()) == before


def pool(engine: AsyncEngine) -> PooledCores:
    assert isinstance(engine.core, PooledCores)
    return engine.core


async def last(stream: Any) -> Any:
    outputs = [output async for output in stream]
    return outputs[-1]


async def results(engine: AsyncEngine, **options: Any) -> list[Any]:
    """Serve ASKED one after another, as text and as chats."""
    collected = []
    for fields in ASKED:
        params = SamplingParams(**fields, output_kind=OutputKind.FINAL_ONLY)
        for stream in (
            engine.generate("The quick brown fox", params, **options),
            engine.chat([{"role": "user", "content": "Hello"}], params, **options),
        ):
            output = await last(stream)
            collected.append(
                [
                    (item.text, item.token_ids, item.finish_reason, item.stop_reason,
                     item.logprobs and [list(position) for position in item.logprobs])
                    for item in output.outputs
                ]
            )  # fmt: skip
            prompt = output.prompt_logprobs
            collected.append(prompt and [position and list(position) for position in prompt])
    return collected


def metric(server: Server, name: str, member: int) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    (line,) = re.findall(rf'^jackfield:{name}{{engine="{member}".*}} (.*)$', text, re.M)
    return float(line)


def test_tokens_are_those_of_one_engine(
    server: Server, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also through a front end, for which the first process only passes tokens on."""

    async def alone() -> list[Any]:
        async with AsyncEngine(engine_config(checkpoint, max_num_batched_tokens=8)) as engine:
            return [await results(engine) for _ in range(3)]

    async def fronted(engine: AsyncEngine) -> list[Any]:
        socket = EngineServer(pool(engine))
        async with socket.listening(tmp_path / "engine"):
            socket.started()
            front, _ = remote_engine(engine.config, tmp_path / "engine")
            async with front:
                assert await front.check_health() == {}
                return await results(front)

    expected = asyncio.run(alone())
    # Requests without a seed get those that one engine draws, whoever serves them: here from the
    # first one on, whatever the server has served before.
    monkeypatch.setattr(server.call(pool), "_seeds", random.Random(EngineConfig().seed))
    assert server.call(lambda engine: results(engine, data_parallel_rank=1)) == expected[0]
    assert server.call(results) == expected[1]
    assert server.call(fronted) == expected[2]
    assert server.call(lambda engine: pool(engine).check_idle()) is None


def test_the_second_request_goes_where_the_first_one_was(server: Server) -> None:
    prompts = [[number] * 200 for number in (40, 50, 60)]
    params = SamplingParams(max_tokens=2)
    cached = [
        server.call(lambda engine, p=prompt: last(engine.generate(p, params))).num_cached_tokens
        for prompt in [*prompts, *prompts, *prompts]
    ]
    assert cached == [0] * 3 + [192] * 6
    known = sum(metric(server, "data_parallel_known_prompt_tokens_total", m) for m in (0, 1))
    assert known >= 6 * 192
    for member in (0, 1):
        assert metric(server, "prefix_cache_hits_total", member) >= 2 * 192
        assert metric(server, "data_parallel_engine_up", member) == 1
    assert server.call(lambda engine: engine.reset_prefix_cache())
    again = server.call(lambda engine: last(engine.generate(prompts[0], params)))
    assert again.num_cached_tokens == 0


def test_a_header_chooses_the_member(server: Server) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 4, "stream": True}
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    before = metric(server, "data_parallel_requests_total", 1)
    header = {"X-data-parallel-rank": "1"}
    for _ in range(2):
        reply = httpx.post(f"{server.url}/v1/completions", json=body, headers=header)
        assert reply.status_code == 200 and reply.text.endswith("data: [DONE]\n\n")
        assert httpx.post(f"{server.url}/v1/chat/completions", json=chat, headers=header).is_success
    assert metric(server, "data_parallel_requests_total", 1) == before + 4
    for wrong in ("2", "-1", "first", "99999999999999999999"):
        reply = httpx.post(
            f"{server.url}/v1/chat/completions", json=chat, headers={"X-data-parallel-rank": wrong}
        )
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["param"] == "data_parallel_rank"
    with pytest.raises(InvalidRequest, match="data_parallel_rank: must be a number from 0 to 1"):
        server.call(lambda engine: last(engine.generate("x", data_parallel_rank=2)))


def test_a_member_that_is_full_refuses_and_another_one_takes_the_request(server: Server) -> None:
    async def serve(engine: AsyncEngine) -> None:
        streams = [engine.generate([5], LONG, data_parallel_rank=0) for _ in range(4)]
        await asyncio.gather(*map(anext, streams[:2]))
        for stream in streams[2:]:
            await stream.admit()
        with pytest.raises(EngineOverloaded):
            await engine.generate([5], LONG, data_parallel_rank=0).admit()
        router = pool(engine).router
        router.loads[1] += 10**6  # So that the full one is tried first.
        other = engine.generate([5], LONG)
        await other.admit()
        router.loads[1] -= 10**6
        assert router.num_requests == [4, 1]
        for stream in [*streams, other]:
            await stream.aclose()
        pool(engine).check_idle()

    server.call(serve)
    assert server.becomes(lambda e: not e.stats().num_requests_running)


def kill(engine: AsyncEngine, member: int) -> None:
    process = pool(engine).members[member].process
    assert process is not None and process.process is not None
    process.process.kill()


KILLED = "member 1 of 2 was ended by SIGKILL"


def forget(server: Server) -> None:
    """So that prompts take many steps, whoever has computed the same before."""
    assert server.call(lambda engine: engine.reset_prefix_cache())


def test_a_killed_member_costs_its_own_requests_and_comes_back(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed in decode, with another request in prefill, and again while it starts."""
    start, may_start = members.MemberProcess.start, asyncio.Event()

    async def start_late(process: members.MemberProcess, setup: Any) -> Any:
        await may_start.wait()
        return await start(process, setup)

    monkeypatch.setattr(members.MemberProcess, "start", start_late)
    expected = server.call(lambda engine: last(engine.generate([7, 8], LONG)))
    lost_before = metric(server, "data_parallel_lost_requests_total", 1)
    restarts_before = metric(server, "data_parallel_restarts_total", 1)
    num_starts = server.call(lambda engine: pool(engine).members[1].num_starts)

    async def lose(engine: AsyncEngine) -> list[Any]:
        others = [engine.generate([7, 8], LONG, data_parallel_rank=0) for _ in range(2)]
        decode = engine.generate([7, 8], LONG, data_parallel_rank=1)
        for stream in (*others, decode):
            await anext(stream)
        prefill = engine.generate([9] * 400, LONG, data_parallel_rank=1)
        await prefill.admit()
        kill(engine, 1)
        return await asyncio.gather(*map(last, (*others, decode, prefill)))

    forget(server)
    *finished, decode, prefill = server.call(lose)
    for output in finished:
        assert output.error is None
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    for output in (decode, prefill):
        assert output.outputs[0].finish_reason == "error" and output.error.startswith(KILLED)
    assert decode.outputs[0].token_ids and not prefill.outputs[0].token_ids
    health = httpx.get(f"{server.url}/health")
    assert health.status_code == 200 and health.json()["failing"]["member 1"].startswith(KILLED)
    assert metric(server, "data_parallel_engine_up", 1) == 0
    assert metric(server, "data_parallel_lost_requests_total", 1) == lost_before + 2
    with pytest.raises(EngineStopped, match=KILLED):
        server.call(lambda engine: last(engine.generate([7, 8], LONG, data_parallel_rank=1)))
    assert server.becomes(lambda engine: pool(engine).members[1].num_starts > num_starts)
    server.call(lambda engine: kill(engine, 1))
    server.call(lambda engine: may_start.set())
    assert server.becomes(lambda engine: "while it started" in pool(engine).members[1].trouble)
    assert server.call(lambda engine: last(engine.generate([7, 8], LONG))).error is None
    assert server.becomes(lambda engine: pool(engine).members[1].serves)
    again = server.call(lambda engine: last(engine.generate([7, 8], LONG, data_parallel_rank=1)))
    assert again.outputs[0].token_ids == expected.outputs[0].token_ids
    assert httpx.get(f"{server.url}/health").content == b""
    assert metric(server, "data_parallel_restarts_total", 1) == restarts_before + 1
    server.call(lambda engine: pool(engine).check_idle())


KINDS = ("moved", "lost")


@contextlib.contextmanager
def starts_held(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Members that end meanwhile come back afterwards, or once the function is called."""
    start, may_start = members.MemberProcess.start, asyncio.Event()

    async def start_late(process: members.MemberProcess, setup: Any) -> Any:
        await may_start.wait()
        return await start(process, setup)

    def release() -> None:
        server.call(lambda engine: may_start.set())

    monkeypatch.setattr(members.MemberProcess, "start", start_late)
    yield release
    release()
    assert server.becomes(lambda engine: all(m.serves for m in pool(engine).members))
    server.call(lambda engine: pool(engine).check_idle())


@contextlib.asynccontextmanager
async def sent_to(engine: AsyncEngine, member: int) -> AsyncIterator[None]:
    """Requests whose callers choose no member go to this one."""
    router = pool(engine).router
    router.loads[1 - member] += 10**6
    yield
    router.loads[1 - member] -= 10**6


QUIET: list[tuple[list[int], SamplingParams]] = [
    ([9] * 400, SamplingParams(temperature=0, max_tokens=8)),
    ([3] * 20, SamplingParams(temperature=1.2, n=2, max_tokens=8, logprobs=1)),
]
"""The first is in prefill when its member dies, the second waits."""


def test_requests_without_output_go_on_at_another_member(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seeds(engine: AsyncEngine) -> None:
        monkeypatch.setattr(pool(engine), "_seeds", random.Random(5))

    def tokens(output: Any) -> list[Any]:
        return [(item.token_ids, item.finish_reason) for item in output.outputs]

    async def lose(engine: AsyncEngine) -> list[Any]:
        decode = engine.generate([7, 8], LONG, data_parallel_rank=1)
        await anext(decode)
        seeds(engine)
        async with sent_to(engine, 1):
            quiet = [engine.generate(*request) for request in QUIET]
            for stream in quiet:
                await stream.admit()
        assert pool(engine).router.num_requests == [0, 3]
        kill(engine, 1)
        return await asyncio.gather(*map(last, (decode, *quiet)))

    server.call(seeds)
    expected = [server.call(lambda engine, r=r: last(engine.generate(*r))) for r in QUIET]
    before = [metric(server, f"data_parallel_{name}_requests_total", 1) for name in KINDS]
    forget(server)
    with starts_held(server, monkeypatch):
        decode, *moved = server.call(lose)
        assert decode.error.startswith(KILLED) and decode.outputs[0].token_ids
        assert [output.error for output in moved] == [None, None]
        assert list(map(tokens, moved)) == list(map(tokens, expected))
        after = [metric(server, f"data_parallel_{name}_requests_total", 1) for name in KINDS]
        assert [a - b for a, b in zip(after, before, strict=True)] == [2, 1]


@pytest.mark.parametrize("accepted", [True, False])
def test_a_request_is_moved_once(
    server: Server, monkeypatch: pytest.MonkeyPatch, accepted: bool
) -> None:
    """It may be what ends the members. The second one has accepted it, or not even read it; its
    caller has given another one up meanwhile."""

    def signal_to(engine: AsyncEngine, member: int, number: int) -> None:
        pool(engine).members[member].process.process.popen.send_signal(number)  # type: ignore[union-attr]

    async def move(engine: AsyncEngine) -> Any:
        async with sent_to(engine, 1):
            streams = [engine.generate([9] * 400, LONG) for _ in range(2)]
            for stream in streams:
                await stream.admit()
        if not accepted:
            signal_to(engine, 0, signal.SIGSTOP)
        kill(engine, 1)
        while pool(engine).router.num_requests != [2, 0]:
            await asyncio.sleep(0.001)
        process = pool(engine).members[0].process
        assert process is not None
        while accepted and process.calls._waiting:
            await asyncio.sleep(0.001)
        signal_to(engine, 0, signal.SIGSTOP)
        await streams[1].aclose()
        assert pool(engine).router.num_requests == [1, 0]
        return streams[0]

    async def lose(engine: AsyncEngine, stream: Any) -> Any:
        kill(engine, 0)
        return await last(stream)

    forget(server)
    with starts_held(server, monkeypatch) as release:
        stream = server.call(move)
        release()
        assert server.becomes(lambda engine: pool(engine).members[1].serves)
        output = server.call(lambda engine: lose(engine, stream))
        assert output.error.startswith(KILLED.replace("1", "0", 1))
        assert not output.outputs[0].token_ids


def test_a_request_that_no_other_member_takes_ends_with_an_error(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lose(engine: AsyncEngine) -> Any:
        others = [engine.generate([5], LONG, data_parallel_rank=0) for _ in range(4)]
        await asyncio.gather(*map(anext, others[:2]))
        for stream in others[2:]:
            await stream.admit()
        async with sent_to(engine, 1):
            quiet = engine.generate([9] * 400, LONG)
            await quiet.admit()
        kill(engine, 1)
        output = await last(quiet)
        for stream in others:
            await stream.aclose()
        return output

    forget(server)
    with starts_held(server, monkeypatch):
        output = server.call(lose)
        assert output.outputs[0].finish_reason == "error" and "waiting" in output.error


@pytest.mark.slow
def test_a_member_that_hangs_is_killed_and_comes_back(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "SIGN_SECONDS", 0.1)
    monkeypatch.setattr(members, "SILENT_SECONDS", 2.0)

    async def lose(engine: AsyncEngine) -> Any:
        kill(engine, 0)  # So that its next process is watched as above.
        while pool(engine).members[0].serves:
            await asyncio.sleep(0.01)
        while not pool(engine).members[0].serves:
            await asyncio.sleep(0.01)
        stream = engine.generate([7, 8], LONG, data_parallel_rank=0)
        await anext(stream)
        pool(engine).members[0].process.process.popen.send_signal(signal.SIGSTOP)  # type: ignore[union-attr]
        return await last(stream)

    assert "member 0 of 2 gave no sign of life for 2 seconds" in server.call(lose).error
    assert server.becomes(lambda engine: pool(engine).members[0].serves)


def test_each_process_of_a_member_has_a_recording(server: Server, recorded: Path) -> None:
    async def restart(engine: AsyncEngine) -> int:
        member = pool(engine).members[0]
        num_starts = member.num_starts
        kill(engine, 0)
        while not (member.num_starts > num_starts and member.serves):
            await asyncio.sleep(0.01)
        return member.num_starts - 1

    attempt = server.call(restart)
    names = {path.name for path in recorded.iterdir()}
    assert names >= {"steps.0", "steps.1", f"steps.0-{attempt}"}
    assert [Recording(str(recorded / name)).header.config.data_parallel_size for name in names]


def test_the_length_that_fits_in_each_member_is_the_longest(checkpoint: Path) -> None:
    config = engine_config(
        checkpoint, data_parallel_size=2, max_model_len="auto", num_gpu_blocks_override=7
    )
    with running(config, ServerOptions()) as server:
        assert server.engine.model_config.max_model_len == 6 * config.block_size


def test_a_start_that_fails_is_reported_and_leaves_no_process(checkpoint: Path) -> None:
    before = descriptors(), children()

    async def start(**options: Any) -> Exception:
        engine = AsyncEngine(engine_config(checkpoint, **options))
        with pytest.raises(Exception) as caught:
            await engine.start()
        assert isinstance(engine.core, PooledCores) or options["data_parallel_size"] == 1
        return caught.value

    one, two = (
        asyncio.run(start(attention_backend="no such one", data_parallel_size=size))
        for size in (1, 2)
    )
    assert (type(one), str(one)) == (type(two), str(two))
    assert isinstance(two, ConfigError) and two.param == "attention_backend"
    assert (descriptors(), children()) == before
