"""Parts from outside that raise: in one row's result, and where they decide about all requests."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from mutants import plugin_of

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import ConfigError, EngineStopped
from jackfield.core.hook_versions import API_VERSION
from jackfield.core.hooks import hookimpl
from jackfield.core.protocols import PartSetup, StepPart
from jackfield.core.registry import Plugins, load_plugins
from jackfield.core.request import Request
from jackfield.core.scheduling.parts.part import PartServices, SchedulerPart
from jackfield.plugins.executors.inprocess import InProcessExecutor

PROMPT = list(range(5, 22))
MARKED = SamplingParams(max_tokens=12, ignore_eos=True, extra_args={"fragile": True}, seed=4)
PLAIN = SamplingParams(max_tokens=12, ignore_eos=True, seed=4)


def marked(request: Request) -> bool:
    return bool((request.params.extra_args or {}).get("fragile"))


class Fragile(SchedulerPart):
    """Raises in one method once a marked request is there."""

    name = "fragile"

    def __init__(self, services: PartServices) -> None:
        self.services = services

    @property
    def provoked(self) -> bool:
        return any(marked(request) for request in self.services.requests.by_id.values())


def fragile(method: str) -> type[StepPart]:
    def raising(part: Fragile, *arguments: Any) -> Any:
        requests = [each for each in arguments if isinstance(each, Request)]
        if any(map(marked, requests)) if requests else part.provoked:
            raise ArithmeticError(f"no {method}")
        default = getattr(SchedulerPart, method)
        return default(part, *arguments)

    half = type("Half", (Fragile,), {method: raising})

    class Part(StepPart):
        parameters = frozenset({"fragile"})

        @classmethod
        def scheduler_part(cls, setup: PartSetup, services: PartServices) -> SchedulerPart:
            return half(services)

    return Part


def plugins_with(part: type[StepPart]) -> Plugins:
    plugin = ModuleType(__name__)

    def register(registry: Any) -> None:
        registry.add("fragile", part)

    plugin.register_parts = hookimpl(register)  # type: ignore[attr-defined]
    register.__name__ = "register_parts"
    plugin.jackfield_api = API_VERSION  # type: ignore[attr-defined]
    return load_plugins(extra=(plugin,))


def engine_with(method: str) -> AsyncEngine:
    config = EngineConfig(
        device="cpu", dtype="float32", block_size=4, max_model_len=64, max_num_seqs=4,
        num_gpu_blocks_override=80, attention_backend="torch", parts={"fragile": {}},
    )  # fmt: skip
    return AsyncEngine(config, plugins=plugins_with(fragile(method)))


async def final(stream: Any) -> Any:
    return [output async for output in stream][-1]


@pytest.mark.parametrize("method", ["settle", "kept"])
async def test_an_error_in_the_result_of_a_row_ends_its_request_alone(method: str) -> None:
    async with engine_with(method) as engine:
        alone = (await final(engine.generate(PROMPT, PLAIN))).outputs[0].token_ids
        calls = [engine.generate(PROMPT, params) for params in (PLAIN, MARKED, PLAIN)]
        first, failed, last = await asyncio.gather(*map(final, calls))
        assert first.outputs[0].token_ids == last.outputs[0].token_ids == alone
        assert failed.outputs[0].finish_reason == "error"
        assert f"ArithmeticError: no {method}" in failed.error
        assert "'fragile'" in failed.error, "the part is not named"
        engine.core.outputs.check_idle()  # type: ignore[attr-defined]
        assert engine.healthy


async def test_an_error_after_a_request_s_last_token_is_its_own() -> None:
    async with engine_with("kept") as engine:
        params = msgspec.structs.replace(MARKED, max_tokens=1)
        output = await final(engine.generate(PROMPT, params))
        assert output.outputs[0].finish_reason == "error"
        assert "ArithmeticError: no kept" in output.error
        assert (await final(engine.generate(PROMPT, PLAIN))).error is None
        engine.core.outputs.check_idle()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "method",
    ["added", "begin_plan", "plan_part", "readiness", "admit", "leave", "ended", "begin_result"],
)
async def test_an_error_about_all_requests_ends_the_engine_with_the_part_s_name(
    method: str,
) -> None:
    async with engine_with(method) as engine:
        stream = engine.generate(PROMPT, PLAIN)
        await anext(stream)
        ending = asyncio.ensure_future(final(stream))
        marked = engine.generate(PROMPT, MARKED)
        if method == "added":
            with pytest.raises(ArithmeticError):
                await final(marked)
        else:
            assert "'fragile'" in ((await final(marked)).error or "")
        output = await ending
        # The other may have had its last token by then.
        assert output.error is None or "ArithmeticError" in output.error
        while engine.dead_reason is None:
            await asyncio.sleep(0)
        assert "'fragile'" in engine.dead_reason and f"no {method}" in engine.dead_reason
        with pytest.raises(EngineStopped, match="'fragile'"):
            await final(engine.generate(PROMPT, PLAIN))


async def test_an_error_at_an_abort_ends_the_engine() -> None:
    async with engine_with("leave") as engine:
        params = SamplingParams(max_tokens=40, ignore_eos=True, extra_args={"fragile": True})
        other = engine.generate(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True))
        stream = engine.generate(PROMPT, params, request_id="a")
        await anext(stream)
        await anext(other)
        with pytest.raises(ArithmeticError):
            await engine.abort("a")
        assert "ArithmeticError: no leave" in (await final(other)).error
        assert (await final(stream)).error
        assert "'fragile'" in (engine.dead_reason or "")


async def test_a_start_that_fails_ends_after_the_device_is_ready(tmp_path: Path) -> None:
    """Or the next start would meet the last one's."""
    ready = threading.Event()

    class SlowDevice(InProcessExecutor):
        @classmethod
        def initialize_device(cls, config: EngineConfig, plugins: Plugins) -> None:
            assert ready.wait(60)

    plugins = load_plugins(extra=[plugin_of("executor", "slow_device", SlowDevice)])
    config = EngineConfig(model=str(tmp_path), device="cpu", executor="slow_device")
    start = asyncio.create_task(AsyncEngine(config, plugins=plugins).start())
    try:
        assert not (await asyncio.wait({start}, timeout=0.5))[0]
    finally:
        ready.set()
    with pytest.raises(ConfigError, match=r"config\.json"):
        await start
