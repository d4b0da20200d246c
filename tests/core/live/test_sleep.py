"""An engine that sleeps gives memory back, and says the same when it wakes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rank_executor import Plugin
from safetensors.torch import load_file

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import Conflict, EnginePaused, InvalidRequest
from jackfield.core.live.engine_jobs import ReportMemoryUse, ResetPrefixCache, Sleep, WakeUp
from jackfield.core.registry import load_plugins

from helpers import changed_checkpoint, make_checkpoint

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "max_model_len": 96,
    "max_num_batched_tokens": 32, "max_num_seqs": 4, "block_size": 8,
    "num_gpu_blocks_override": 16384,
}  # fmt: skip
MIB = 1 << 20
PROMPT = list(range(3, 30))
PARAMS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    old = make_checkpoint("llama", root / "old")
    return old, changed_checkpoint(old, root / "new")


@pytest.fixture
async def engine(folders: tuple[Path, Path]) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(model=str(folders[0]), **SETTINGS)
    async with AsyncEngine(config) as started:
        yield started


async def said(engine: AsyncEngine) -> list[int]:
    async for output in engine.generate(PROMPT, PARAMS):
        last = output
    assert last.error is None
    return list(last.outputs[0].token_ids)


def resident(engine: AsyncEngine) -> int:
    """Bytes that this process has, as another one sees it."""
    import os

    script = f"print(open('/proc/{os.getpid()}/statm').read().split()[1])"
    pages = subprocess.run(
        [sys.executable, "-S", "-c", script], capture_output=True, check=True, text=True
    )
    return int(pages.stdout) * 4096


def fill_cache(engine: AsyncEngine) -> int:
    """Write all of the cache, as much traffic would. Return its bytes."""
    worker = engine.core.executor._worker  # type: ignore[attr-defined]
    storages = worker._weights.memory._storages["kv_cache"]
    for storage in storages:
        storage.fill_(1)
    return sum(storage.nbytes() for storage in storages)


def owners(answer: dict[str, Any]) -> dict[str, tuple[int, str]]:
    return {each["owner"]: (each["nbytes"], each["where"]) for each in answer["memory"]}


@pytest.mark.parametrize("level", [1, 2])
async def test_memory_is_returned_and_the_same_is_said(level: int, engine: AsyncEngine) -> None:
    want = await said(engine)
    size = fill_cache(engine)
    assert size > 40 * MIB
    before = resident(engine)
    answer = await engine.sleep(level)
    after = resident(engine)
    assert before - after > 0.9 * size
    assert answer["freed_bytes"] > 0.99 * size and answer["is_sleeping"]
    weights, where = owners(answer)["weights"]
    assert weights > 400_000 and where == ("released" if level == 2 else "cpu")
    assert owners(answer)["kv_cache"] == (size, "released")
    with pytest.raises(EnginePaused):
        await said(engine)
    answer = await engine.wake_up()
    assert not answer["is_sleeping"] and owners(answer)["kv_cache"] == (size, "cpu")
    assert await said(engine) == want
    engine.core.check_idle()  # type: ignore[attr-defined]


async def test_weights_and_caches_wake_one_after_the_other(
    engine: AsyncEngine, folders: tuple[Path, Path]
) -> None:
    """As trainers do: first the weights, which are sent, and then the cache."""
    async with AsyncEngine(EngineConfig(model=str(folders[1]), **SETTINGS)) as fresh:
        want = await said(fresh)
    await engine.sleep(2)
    with pytest.raises(Conflict, match="the weights are asleep"):
        await engine.begin_weight_update()
    answer = await engine.wake_up(["weights"])
    assert answer["is_sleeping"] and answer["asleep"] == ["kv_cache"]
    with pytest.raises(EnginePaused):
        await said(engine)
    tensors = load_file(folders[1] / "model.safetensors")
    await engine.update_weights(tensors.items(), version="sent")
    forgotten = await engine.ask_live(ResetPrefixCache(reset_running_requests=True))
    assert forgotten["success"], "the sleep has done it"
    answer = await engine.wake_up(["kv_cache"])
    assert not answer["is_sleeping"] and answer["weights_version"] == "sent"
    assert await said(engine) == want
    # They were sent: nothing can read them again.
    await engine.sleep(2)
    with pytest.raises(Conflict, match="had been sent"):
        await engine.wake_up()
    await engine.wake_up(["weights"])
    with pytest.raises(Conflict, match="had been sent"):
        await engine.wake_up(["kv_cache"])
    await engine.update_weights(folders[1], version="read")
    await engine.wake_up()
    assert await said(engine) == want
    await engine.sleep(2)
    assert (await engine.wake_up())["weights_version"] == "read"
    assert await said(engine) == want


async def test_requests_are_kept_over_a_sleep(engine: AsyncEngine) -> None:
    want = await said(engine)
    stream = engine.generate(PROMPT, PARAMS)
    await anext(stream)
    await engine.sleep(2, mode="keep")
    new = asyncio.ensure_future(said(engine))
    await engine.wake_up()
    async for output in stream:
        last = output
    assert list(last.outputs[0].token_ids) == want == await new
    engine.core.check_idle()  # type: ignore[attr-defined]


async def test_what_makes_no_sense_is_refused(
    engine: AsyncEngine, folders: tuple[Path, Path]
) -> None:
    want = await said(engine)
    for job, error, message in (
        (Sleep(tags=("weights",)), InvalidRequest, "nothing can be freed"),
        (Sleep(tags=("graphs",)), InvalidRequest, "^tags: must be of weights and kv_cache"),
        (Sleep(level=3), InvalidRequest, "^level: "),
        (WakeUp(tags=()), InvalidRequest, "^tags: "),
    ):
        with pytest.raises(error, match=message):
            await engine.ask_live(job)
        assert await said(engine) == want
    async with await engine.begin_weight_update():
        with pytest.raises(Conflict, match="a weight update is in progress"):
            await engine.sleep()
    assert not (await engine.wake_up())["is_sleeping"], "it was awake"
    await engine.sleep()
    for call in (engine.sleep(), engine.resume_generation(), engine.pause_generation("keep")):
        with pytest.raises(Conflict, match="the engine sleeps"):
            await call
    await engine.wake_up()
    assert await said(engine) == want


async def test_a_pause_from_before_lasts(engine: AsyncEngine) -> None:
    await engine.pause_generation()
    await engine.sleep()
    await engine.wake_up()
    assert await engine.is_paused()
    await engine.resume_generation()
    await said(engine)


async def test_an_engine_that_sleeps_is_stopped(engine: AsyncEngine) -> None:
    await engine.sleep(2)
    await engine.stop()


async def test_ranks_sleep_together(folders: tuple[Path, Path]) -> None:
    config = EngineConfig(
        model=str(folders[0]), **SETTINGS, tensor_parallel_size=2, executor="rank_threads"
    )
    async with AsyncEngine(config, plugins=load_plugins(extra=[Plugin()])) as engine:
        want = await said(engine)
        await engine.sleep(2)
        await engine.wake_up()
        assert await said(engine) == want
        memory = owners(await engine.ask_live(ReportMemoryUse()))
        assert memory["weights"][1] == memory["kv_cache"][1] == "cpu"
