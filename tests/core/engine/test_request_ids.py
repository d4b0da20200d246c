"""What callers call their requests shares no namespace with what the engine calls them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jackfield import LLM, AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.engine.output_stream import OutputStream
from jackfield.core.errors import InvalidRequest, PluginError, RequestFailed
from jackfield.core.hooks import hookimpl
from jackfield.core.registry import Plugins, Provenance, load_plugins
from jackfield.core.request import Request
from jackfield.core.sampling_params import StructuredOutputsParams

from helpers import make_checkpoint

PROMPT = [5, 6, 7, 8, 9, 10, 11]
NAMES = ("job", "job#0", "job#1", "job#1#0", "job-0", "job-1", "#0")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


def config(checkpoint: Path, **options: Any) -> EngineConfig:
    return EngineConfig(
        **{
            "model": str(checkpoint),
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "max_model_len": 128,
            "max_num_seqs": 4,
            "num_gpu_blocks_override": 60,
            "attention_backend": "torch",
            **options,
        }
    )


async def final(stream: Any) -> Any:
    outputs = [output async for output in stream]
    return outputs[-1] if outputs else None


def test_mistyped_options_are_refused_at_the_call() -> None:
    engine: Any = AsyncEngine(EngineConfig(), plugins=Plugins())
    for method in (engine.generate, engine.chat, engine.encode, engine.session):
        with pytest.raises(TypeError, match="'requestid'"):
            method([], requestid="job")


async def test_a_caller_may_name_what_a_completion_of_many_might_be_called(
    checkpoint: Path,
) -> None:
    async with AsyncEngine(config(checkpoint)) as engine:
        long = SamplingParams(max_tokens=40, ignore_eos=True)
        outputs = await asyncio.gather(
            *(final(engine.generate(PROMPT, long, request_id=name)) for name in NAMES[1:]),
            final(
                engine.generate(
                    PROMPT, SamplingParams(max_tokens=9, n=3, ignore_eos=True), request_id="job"
                )
            ),
        )
        assert [output.request_id for output in outputs] == [*NAMES[1:], "job"]
        for output in outputs[:-1]:
            assert len(output.outputs[0].token_ids) == 40
        assert [len(c.token_ids) for c in outputs[-1].outputs] == [9, 9, 9]
        assert engine.core.requests.idle.is_set()


async def test_one_of_two_requests_that_begin_at_once_under_one_id_is_refused() -> None:
    """Both are open by the time that their grammars compile."""
    embedded = EngineConfig(
        attention_backend="torch", max_model_len=128, num_gpu_blocks_override=60
    )
    async with AsyncEngine(embedded) as engine:
        params = [
            SamplingParams(structured_outputs=StructuredOutputsParams(regex=f"{letter}{{3}}"))
            for letter in "ab"
        ]
        results = await asyncio.gather(
            *(final(engine.generate("x", each, request_id="same")) for each in params),
            return_exceptions=True,
        )
        (refused,) = (result for result in results if isinstance(result, BaseException))
        assert isinstance(refused, InvalidRequest) and refused.param == "request_id"
        (output,) = (result for result in results if result is not refused)
        assert output.outputs[0].text == "ab"[results.index(output)] * 3
        engine.core.outputs.check_idle()


def test_any_traffic_under_colliding_names_ends_and_leaves_nothing_in_use(
    checkpoint: Path,
) -> None:
    actions = st.lists(
        st.tuples(
            st.sampled_from(["add", "add", "abort", "finish", "break", "turn"]),
            st.sampled_from(NAMES),
            st.integers(1, 3),
            st.integers(1, 30),
        ),
        min_size=1,
        max_size=25,
    )
    runner = asyncio.Runner()
    engine = AsyncEngine(config(checkpoint))
    runner.run(engine.start())

    async def play(moves: list[tuple[str, str, int, int]]) -> None:
        live: dict[str, OutputStream] = {}
        for move, name, n, tokens in moves:
            if move == "add":
                params = SamplingParams(max_tokens=tokens, n=n, ignore_eos=True)
                stream = engine.generate(PROMPT, params, request_id=name)
                if name in engine.core.requests.states:
                    with pytest.raises(InvalidRequest) as caught:
                        await stream.admit()
                    assert caught.value.param == "request_id"
                    assert live[name] is not stream
                else:
                    await stream.admit()
                    live[name] = stream
            elif move == "abort":
                in_use = name in engine.core.requests.states
                assert await engine.abort(name) == in_use
            elif move == "finish" and name in live:
                output = await final(live.pop(name))
                assert output is None or output.finished
            elif move == "break" and name in live:
                await live.pop(name).aclose()
            else:
                await asyncio.sleep(0)
        for name, stream in live.items():
            output = await final(stream)
            assert output.finished and output.request_id == name
        assert engine.core.requests.idle.is_set() and not engine.core.requests.states
        assert not engine.core.outputs._owners and not engine.core.scheduler.requests.by_id
        assert engine.stats().kv_blocks_used == 0
        engine.core.scheduler.check_invariants()

    @settings(
        max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
    )
    @given(actions)
    def traffic(moves: list[tuple[str, str, int, int]]) -> None:
        runner.run(asyncio.wait_for(play(moves), 300))

    try:
        traffic()
    finally:
        runner.run(engine.stop())
        runner.close()


class Shortest:
    """A policy that fails on some prompts."""

    def key(self, request: Request) -> Any:
        if request.prompt_token_ids[0] == 9:
            raise LookupError("no length is known")
        return [1] if request.prompt_token_ids[0] == 8 else (request.num_prompt_tokens,)


class Unmakeable:
    def __init__(self) -> None:
        raise OSError("no table of lengths")

    def key(self, request: Any) -> tuple[int]:
        return (0,)


class Policies:
    @hookimpl
    def register_schedule_policies(self, registry: Any) -> None:
        registry.add("shortest", Shortest)
        registry.add("unmakeable", Unmakeable)


def with_policies() -> Any:
    plugins = load_plugins()
    plugins.add_plugin(Policies(), Provenance("acme-policies", "1.2", "acme"))
    return plugins


async def test_a_policy_that_fails_costs_its_own_request_alone(checkpoint: Path) -> None:
    engine = AsyncEngine(config(checkpoint, scheduling_policy="shortest"), plugins=with_policies())
    async with engine:
        long = SamplingParams(max_tokens=90, ignore_eos=True)
        waiting = [engine.generate(PROMPT, long, request_id=f"w{i}") for i in range(8)]
        for stream in waiting:
            await stream.admit()
        for token in (8, 9):
            for n in (1, 2):
                with pytest.raises(RequestFailed, match=r"'shortest' of acme-policies 1\.2"):
                    params = SamplingParams(max_tokens=5, n=n)
                    await final(engine.generate([token] * 9, params, request_id="ghost"))
        assert not await engine.abort("ghost")
        for output in await asyncio.gather(*map(final, waiting)):
            assert len(output.outputs[0].token_ids) == 90
        assert engine.core.requests.idle.is_set()


async def test_a_policy_that_cannot_be_made_stops_the_start_and_is_named(checkpoint: Path) -> None:
    plugins = with_policies()
    engine = AsyncEngine(config(checkpoint, scheduling_policy="unmakeable"), plugins=plugins)
    with pytest.raises(PluginError, match=r"acme-policies 1\.2 .*no table of lengths"):
        await engine.start()
    assert engine.core.executor._thread is None  # type: ignore[attr-defined]
    await engine.stop()


def test_the_synchronous_face_shows_the_policys_error(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "jackfield.core.engine.async_engine.load_plugins", lambda **_: with_policies()
    )
    options = {
        "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128,
        "num_gpu_blocks_override": 60, "attention_backend": "torch",
        "scheduling_policy": "shortest",
    }  # fmt: skip
    llm = LLM(str(checkpoint), **options)
    with pytest.raises(RequestFailed, match="no length is known"):
        with llm:
            llm.generate([[9, 9, 9]], SamplingParams(max_tokens=3), use_tqdm=False)
    assert not llm._thread.is_alive()
