"""When blocks run out: prefixes and preempted requests come back from host memory, and caches are
compacted before a request is preempted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from rounded_cache import FORMATS, rounded
from test_kv_compression import config, prompt, run

from jackfield import AsyncEngine, hookimpl
from jackfield.core.errors import ConfigError
from jackfield.core.outputs import EngineStats
from jackfield.core.registry import load_plugins
from jackfield.core.worker.parts.compaction import Compactor
from jackfield.core.worker.parts.part_set import WorkerParts
from jackfield.core.worker.worker import Worker
from jackfield.plugins.kv_connectors.cpu_offload import CpuOffloadConnector

from helpers import at_once, greedy_reference, make_checkpoint, reference_model

OFFLOAD = {
    "kv_connector": "cpu_offload", "kv_connector_extra_config": {"kv_offloading_size": 0.01},
}  # fmt: skip
COMPRESSION = {"kv_compression": "key_norm", "kv_compression_ratio": 0.4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


async def saved(engine: AsyncEngine) -> None:
    """Until transfers have ended."""
    while engine.stats().kv_blocks_used:
        await asyncio.sleep(0.001)


async def outputs(
    folder: Path, prompts: list[list[int]], max_tokens: int, **options: Any
) -> tuple[list[list[int]], EngineStats]:
    """Run prompts together → their tokens, and the engine's statistics."""
    async with AsyncEngine(config(folder, **options)) as engine:
        results = await at_once(engine, *(run(engine, p, max_tokens=max_tokens) for p in prompts))
        engine.core.scheduler.check_invariants()
        await saved(engine)
        return [tokens for (tokens,) in results], engine.stats()


async def test_a_preempted_request_is_restored_and_not_computed_again(folder: Path) -> None:
    """The cache holds little more than one of two: what one has computed is lost to the other."""
    prompts = [prompt(n, n) for n in (36, 40)]
    starved = {"num_gpu_blocks_override": 24}
    whole, _ = await outputs(folder, prompts, 40)
    plain, recomputed = await outputs(folder, prompts, 40, **starved)
    restored, stats = await outputs(folder, prompts, 40, **starved, kv_transfer_config=OFFLOAD)
    assert plain == restored == whole
    assert recomputed.num_preemptions and recomputed.preempted_tokens_recomputed > 20
    assert stats.num_preemptions and stats.external_prefix_cache_hits
    # At most the last block of each, and what steps in flight computed.
    assert stats.preempted_tokens_recomputed <= 8 * stats.num_preemptions
    assert stats.preempted_tokens_restored > 20


@pytest.mark.parametrize(("name", "stored"), [("device_offload", "int8"), ("cpu_offload", "int4")])
async def test_a_cold_prefix_comes_back_from_fewer_bits(
    folder: Path, name: str, stored: str
) -> None:
    """As if its 44 tokens had been rounded after they were computed: dense attention says so."""
    tokens, model = prompt(45), reference_model(folder)
    with torch.no_grad():
        cache = model(torch.tensor([tokens[:44]]), use_cache=True).past_key_values
        for layer in cache.layers:
            layer.keys = rounded(layer.keys, FORMATS[stored][0])
            layer.values = rounded(layer.values, FORMATS[stored][1])
        expected = tokens[44:]
        while len(expected) < 13:
            step = model(torch.tensor([expected[-1:]]), past_key_values=cache, use_cache=True)
            expected.append(int(step.logits[0, -1].argmax()))
    extra = {"kv_offloading_size": 0.01, "kv_offloading_dtype": stored}
    transfer = {"kv_connector": name, "kv_connector_extra_config": extra}
    async with AsyncEngine(config(folder, kv_transfer_config=transfer)) as engine:
        (first,) = await run(engine, tokens, max_tokens=12)
        await saved(engine)
        assert await engine.reset_prefix_cache()
        (again,) = await run(engine, tokens, max_tokens=12)
        assert engine.stats().external_prefix_cache_hits == 44
    assert first == greedy_reference(model, tokens, 12)[0]
    assert again == expected[1:]
    assert stored == "int8" or again != first, "nothing of importance was rounded"


async def test_a_prefix_comes_back_from_the_host_after_its_request_was_compacted(
    folder: Path,
) -> None:
    """All of the prompt was saved before the compaction, and nothing that came after it."""
    options = {**COMPRESSION, "kv_transfer_config": OFFLOAD}
    async with AsyncEngine(config(folder, **COMPRESSION)) as engine:
        expected = await run(engine, prompt(45), max_tokens=24)
    async with AsyncEngine(config(folder, **options)) as engine:
        (first,) = await run(engine, prompt(45), max_tokens=24)
        assert [first] == expected and engine.stats().kv_compactions == 1
        await saved(engine)
        assert await engine.reset_prefix_cache()
        (again,) = await run(engine, prompt(45), max_tokens=24)
        assert again == first and engine.stats().external_prefix_cache_hits == 44
        await saved(engine)
        assert await engine.reset_prefix_cache()
        await run(engine, [*prompt(45), *first])
        assert engine.stats().external_prefix_cache_hits == 44 + 44, "only the prompt was saved"
        assert engine.stats().kv_blocks_returned > 0
        engine.core.scheduler.check_invariants()


async def test_under_pressure_caches_are_compacted_before_one_is_preempted(folder: Path) -> None:
    """With room for all, none is."""
    options = {
        **COMPRESSION, "kv_compression_on_pressure": True, "kv_transfer_config": OFFLOAD,
    }  # fmt: skip
    prompts = [prompt(n, n) for n in (36, 40)]
    results, stats = await outputs(folder, prompts, 30, **options, num_gpu_blocks_override=26)
    assert [len(tokens) for tokens in results] == [30, 30]
    assert stats.kv_compactions
    plain, _ = await outputs(folder, prompts, 30)
    ample, stats = await outputs(folder, prompts, 30, **options)
    assert ample == plain and not stats.kv_compactions


async def test_transfers_of_a_plan_begin_after_its_compactions(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loads may write to blocks that they read."""
    events: list[str] = []

    def noted(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def call(self: Any, *args: Any) -> Any:
            events.append(f"{owner.__name__}.{name}")
            return original(self, *args)

        monkeypatch.setattr(owner, name, call)

    noted(Worker, "step")
    noted(Compactor, "run")
    noted(WorkerParts, "receive")
    await outputs(folder, [prompt(45)], 10, **COMPRESSION, kv_transfer_config=OFFLOAD)
    place = events.index("Compactor.run", events.index("Worker.step"))
    assert events[place - 1 : place + 2] == ["Worker.step", "Compactor.run", "WorkerParts.receive"]


class Older(CpuOffloadConnector):
    """From before there were compactions."""

    compacted_caches = False


class Plugin:
    jackfield_api = 3

    @hookimpl
    def register_kv_connectors(self, registry: Any) -> None:
        registry.add("older", f"{__name__}:Older")


@pytest.mark.parametrize(
    "transfer",
    [
        {"kv_connector": "older"},
        {"kv_connector": "multi",
         "kv_connector_extra_config": {"connectors": [OFFLOAD, {"kv_connector": "older"}]}},
    ],
)  # fmt: skip
async def test_a_connector_that_does_not_know_of_compactions_is_refused(
    folder: Path, transfer: dict[str, Any]
) -> None:
    options = config(folder, kv_transfer_config=transfer, **COMPRESSION)
    with pytest.raises(ConfigError, match="kv_compression: the KV connector 'older'"):
        async with AsyncEngine(options, plugins=load_plugins(extra=[Plugin()])):
            pass
