"""An engine behind a socket gives what the same engine gives to its own process.

Both ends run in one event loop here, over a real Unix socket; `tests/entrypoints/test_fronts.py`
has the processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from prometheus_client import Counter
from prometheus_client.parser import text_string_to_metric_families

from jackfield import AsyncEngine, EngineConfig, OutputKind, SamplingParams, hookimpl
from jackfield.core.data_parallel.pooled_cores import PooledCores
from jackfield.core.engine.core import EngineCore
from jackfield.core.engine.core_client import CoreClient
from jackfield.core.errors import (
    ContextLengthExceeded,
    EngineOverloaded,
    EngineStopped,
    InvalidRequest,
)
from jackfield.core.inputs import ChatMessage
from jackfield.core.output_parsing.output_text import OutputText
from jackfield.core.outputs import KVCompressionUsage
from jackfield.core.registry import load_plugins
from jackfield.core.remote import server as remote_server
from jackfield.core.remote.client import RemoteCore, remote_engine
from jackfield.core.remote.frames import Abort, Hello, encode
from jackfield.core.remote.server import EngineServer

from helpers import make_checkpoint

CONFIG: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch",
    "max_model_len": 512,
    "max_num_seqs": 16,
    "num_gpu_blocks_override": 300,
    "served_model_name": ("tiny",),
    "reasoning_parser": "think_tags",
    "tool_call_parser": "hermes",
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
CHAT: list[ChatMessage] = [{"role": "user", "content": "What is 2 + 3?"}]
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


@contextlib.asynccontextmanager
async def fronted(
    folder: Path, count: int = 1, plugins: Any = None, **options: Any
) -> AsyncIterator[tuple[EngineServer, list[AsyncEngine]]]:
    """An engine and its front ends, started."""
    config = EngineConfig(**{**CONFIG, **options})
    core = EngineCore(config, plugins or load_plugins())
    engine = AsyncEngine(config, plugins=core.plugins, core=core)
    server = EngineServer(core)
    async with server.listening(folder / "engine"):
        fronts = [
            remote_engine(config, folder / "engine", front=index, plugins=plugins)[0]
            for index in range(count)
        ]
        starting = asyncio.gather(*(front.start() for front in fronts))
        await engine.start()
        server.started()
        await starting
        for front in fronts:
            front.core.send_listening()
        await server.all_listening(count)
        try:
            yield server, fronts
        finally:
            for front in fronts:
                await front.stop()
            await engine.stop()


async def final(stream: Any) -> Any:
    async for output in stream:
        last = output
    return last


async def folded(stream: Any) -> list[tuple[Any, ...]]:
    """Deltas put together, a tuple a completion."""
    fields: dict[int, list[Any]] = {}
    async for output in stream:
        for item in output.outputs:
            text, token_ids, logprobs, _, _ = fields.get(item.index, ["", [], [], None, None])
            fields[item.index] = [
                text + item.text,
                token_ids + item.token_ids,
                logprobs + (item.logprobs or []),
                item.finish_reason,
                item.stop_reason,
            ]
    return [tuple(fields[index]) for index in sorted(fields)]


async def becomes(condition: Any) -> None:
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0.002)


def idle(engine: AsyncEngine | EngineCore) -> bool:
    stats = engine.stats()
    return not (stats.num_requests_running or stats.num_requests_waiting or stats.kv_blocks_used)


ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 10},
    "seed": {"seed": 7, "max_tokens": 10, "temperature": 1.5},
    "several": {"n": 3, "seed": 7, "max_tokens": 6, "temperature": 1.5},
    "stop string": {"temperature": 0, "stop": ("=",), "max_tokens": 40},
    "stop string shown": {"temperature": 0, "stop": ("=",), "include_stop_str_in_output": True},
    "stop token": {"temperature": 0, "stop_token_ids": tuple(range(20, 300)), "min_tokens": 3},
    "logprobs": {"temperature": 0, "logprobs": 2, "max_tokens": 9, "stop": ("= 5",)},
    "prompt logprobs": {"temperature": 0, "prompt_logprobs": 1, "max_tokens": 3},
    "schema": {"structured_outputs": {"json": SCHEMA}, "temperature": 0, "max_tokens": 60},
    "choice": {"structured_outputs": {"choice": ["yes", "no"]}, "seed": 3},
    "no text": {"temperature": 0, "detokenize": False, "max_tokens": 5},
    "bias and bad words": {
        "temperature": 0, "max_tokens": 9, "bad_words": ("2",), "logit_bias": {50: 3.5}
    },
    "cut prompt": {"temperature": 0, "truncate_prompt_tokens": 4, "max_tokens": 4},
}  # fmt: skip


def assert_alike(item: Any, other: Any, name: str) -> None:
    """Equal; numbers nearly, since a prompt that is partly cached goes through other products."""
    assert type(item) is type(other), name
    if isinstance(item, dict):
        assert list(item) == list(other), name
        for key in item:
            assert_alike(item[key], other[key], f"{name}: {key}")
    elif isinstance(item, list):
        assert len(item) == len(other), name
        for number, pair in enumerate(zip(item, other, strict=True)):
            assert_alike(*pair, f"{name}: {number}")
    elif isinstance(item, float):
        assert item == pytest.approx(other, abs=1e-4), name
    else:
        assert item == other, name


async def test_outputs_are_those_of_an_engine_in_process(tmp_path: Path) -> None:
    async with (
        AsyncEngine(EngineConfig(**CONFIG)) as here,
        fronted(tmp_path) as (server, (there,)),
    ):
        for name, options in ASKED.items():
            for kind in (OutputKind.FINAL_ONLY, OutputKind.DELTA):
                params = SamplingParams(**options, output_kind=kind)
                results = []
                for engine in (here, there):
                    if kind is OutputKind.DELTA:
                        results.append(await folded(engine.chat(CHAT, params)))
                        continue
                    output = await final(engine.chat(CHAT, params, request_id="one"))
                    output.timings = None
                    output.num_cached_tokens = 0  # The first to ask finds less.
                    results.append(output)
                assert_alike(*map(msgspec.to_builtins, results), name)
        counts = server.core.stats()
        assert here.stats().requests_finished == counts.requests_finished
        assert here.stats().prompt_tokens == counts.prompt_tokens
        server.send_status()
        await becomes(lambda: there.stats() == counts)


async def test_vectors_are_those_of_an_engine_in_process(tmp_path: Path) -> None:
    options = {"runner": "pooling", "reasoning_parser": None, "tool_call_parser": None}
    async with (
        AsyncEngine(EngineConfig(**{**CONFIG, **options})) as here,
        fronted(tmp_path, **options) as (_, (there,)),
    ):
        for prompt in ("Once upon a time", [5, 6, 7]):
            first, other = await here.encode(prompt), await there.encode(prompt)
            assert first.prompt_token_ids == other.prompt_token_ids
            assert first.prompt == other.prompt
            assert first.outputs.data.tobytes() == other.outputs.data.tobytes()
        with pytest.raises(InvalidRequest, match="gives vectors"):
            await final(there.generate("x"))
        assert there.supported_tasks == here.supported_tasks


async def test_refusals_are_those_of_an_engine_in_process(tmp_path: Path) -> None:
    config = {"max_waiting_requests": 1, "max_num_seqs": 1}
    bad_schema = {"json": {"type": "no such type"}}
    params_: list[tuple[Any, Any]] = [
        ([10**9], SamplingParams()),
        ([], SamplingParams()),
        ([5] * 600, SamplingParams()),
        ([5], SamplingParams(logprobs=1000)),
        ([5], SamplingParams(structured_outputs=bad_schema)),  # type: ignore[arg-type]
        ([5], SamplingParams(structured_outputs={"regex": "("})),  # type: ignore[arg-type]
    ]
    async with (
        AsyncEngine(EngineConfig(**CONFIG)) as here,
        fronted(tmp_path) as (server, (there,)),
    ):
        for prompt, params in params_:
            messages = []
            for engine in (here, there):
                with pytest.raises(InvalidRequest) as caught:
                    await final(engine.generate(prompt, params))
                messages.append((type(caught.value), caught.value.message, caught.value.param))
            assert messages[0] == messages[1]
        assert messages[0][2] == "structured_outputs.regex"
        with pytest.raises(ContextLengthExceeded):
            await final(there.generate([5] * 600))
        with pytest.raises(InvalidRequest, match="cannot be sent"):
            await final(there.generate([5], SamplingParams(kv_transfer_params={"a": 2**70})))
        with pytest.raises(InvalidRequest, match="pooled"):
            await there.encode("x")
        assert (
            not there.core.remote._open
            and not there.core.requests.states
            and not server.core.requests.states
        )
    async with fronted(tmp_path, **config) as (_, (there,)):
        streams = [there.generate([5, number], LONG) for number in range(3)]
        await anext(streams[0])
        await streams[1].admit()
        with pytest.raises(EngineOverloaded):
            await streams[2].admit()


async def test_an_id_is_in_use_whichever_front_end_has_it(tmp_path: Path) -> None:
    async with fronted(tmp_path, count=2) as (server, (first, two)):
        stream = first.generate([5], LONG, request_id="same")
        await anext(stream)
        with pytest.raises(InvalidRequest, match="in use"):
            await final(two.generate([5], LONG, request_id="same"))
        await stream.aclose()
        await becomes(lambda: idle(server.core))
        params = SamplingParams(max_tokens=2)
        assert (await final(two.generate([5], params, request_id="same"))).finished


async def test_leaving_a_stream_frees_its_blocks(tmp_path: Path) -> None:
    async with fronted(tmp_path) as (server, (there,)):
        for params in (LONG, SamplingParams(n=3, max_tokens=400, ignore_eos=True)):
            stream = there.generate([5, 6], params)
            await anext(stream)
            assert server.core.stats().num_requests_running == params.n
            await stream.aclose()
            await becomes(lambda: idle(server.core))
        assert server.core.stats().requests_finished == {"abort": 4}
        # Cancelled while it is being admitted, behind a grammar that takes its time.
        grammar = {"json": {"type": "object", "properties": {f"p{i}": {} for i in range(40)}}}
        waiting = asyncio.ensure_future(
            anext(there.generate([5], SamplingParams(structured_outputs=grammar)))  # type: ignore[arg-type]
        )
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert not there.core.remote._open and not there.core.requests.states
        await becomes(lambda: idle(server.core) and not server.core.requests.states)
        output = there.generate([5], LONG, request_id="mine")
        await anext(output)
        assert await there.abort("mine")
        assert (await final(output)).outputs[0].finish_reason == "abort"


async def test_a_lost_front_end_loses_its_requests_alone(tmp_path: Path) -> None:
    async with fronted(tmp_path, count=2) as (server, (first, two)):
        lost = [first.generate([5, number], LONG) for number in range(3)]
        survivor = two.generate([5], SamplingParams(max_tokens=60, ignore_eos=True, seed=1))
        for stream in (*lost, survivor):
            await anext(stream)
        first.core._channel.abort()
        output = await final(survivor)
        assert len(output.outputs[0].token_ids) == 60
        for stream in lost:
            last = await final(stream)
            assert last.outputs[0].finish_reason == "error"
            assert "process has ended" in (last.error or "")
        await becomes(lambda: idle(server.core))
        assert server.core.stats().requests_finished == {"abort": 3, "length": 1}
        assert first.core.closed.is_set() and not first.healthy
        with pytest.raises(EngineStopped):
            await final(first.generate([5]))
        with pytest.raises(EngineStopped):
            await first.check_health()


BAD = {
    "no hello": struct.pack("<I", 3) + b"abc",
    "too long": struct.pack("<I", 2**32 - 1),
    "another first": encode(Abort([1])),
    "hello twice": encode(Hello(9, 1)) * 2,
    "noise after hello": encode(Hello(9, 1)) + struct.pack("<I", 5) + b"\x91" * 5,
}


@pytest.mark.parametrize("name", BAD)
async def test_a_malformed_frame_ends_its_connection_and_not_the_engine(
    name: str, tmp_path: Path
) -> None:
    async with fronted(tmp_path) as (server, (there,)):
        stream = there.generate([5], SamplingParams(max_tokens=50, ignore_eos=True))
        await anext(stream)
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "engine"))
        writer.write(BAD[name])
        async with asyncio.timeout(300):
            with contextlib.suppress(ConnectionResetError):
                while await reader.read(1 << 16):
                    pass
        writer.close()
        assert len((await final(stream)).outputs[0].token_ids) == 50
        await there.check_health()
        assert len(server.fronts) == 1


async def test_a_front_end_that_does_not_read_costs_its_tokens_alone(tmp_path: Path) -> None:
    """Its news waits, one frame for all steps, and it gets everything once it reads."""
    async with fronted(tmp_path) as (server, (there,)):
        (front,) = server.fronts
        messages: list[Any] = []
        send = front.channel.send
        front.channel.send = lambda message: (messages.append(message), send(message))[1]  # type: ignore[method-assign]
        stream = there.generate([5], SamplingParams(max_tokens=80, ignore_eos=True, temperature=0))
        first = await anext(stream)
        front.channel.pause_writing()
        await becomes(lambda: idle(server.core))
        before = len(messages)
        assert not (await asyncio.wait([asyncio.ensure_future(asyncio.sleep(0.01))]))[1]
        front.channel.resume_writing()
        last = await final(stream)
        assert len(last.outputs[0].token_ids) == 80 and not first.finished
        token_frames = [item for item in messages[before:] if type(item).__name__ == "Tokens"]
        assert len(token_frames) == 1
        assert len(token_frames[0].token_ids) + len(token_frames[0].changes[0].token_ids) > 10


async def test_what_is_too_large_to_cross_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fronted(tmp_path) as (server, (there,)):
        other = there.generate([5], SamplingParams(max_tokens=60, ignore_eos=True))
        await anext(other)
        monkeypatch.setattr("jackfield.core.remote.frames.MAX_FRAME", 2000)
        params = SamplingParams(max_tokens=300, prompt_logprobs=20, n=2, ignore_eos=True)
        output = await final(there.generate([5] * 100, params))
        assert [item.finish_reason for item in output.outputs] == ["error", "error"]
        assert "at most 2000" in (output.error or "")
        assert server.core.stats().num_requests_running == 1, "the others are aborted"
        assert len((await final(other)).outputs[0].token_ids) == 60


async def test_metrics_are_the_engines_and_the_sum_of_the_front_ends(tmp_path: Path) -> None:
    async with fronted(tmp_path, count=2) as (_, fronts):
        for number, front in enumerate(fronts):
            kind = Counter("mine", "A plugin's.", ["route"], registry=front.metrics_registry)
            kind.labels("a").inc(2 + number)
            kind.labels(f"only {number}").inc()
            front.core.report_load(lambda number=number: 3 + number)
            await final(front.generate([5], SamplingParams(max_tokens=4, ignore_eos=True)))
        texts = [(await front.render_metrics()).decode() for front in fronts]
        for text in texts:
            samples = {
                (sample.name, *sorted(sample.labels.items())): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
            named = ("model_name", "tiny")
            assert samples["jackfield:generation_tokens_total", named] == 8
            success = ("jackfield:request_success_total", ("finished_reason", "length"), named)
            assert samples[success] == 2
            assert samples["jackfield:time_to_first_token_seconds_count", named] == 2
            assert samples["mine_total", ("route", "a")] == 5
            assert samples["mine_total", ("route", "only 1")] == 1
        assert [await front.core.server_load() for front in fronts] == [7, 7]


async def test_a_front_end_that_does_not_answer_is_left_out_of_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_server, "REPORT_SECONDS", 0.1)
    async with fronted(tmp_path, count=2) as (server, (first, two)):
        for front in (first, two):
            front.core.report_load(lambda: 1)
        two.core._channel.received = None
        assert await first.core.server_load() == 1
        assert not server._reports, "nothing waits for an answer that may never come"


async def test_the_events_reach_plugins_once(tmp_path: Path) -> None:
    messages: list[str] = []

    class Listener:
        @hookimpl
        def engine_started(self, engine: Any) -> None:
            messages.append(f"started {type(engine).__name__}")

        @hookimpl
        def request_finished(self, output: Any) -> None:
            messages.append(f"finished {output.outputs[0].text}")

        @hookimpl
        def engine_stopping(self, engine: Any) -> None:
            messages.append("stopping")

    plugins = load_plugins(extra=[Listener()])
    async with fronted(tmp_path, plugins=plugins) as (_, (there,)):
        params = SamplingParams(structured_outputs={"choice": ["yes"]})  # type: ignore[arg-type]
        await final(there.generate("x", params))
    assert messages == ["started AsyncEngine", "finished yes", "stopping"]


async def test_the_prefix_cache_is_reset_through_the_socket(tmp_path: Path) -> None:
    async with fronted(tmp_path) as (_, (there,)):
        prompt = list(range(5, 105))
        params = SamplingParams(max_tokens=1)
        assert (await final(there.generate(prompt, params))).num_cached_tokens == 0
        assert (await final(there.generate(prompt, params))).num_cached_tokens > 0
        stream = there.generate(prompt, LONG)
        await anext(stream)
        assert not await there.reset_prefix_cache()
        await stream.aclose()
        assert await there.reset_prefix_cache()
        assert (await final(there.generate(prompt, params))).num_cached_tokens == 0


async def test_a_draining_engine_refuses_and_finishes(tmp_path: Path) -> None:
    async with fronted(tmp_path) as (server, (there,)):
        stream = there.generate([5], SamplingParams(max_tokens=100, ignore_eos=True))
        await anext(stream)
        server.refuse_requests()
        await becomes(lambda: not there.healthy)
        with pytest.raises(EngineStopped, match="not accepting"):
            await final(there.generate([5]))
        drained, last = await asyncio.gather(
            asyncio.wait_for(server.core.requests.idle.wait(), 300), final(stream)
        )
        assert drained and len(last.outputs[0].token_ids) == 100
        server.close_fronts()
        await asyncio.wait_for(there.core.closed.wait(), 300)
        assert there.dead_reason is None


@pytest.mark.parametrize("params", [{}, {"logprobs": 1}])
async def test_an_error_with_one_requests_output_ends_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any]
) -> None:
    """At the front end, where the texts are made; the engine stops computing it."""
    short = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, **params)
    async with fronted(tmp_path) as (server, (there,)):
        alone = (await final(there.generate("One", short))).outputs[0].text
        real, calls = OutputText.push_token, 0

        def failing(*args: Any) -> str | None:
            nonlocal calls
            calls += 1
            if calls == 13:
                raise ArithmeticError("no luck")
            return real(*args)

        monkeypatch.setattr(OutputText, "push_token", failing)
        outputs = await asyncio.gather(*(final(there.generate("One", short)) for _ in range(3)))
        (failed,) = [output for output in outputs if output.error is not None]
        assert "ArithmeticError: no luck" in failed.error
        for output in outputs:
            if output is not failed:
                assert output.outputs[0].text == alone
        await becomes(lambda: idle(server.core))
        there.core.remote.check_idle()  # type: ignore[attr-defined]
        assert there.healthy


async def test_a_dead_engine_ends_the_streams_of_its_front_ends(tmp_path: Path) -> None:
    async with fronted(tmp_path) as (server, (there,)):
        stream = there.generate([5], LONG)
        await anext(stream)
        server.core.executor.ask = None  # type: ignore[method-assign,assignment]
        server.core.executor.submit = None  # type: ignore[method-assign,assignment]
        last = await final(stream)
        assert last.outputs[0].finish_reason == "error"
        assert "the engine died: TypeError" in (last.error or "")
        with pytest.raises(EngineStopped):
            await there.check_health()
        with pytest.raises(EngineStopped, match="TypeError"):
            await final(there.generate([5]))
        server.send_status()
        await asyncio.wait_for(there.core.closed.wait(), 300)
        assert "TypeError" in (there.dead_reason or "")


class Giver:
    """A KV connector that loads and saves nothing, and gives parameters out at the end."""

    metadata_type = None

    jackfield_api = 3

    @hookimpl
    def register_kv_connectors(self, registry: Any) -> None:
        registry.add("giver", self)

    def make_scheduler(self, setup: Any) -> Any:
        return self

    def make_worker(self, setup: Any) -> Any:
        return self

    def num_external_tokens(self, request: Any, num_computed_tokens: int) -> int:
        return 0

    def start_save(self, *_: Any) -> tuple[int, ...]:
        return ()

    def request_finished(self, transfer: int, request: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, {"given": request.params.kv_transfer_params, "why": request.finish_reason}

    def build_metadata(self) -> None:
        return None

    def poll(self) -> None:
        return None

    def bind(self, kv_caches: Any) -> None:
        """Nothing is moved."""

    start = update = bind

    def close(self) -> None:
        """Nothing is held."""


async def test_the_connectors_parameters_go_in_and_out(tmp_path: Path) -> None:
    """Also where a stop string ends the output, which the front end finds."""
    options = {"kv_transfer_config": {"kv_connector": "giver"}}
    plugins = load_plugins(extra=[Giver()])
    async with fronted(tmp_path, plugins=plugins, **options) as (_, (there,)):
        request = {"to": ["elsewhere", 1, None, {"a": 1.5}]}
        params = SamplingParams(temperature=0, stop=("=",), kv_transfer_params=request)
        output = await final(there.chat(CHAT, params))
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "=")
        assert output.kv_transfer_params == {"given": request, "why": "stop"}


async def test_what_is_left_of_a_compacted_cache_is_reported(tmp_path: Path) -> None:
    options = {"kv_compression": "window", "kv_compression_ratio": 0.1}
    async with fronted(tmp_path, **options) as (_, (there,)):
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        output = await final(there.generate([5, 6, 7] * 40, params))
        left = output.kv_compression
        assert left is not None and left.saved_bytes > 0
        assert left == KVCompressionUsage(16 + 3, 120 - 16, 1, left.saved_bytes)
        assert await there.compact_kv_cache() == 0


async def test_a_front_end_knows_the_length_that_fits(tmp_path: Path) -> None:
    """19 blocks of 16 tokens, besides the null block."""
    options = {"max_model_len": "auto", "num_gpu_blocks_override": 20}
    async with fronted(tmp_path, **options) as (_, (there,)):
        assert there.model_config.max_model_len == 304
        with pytest.raises(ContextLengthExceeded, match="length is 304 tokens"):
            await final(there.generate([5] * 305))


@pytest.mark.parametrize("kind", [EngineCore, RemoteCore, PooledCores])
def test_all_cores_have_what_an_engine_needs(kind: type) -> None:
    members = {name for name in vars(CoreClient) if not name.startswith("_")}
    assert members - set(dir(kind)) <= {"registry"}, "the remote one is an attribute"


async def test_a_process_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fronted(tmp_path) as (server, (there,)):
        me = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: me + 1)
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "engine"))
        writer.write(encode(Hello(1, 1)))
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 300) == b""
        writer.close()
        await there.check_health()
        assert len(server.fronts) == 1


async def test_routed_experts_come_through(tmp_path: Path) -> None:
    """As the engine's own process has them, a whole array."""
    model = str(make_checkpoint("mixtral", tmp_path / "model"))
    options = {
        "model": model, "skip_tokenizer_init": True, "reasoning_parser": None,
        "tool_call_parser": None, "enable_return_routed_experts": True, "max_model_len": 64,
    }  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    async with fronted(tmp_path, **options) as (server, (front,)):
        assert front.info.routed_experts == server.core.info.routed_experts
        remote = await final(front.generate([5, 6, 7], params))
        routed = remote.outputs[0].routed_experts
        assert routed.shape == (7, 3, 2) and routed.dtype == np.uint8
        assert (routed[..., 0] != routed[..., 1]).all()
    async with AsyncEngine(EngineConfig(**{**CONFIG, **options})) as engine:
        own = await final(engine.generate([5, 6, 7], params))
    assert np.array_equal(own.outputs[0].routed_experts, routed)
