"""A pause brings the engine to rest; each request learns what becomes of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.engine import quiesce
from jackfield.core.engine.core import EngineCore
from jackfield.core.errors import Conflict, EngineOverloaded, EnginePaused, InvalidRequest
from jackfield.core.live.engine_jobs import AskLive
from jackfield.core.outputs import RequestOutput

from helpers import make_checkpoint

PROMPT = list(range(3, 40))
LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(
        model=str(folder), dtype="float32", device="cpu", skip_tokenizer_init=True,
        max_model_len=128, num_gpu_blocks_override=64, max_num_batched_tokens=24, max_num_seqs=4,
        block_size=8,
    )  # fmt: skip
    async with AsyncEngine(config) as started:
        yield started


async def rest(stream: Any) -> RequestOutput:
    async for output in stream:
        last: RequestOutput = output
    return last


async def finish(engine: AsyncEngine, params: SamplingParams = SHORT) -> RequestOutput:
    return await rest(engine.generate(PROMPT, params))


async def gate_closed(engine: AsyncEngine) -> None:
    while (await engine.ask_live(AskLive()))["mode"] is None:
        await asyncio.sleep(0)


def steps(engine: AsyncEngine) -> int:
    assert isinstance(engine.core, EngineCore)
    return engine.core.scheduler.num_steps


async def test_abort_ends_requests_with_what_they_have(engine: AsyncEngine) -> None:
    stream = engine.generate(PROMPT, LONG)
    await anext(stream)
    assert not await engine.is_paused()
    state = await engine.pause_generation()
    assert state["is_paused"] and state["mode"] == "abort" and await engine.is_paused()
    output = (await rest(stream)).outputs[0]
    assert output.finish_reason == "abort" and 0 < len(output.token_ids) < 60
    with pytest.raises(EnginePaused, match="paused") as caught:
        await finish(engine)
    assert caught.value.status == 503 and caught.value.retry_after
    await engine.resume_generation()
    assert (await finish(engine)).num_cached_tokens == 0, "the cache was forgotten"
    engine.core.check_idle()  # type: ignore[attr-defined]


async def test_wait_lets_requests_run_to_their_end(engine: AsyncEngine) -> None:
    stream = engine.generate(PROMPT, LONG)
    await anext(stream)
    pausing = asyncio.ensure_future(engine.pause_generation("wait", clear_cache=False))
    last = asyncio.ensure_future(rest(stream))
    await gate_closed(engine)
    with pytest.raises(EnginePaused):
        await finish(engine)
    await pausing
    assert len((await last).outputs[0].token_ids) == 60
    await engine.resume_generation()
    assert (await finish(engine)).num_cached_tokens > 0, "the cache was kept"


@pytest.mark.parametrize("clear_cache", [True, False])
async def test_keep_lets_requests_go_on_afterwards(engine: AsyncEngine, clear_cache: bool) -> None:
    want = (await finish(engine, LONG)).outputs[0].token_ids
    stream = engine.generate(PROMPT, LONG)
    await anext(stream)
    await engine.pause_generation("keep", clear_cache=clear_cache)
    before = steps(engine)
    new = asyncio.ensure_future(finish(engine))
    while (await engine.ask_live(AskLive()))["num_requests"] < 2:
        await asyncio.sleep(0)
    assert steps(engine) == before and not new.done(), "a step was launched"
    await engine.resume_generation()
    last, other = await rest(stream), await new
    assert list(last.outputs[0].token_ids) == list(want)
    assert list(other.outputs[0].token_ids) == list(want[:4])
    assert last.timings.num_preemptions == int(clear_cache)
    engine.core.check_idle()  # type: ignore[attr-defined]


async def test_new_requests_wait_in_bounded_number(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quiesce, "MAX_HELD", 3)
    await engine.pause_generation("keep")
    waiting = [asyncio.ensure_future(finish(engine)) for _ in range(3)]
    while (await engine.ask_live(AskLive()))["num_requests"] < 3:
        await asyncio.sleep(0)
    with pytest.raises(EngineOverloaded, match="3 requests have come since"):
        await finish(engine)
    await engine.resume_generation()
    await asyncio.gather(*waiting)


async def test_a_lease_ends_the_pause_of_whoever_is_gone(engine: AsyncEngine) -> None:
    state = await engine.pause_generation("keep", lease=60.0)
    assert 0 < state["lease"] <= 60.0
    with contextlib.suppress(Conflict):  # It may end before the engine is at rest.
        await engine.pause_generation("keep", lease=0.1)
    assert (await finish(engine)).outputs[0].finish_reason == "length"
    assert not await engine.is_paused()
    assert (await engine.pause_generation(lease=None))["lease"] is None
    await engine.resume_generation()


async def test_a_pause_takes_the_place_of_another(engine: AsyncEngine) -> None:
    stream = engine.generate(PROMPT, LONG)
    await anext(stream)
    await engine.pause_generation("keep")
    waiting = asyncio.ensure_future(engine.pause_generation("wait"))
    assert len((await rest(stream)).outputs[0].token_ids) == 60
    await waiting
    kept = engine.generate(PROMPT, LONG)
    await engine.resume_generation()
    await anext(kept)
    await engine.pause_generation("keep")
    await engine.pause_generation("abort")
    assert (await rest(kept)).outputs[0].finish_reason == "abort"


async def test_a_pause_that_waits_can_be_ended(engine: AsyncEngine) -> None:
    stream = engine.generate(PROMPT, LONG)
    await anext(stream)
    pausing = asyncio.ensure_future(engine.pause_generation("wait"))
    await gate_closed(engine)
    await engine.resume_generation()
    with pytest.raises(Conflict, match="ended"):
        await pausing
    assert len((await rest(stream)).outputs[0].token_ids) == 60
    await finish(engine)


@pytest.mark.parametrize(
    ("options", "field"), [({"mode": "stop"}, "mode"), ({"lease": 0.0}, "lease")]
)
async def test_a_pause_that_makes_no_sense_is_refused(
    options: dict[str, Any], field: str, engine: AsyncEngine
) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: ") as caught:
        await engine.pause_generation(**options)
    assert caught.value.param == field
    await finish(engine)


async def test_requests_are_computed_again_to_forget_their_prefixes(engine: AsyncEngine) -> None:
    want = (await finish(engine, LONG)).outputs[0].token_ids
    stream = engine.generate(PROMPT, LONG)
    await anext(stream)
    assert not await engine.reset_prefix_cache()
    assert await engine.reset_prefix_cache(reset_running_requests=True)
    last = await rest(stream)
    assert list(last.outputs[0].token_ids) == list(want)
    assert last.timings.num_preemptions == 1


async def test_a_paused_engine_stops(engine: AsyncEngine) -> None:
    await engine.pause_generation("keep")
    waiting = asyncio.ensure_future(finish(engine))
    while (await engine.ask_live(AskLive()))["num_requests"] < 1:
        await asyncio.sleep(0)
    await engine.stop()
    assert (await waiting).outputs[0].finish_reason == "abort"
