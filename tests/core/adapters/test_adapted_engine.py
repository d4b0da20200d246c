"""Adapters of a whole engine: preemption, prefix hits, reloads, activation, processes."""

from __future__ import annotations

import asyncio
import random
import re
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from adapters_made import LINEAR, adapted_model, make_adapter

from jackfield import LLM, AsyncEngine, EngineConfig, LoRARequest, PoolingParams, SamplingParams
from jackfield.core.data_parallel.pooled_cores import PooledCores
from jackfield.core.engine.core import EngineCore
from jackfield.core.errors import ConfigError, InvalidRequest, ModelNotFound
from jackfield.core.lora_request import AdapterRef
from jackfield.core.registry import load_plugins
from jackfield.core.remote import processes
from jackfield.core.remote.client import remote_engine
from jackfield.core.remote.server import EngineServer
from jackfield.core.step import StepPlan
from jackfield.core.worker.runner import ModelRunner
from jackfield.lora.request import LoRARequest as AtVllmsPlace

from helpers import VOCAB, make_checkpoint, reference_model

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "max_model_len": 128,
    "num_gpu_blocks_override": 64, "max_num_batched_tokens": 24, "enable_lora": True,
    "max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 4, "lora_max_wait_steps": 10,
}  # fmt: skip
INVOCATION = [7, 11]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def paths(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("adapters")
    return {
        name: make_adapter(folder, made / name, seed=seed, target_modules=LINEAR, **settings)
        for seed, (name, settings) in enumerate(
            {
                "a": {},
                "b": {"r": 8},
                "c": {"use_dora": True},
                "d": {"r": 1},
                "activated": {"alora_invocation_tokens": INVOCATION},
            }.items()
        )
    }  # fmt: skip


@pytest.fixture(scope="module")
def references(folder: Path, paths: dict[str, Path]) -> Any:
    @cache
    def model(name: str | None) -> Any:
        return reference_model(folder) if name is None else adapted_model(folder, paths[name])

    return model


def greedy(model: Any, prompt: list[int], count: int, **more: Any) -> list[int]:
    """The reference's tokens, without a cache."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([tokens]), **more).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


async def complete(
    engine: AsyncEngine, prompt: list[int], count: int = 6, **adapter: Any
) -> tuple[list[int], int]:
    """Return the tokens, and how many tokens of the prompt were cached."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    async for output in engine.generate(prompt, params, **adapter):
        last = output
    return list(last.outputs[0].token_ids), last.num_cached_tokens


def prompts(seed: int, count: int, longest: int = 40) -> list[list[int]]:
    draw = random.Random(seed)
    common = [draw.randrange(20, VOCAB) for _ in range(longest)]
    return [
        common[: draw.randrange(1, longest)]
        + [draw.randrange(20, VOCAB) for _ in range(draw.randrange(1, 9))]
        for _ in range(count)
    ]


def length(number: int) -> int:
    return 4 + number * 7 % 30


async def test_random_traffic_gives_each_request_its_adapters_tokens(
    folder: Path, paths: dict[str, Path], references: Any
) -> None:
    """Two of four adapters at once, few blocks, prompts that have much in common."""
    draw = random.Random(3)
    jobs = [(prompt, draw.choice([None, "a", "b", "c", "d"])) for prompt in prompts(1, 20)]
    config = EngineConfig(
        model=str(folder), **{**SETTINGS, "num_gpu_blocks_override": 12, "max_num_seqs": 6}
    )
    turns = asyncio.Semaphore(9)
    async with AsyncEngine(config) as engine:

        async def one(number: int) -> list[int]:
            prompt, name = jobs[number]
            lora = None if name is None else LoRARequest(name, ord(name), str(paths[name]))
            if number % 9 == 8:  # Some leave early.
                asyncio.get_running_loop().call_later(0.02, tasks[number].cancel)
            async with turns:
                return (await complete(engine, prompt, length(number), lora_request=lora))[0]

        tasks = [asyncio.ensure_future(one(number)) for number in range(len(jobs))]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        stats = engine.stats()
        assert isinstance(engine.core, EngineCore)
        engine.core.check_idle()
        engine.core.scheduler.check_invariants()
    assert stats.num_preemptions and stats.prefix_cache_hits
    assert stats.part_counts["adapters.loads"] > 4, "nothing was loaded twice"
    for number, (result, (prompt, name)) in enumerate(zip(results, jobs, strict=True)):
        if not isinstance(result, asyncio.CancelledError):
            assert result == greedy(references(name), prompt, length(number)), (number, name)


async def test_a_reload_never_finds_the_old_cache(
    folder: Path, paths: dict[str, Path], references: Any, tmp_path: Path
) -> None:
    place, prompt = tmp_path / "served", prompts(2, 1)[0] * 2
    shutil.copytree(paths["a"], place)
    async with AsyncEngine(EngineConfig(model=str(folder), **SETTINGS)) as engine:
        first = await engine.add_lora(LoRARequest("x", 1, str(place)))
        assert await complete(engine, prompt, adapter="x") == (
            greedy(references("a"), prompt, 6), 0,
        )  # fmt: skip
        running = asyncio.ensure_future(complete(engine, prompt, 30, adapter="x"))
        while not engine.stats().num_requests_running:
            await asyncio.sleep(0)
        shutil.rmtree(place)
        shutil.copytree(paths["b"], place)
        second = await engine.add_lora(LoRARequest("x", 1, str(place), load_inplace=True))
        assert first.digest != second.digest
        tokens, num_cached = await complete(engine, prompt, adapter="x")
        assert (tokens, num_cached) == (greedy(references("b"), prompt, 6), 0)
        assert (await running)[0] == greedy(references("a"), prompt, 30)
        # Equal content under another name finds it.
        await engine.add_lora(LoRARequest("y", 2, str(paths["b"])))
        tokens, num_cached = await complete(engine, prompt, adapter="y")
        assert tokens == greedy(references("b"), prompt, 6) and num_cached > 0
        assert await engine.remove_lora(1) and not await engine.remove_lora("x")
        with pytest.raises(ModelNotFound):
            await complete(engine, prompt, adapter="x")
        assert [card.name for card in await engine.list_loras()] == ["y"]


async def test_an_activated_adapter_shares_what_is_before_with_the_base_model(
    folder: Path, paths: dict[str, Path], references: Any
) -> None:
    head = prompts(4, 1)[0] + [20] * 40
    wholes = [
        [*head, *INVOCATION, 30, 31],
        [*INVOCATION, *head[:30], *INVOCATION, 32],
        [*head, 30],
        [*head[:15], *INVOCATION, *head[15:]],
    ]
    model = references("activated")
    async with AsyncEngine(EngineConfig(model=str(folder), **SETTINGS)) as engine:
        base, _ = await complete(engine, head)
        assert base == greedy(references(None), head, 6)
        lora = LoRARequest("activated", 5, str(paths["activated"]))
        cached = []
        for prompt in wholes:
            tokens, num_cached = await complete(engine, prompt, lora_request=lora)
            cached.append(num_cached)
            offset = model.generate(
                torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=-1,
                pad_token_id=0,
            )  # fmt: skip
            assert tokens == offset[0, len(prompt) :].tolist()
    size = engine.config.block_size
    assert cached == [len(head) // size * size, 0, len(head) // size * size, 0]


async def test_every_front_end_and_the_engine_know_the_same_adapters(
    folder: Path, paths: dict[str, Path], references: Any, tmp_path: Path
) -> None:
    config = EngineConfig(model=str(folder), **SETTINGS)
    core = EngineCore(config, load_plugins())
    engine, server = AsyncEngine(config, plugins=core.plugins, core=core), EngineServer(core)
    prompt = prompts(5, 1)[0]
    async with server.listening(tmp_path / "engine"):
        fronts = [remote_engine(config, tmp_path / "engine", front=n)[0] for n in range(2)]
        starting = asyncio.gather(*(front.start() for front in fronts))
        await engine.start()
        server.started()
        await starting
        first, second = fronts
        card = await first.add_lora(LoRARequest("x", 1, str(paths["a"])), pinned=True, owner="one")
        [seen] = await second.list_loras()
        assert (await second.find_adapter(AdapterRef("x", tenant="one"))).digest == card.digest
        with pytest.raises(ModelNotFound, match="'x' is not served here"):
            await first.find_adapter(AdapterRef("x", tenant="two"))
        assert card.pinned and (seen.digest, seen.owner) == (card.digest, "one")
        ref = AdapterRef("x", tenant="one")
        tokens, _ = await complete(second, prompt, adapter=ref)
        assert tokens == greedy(references("a"), prompt, 6)
        with pytest.raises(ModelNotFound, match="'x' is not served here"):
            await complete(second, prompt, adapter=AdapterRef("x", tenant="two"))
        with pytest.raises(InvalidRequest, match="no adapter is at"):
            await second.add_lora(LoRARequest("y", 2, str(tmp_path / "none")))
        text = (await engine.render_metrics()).decode()
        assert re.search(r"^jackfield:lora_resident{[^}]*} 1\.0$", text, re.M)
        # A tenant's adapter is not named to whoever reads metrics.
        assert '"x"' not in text
        assert await second.pin_lora("x", pinned=False) and await second.remove_lora("x")
        assert await first.list_loras() == []
        for front in fronts:
            await front.stop()
        await engine.stop()


@pytest.fixture
def forked_members() -> Iterator[None]:
    with forked.processes_of(processes):
        yield


async def test_all_members_have_an_adapter_or_none(
    folder: Path, paths: dict[str, Path], references: Any, tmp_path: Path, forked_members: None
) -> None:
    config = EngineConfig(model=str(folder), data_parallel_size=2, **SETTINGS)
    prompt = prompts(6, 1)[0]
    async with AsyncEngine(config) as engine:
        core = engine.core
        assert isinstance(core, PooledCores)
        await engine.add_lora(LoRARequest("x", 1, str(paths["a"])))
        expected = greedy(references("a"), prompt, 6)
        for rank in (0, 1):
            tokens, _ = await complete(engine, prompt, adapter="x", data_parallel_rank=rank)
            assert tokens == expected
        assert (await engine.find_adapter(AdapterRef("x", tenant="one"))).name == "x"
        with pytest.raises(ModelNotFound):
            await engine.find_adapter(AdapterRef("x", tenant="one", shared=False))
        # One member has an adapter of that name from elsewhere: the load fails there, and is
        # undone at the other.
        odd = core.members[1]
        await odd.ask_adapters(_load("y", paths["b"]))
        with pytest.raises(InvalidRequest, match="loaded already"):
            await engine.add_lora(LoRARequest("y", 2, str(paths["b"])))
        with pytest.raises(ModelNotFound):
            await complete(engine, prompt, adapter="y", data_parallel_rank=0)
        # A member that starts again has what the others have.
        process = odd.process
        assert process is not None and process.process is not None
        process.process.kill()
        while not (odd.num_starts == 2 and odd.serves):
            await asyncio.sleep(0.05)
        tokens, _ = await complete(engine, prompt, adapter="x", data_parallel_rank=1)
        assert tokens == expected
        assert await engine.remove_lora("x")
        assert await engine.list_loras() == []


def _load(name: str, path: Path) -> Any:
    from jackfield.core.lora_request import LoadAdapter

    return LoadAdapter(name=name, path=str(path))


def test_an_llm_takes_one_adapter_or_one_for_each_prompt(
    folder: Path, paths: dict[str, Path], references: Any
) -> None:
    assert AtVllmsPlace is LoRARequest
    with pytest.raises(ValueError, match="lora_int_id"):
        LoRARequest("x", 0, "path")
    two = prompts(7, 2)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    lora = LoRARequest("a", 1, str(paths["a"]))
    settings = {**SETTINGS, "lora_modules": (f"b={paths['b']}",)}
    with LLM(str(folder), **settings) as llm:
        for loras, names in ((lora, "aa"), ([None, lora], ".a"), ([LoRARequest("b", 2)] * 2, "bb")):
            outputs = llm.generate(two, params, lora_request=loras, use_tqdm=False)
            for prompt, output, name in zip(two, outputs, names, strict=True):
                model = references(None if name == "." else name)
                assert list(output.outputs[0].token_ids) == greedy(model, prompt, 4)
        with pytest.raises(InvalidRequest, match="lora_request: 1 given for 2 prompts"):
            llm.generate(two, params, lora_request=[lora], use_tqdm=False)
        with pytest.raises(InvalidRequest, match="must be a LoRARequest"):
            llm.generate(two, params, lora_request=["a", "b"], use_tqdm=False)  # type: ignore
    with LLM(str(folder), **{**SETTINGS, "enable_lora": False}) as llm:
        with pytest.raises(InvalidRequest, match="enable_lora"):
            llm.generate(two, params, lora_request=lora, use_tqdm=False)


async def test_a_step_that_failed_has_loaded_nothing(
    folder: Path, paths: dict[str, Path], references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = ModelRunner.launch
    failures = iter([True])

    def failing(runner: ModelRunner, plan: StepPlan, *beside: Any) -> Any:
        if plan.slots and "adapters" in plan.parts and next(failures, False):
            raise RuntimeError("no luck")  # Before anything of it has happened.
        return launch(runner, plan, *beside)

    monkeypatch.setattr(ModelRunner, "launch", failing)
    prompt = prompts(9, 1)[0]
    async with AsyncEngine(EngineConfig(model=str(folder), **SETTINGS)) as engine:
        for name in "ab":
            await loaded(engine, name, paths)
        assert (await complete(engine, prompt, adapter="a"))[0] == []
        for name in "ab":
            tokens, _ = await complete(engine, prompt, adapter=name)
            assert tokens == greedy(references(name), prompt, 6)
        assert engine.stats().part_counts["adapters.loads"] == 3


async def test_a_module_that_cannot_be_served_stops_the_start(folder: Path) -> None:
    engine = AsyncEngine(
        EngineConfig(model=str(folder), **SETTINGS, lora_modules=("x=/no such place",))
    )
    before = asyncio.all_tasks()
    with pytest.raises(ConfigError, match="lora_modules: 'x': lora_path: no adapter is at"):
        await engine.start()
    assert asyncio.all_tasks() == before


async def test_a_pooling_model_has_adapters_too(folder: Path, paths: dict[str, Path]) -> None:
    config = EngineConfig(model=str(folder), runner="pooling", **SETTINGS)
    prompt = prompts(8, 1)[0]
    async with AsyncEngine(config) as engine:
        vectors = [
            (await engine.encode(prompt, PoolingParams(normalize=False), adapter=name)).outputs
            for name in [None, *[await loaded(engine, name, paths) for name in "ab"]]
        ]
    model = adapted_model(folder, paths["b"])
    with torch.no_grad():
        states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(
        torch.tensor(vectors[2].data), states[0, -1].float(), atol=1e-4, rtol=1e-4
    )
    assert not torch.equal(torch.tensor(vectors[0].data), torch.tensor(vectors[1].data))


async def loaded(engine: AsyncEngine, name: str, paths: dict[str, Path]) -> str:
    await engine.add_lora(LoRARequest(name, ord(name), str(paths[name])))
    return name
