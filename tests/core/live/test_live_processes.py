"""Pauses and weight updates of engines in other processes, and of several behind one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
from safetensors.torch import load_file

from jackfield import LLM, AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.data_parallel.pooled_cores import PooledCores
from jackfield.core.engine.core import EngineCore
from jackfield.core.errors import Conflict, EnginePaused, InvalidRequest
from jackfield.core.live.engine_jobs import AskLive, BeginUpdate, RollBack
from jackfield.core.outputs import WeightSpan
from jackfield.core.registry import load_plugins
from jackfield.core.remote import processes
from jackfield.core.remote.client import remote_engine
from jackfield.core.remote.server import EngineServer

from helpers import changed_checkpoint, make_checkpoint

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "max_model_len": 64,
    "num_gpu_blocks_override": 64, "max_num_seqs": 4, "block_size": 8,
}  # fmt: skip
PROMPT = list(range(3, 20))
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    old = make_checkpoint("llama", root / "old")
    return old, changed_checkpoint(old, root / "new")


@pytest.fixture(scope="module")
def said(folders: tuple[Path, Path]) -> tuple[list[int], list[int]]:
    """What each checkpoint says, as fresh engines do."""
    answers = []
    for folder in folders:
        with LLM(str(folder), **SETTINGS) as llm:
            [output] = llm.generate(PROMPT, PARAMS, use_tqdm=False)
            answers.append(list(output.outputs[0].token_ids))
    assert answers[0] != answers[1]
    return answers[0], answers[1]


async def tokens(engine: AsyncEngine, **more: Any) -> list[int]:
    async for output in engine.generate(PROMPT, PARAMS, **more):
        last = output
    assert last.error is None
    return list(last.outputs[0].token_ids)


def test_an_llm_takes_other_weights(
    folders: tuple[Path, Path], said: tuple[list[int], list[int]]
) -> None:
    with LLM(str(folders[0]), **SETTINGS) as llm:
        assert llm.weights_version == "default"
        llm.update_weights(load_file(folders[1] / "model.safetensors").items(), version="new")
        [output] = llm.generate(PROMPT, PARAMS, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == said[1]
        assert llm.weights_version == "new"
        llm.sleep()
        assert llm.wake_up()["weights_version"] == "new"
        [output] = llm.generate(PROMPT, PARAMS, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == said[1]


async def test_front_ends_change_the_engine_that_they_share(
    folders: tuple[Path, Path], said: tuple[list[int], list[int]], tmp_path: Path
) -> None:
    config = EngineConfig(model=str(folders[0]), **SETTINGS)
    core = EngineCore(config, load_plugins())
    engine, server = AsyncEngine(config, plugins=core.plugins, core=core), EngineServer(core)
    async with server.listening(tmp_path / "engine"):
        fronts = [remote_engine(config, tmp_path / "engine", front=n)[0] for n in range(2)]
        starting = asyncio.gather(*(front.start() for front in fronts))
        await engine.start()
        server.started()
        await starting
        first, second = fronts
        assert await tokens(second) == said[0]
        await first.pause_generation("abort")
        with pytest.raises(EnginePaused):
            await tokens(second)
        await second.resume_generation()
        update = await first.begin_weight_update()
        with pytest.raises(Conflict, match="in progress"):
            await second.begin_weight_update()
        await update.put(load_file(folders[1] / "model.safetensors").items())
        await update.commit("new")
        async for output in second.generate(PROMPT, PARAMS):
            last = output
        assert list(last.outputs[0].token_ids) == said[1]
        assert last.outputs[0].weight_versions == [WeightSpan("new", 0, 8)]
        for front in fronts:
            await front.stop()
        await engine.stop()


@pytest.fixture
def forked_members() -> Iterator[None]:
    with forked.processes_of(processes):
        yield


async def test_all_members_have_the_same_weights(
    folders: tuple[Path, Path], said: tuple[list[int], list[int]], forked_members: None
) -> None:
    config = EngineConfig(model=str(folders[0]), data_parallel_size=2, **SETTINGS)
    tensors = load_file(folders[1] / "model.safetensors")
    async with AsyncEngine(config) as engine:
        core = engine.core
        assert isinstance(core, PooledCores)

        async def of_each() -> list[list[int]]:
            return [await tokens(engine, data_parallel_rank=rank) for rank in (0, 1)]

        assert (await engine.ask_live(AskLive()))["world_size"] == 2
        await engine.pause_generation()
        with pytest.raises(EnginePaused):
            await tokens(engine)
        await engine.resume_generation()
        # One member has an update of its own: none takes the other one.
        odd = core.members[1]
        await odd.ask_live(BeginUpdate())
        with pytest.raises(Conflict, match="in progress"):
            await engine.update_weights(tensors.items())
        await odd.ask_live(RollBack())
        lacking = [(name, tensor) for name, tensor in tensors.items() if name != NORM]
        with pytest.raises(InvalidRequest, match=NORM):
            await engine.update_weights(lacking)
        assert await of_each() == [said[0]] * 2
        await engine.update_weights(tensors.items(), version="sent")
        assert await of_each() == [said[1]] * 2
        await engine.sleep()
        assert not (await engine.wake_up())["is_sleeping"]
        await engine.update_weights(folders[0], version="read")
        assert await of_each() == [said[0]] * 2
        await engine.update_weights(folders[1], version="read again")
        # A member that starts again reads what the others have.
        process = odd.process
        assert process is not None and process.process is not None
        process.process.kill()
        while not (odd.num_starts == 2 and odd.serves):
            await asyncio.sleep(0.05)
        assert await of_each() == [said[1]] * 2
        assert await engine.weights_version() == "read again"
