"""The hooks of the KV cache, as a plugin of one's own implements them."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from jackfield import AsyncEngine, EngineConfig, SamplingParams, hookimpl
from jackfield.core.cache.events import BlockStored
from jackfield.core.errors import PluginError
from jackfield.core.registry import load_plugins

CONFIG = EngineConfig(device="cpu", block_size=16, max_model_len=256, num_gpu_blocks_override=24)


class Index:
    jackfield_api = 3

    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.cache: Any = None
        self.tokens: list[int] = []

    @hookimpl
    def kv_cache_started(self, cache: Any) -> None:
        if "kv_cache_started" in self.failing:
            raise RuntimeError("no room for an index")
        self.cache = cache

    @hookimpl
    def kv_cache_changed(self, events: Any) -> None:
        if "kv_cache_changed" in self.failing:
            raise RuntimeError("the index is full")
        for event in events:
            if isinstance(event, BlockStored):
                self.tokens += event.token_ids


async def answer(engine: AsyncEngine) -> int:
    async for output in engine.generate([7] * 40, SamplingParams(max_tokens=2, ignore_eos=True)):
        count = len(output.outputs[0].token_ids)
    return count


async def test_a_plugin_follows_the_cache() -> None:
    index = Index()
    async with AsyncEngine(CONFIG, plugins=load_plugins(extra=[index])) as engine:
        assert (index.cache.member, index.cache.block_size, index.cache.num_blocks) == (0, 16, 24)
        assert len(index.cache.groups) == 1 and index.cache.enable_prefix_caching
        assert await answer(engine) == 2
    assert index.tokens == [7] * 32


async def test_a_plugin_that_cannot_follow_stops_the_start() -> None:
    plugins = load_plugins(extra=[Index("kv_cache_started")])
    with pytest.raises(PluginError, match=r"extra-0 .* failed in kv_cache_started: .*no room"):
        await AsyncEngine(CONFIG, plugins=plugins).start()


async def test_a_plugin_that_fails_later_harms_no_request(caplog: Any) -> None:
    plugins = load_plugins(extra=[Index("kv_cache_changed")])
    with caplog.at_level(logging.ERROR):
        async with AsyncEngine(CONFIG, plugins=plugins) as engine:
            assert await answer(engine) == 2
    assert "failed in kv_cache_changed" in caplog.text


def test_these_hooks_are_not_async() -> None:
    class Late:
        jackfield_api = 3

        @hookimpl
        async def kv_cache_changed(self, events: Any) -> None: ...

    with pytest.raises(PluginError, match="nothing awaits this hook: make it `def`"):
        load_plugins(extra=[Late()])
