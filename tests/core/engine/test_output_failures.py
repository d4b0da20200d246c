"""What goes wrong with one request's output ends that request; others go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.engine import request_state
from jackfield.core.engine.plugin_events import PluginEvents
from jackfield.core.metrics.metrics import EngineMetrics
from jackfield.core.output_parsing.output_text import OutputText
from jackfield.core.output_parsing.stop_strings import StopStrings
from jackfield.core.text.detokenizer import IncrementalDetokenizer

LONG = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
POISON = SamplingParams(
    temperature=0, max_tokens=24, ignore_eos=True, logprobs=1, stop=(" \0", "e\0", "s\0")
)


class Once:
    """Makes a function raise the first time that `chosen` says so of its arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.chosen: Callable[..., bool] = lambda *_, **__: True
        self.count = 0
        real = getattr(owner, name)

        def failing(*args: Any, **kwargs: Any) -> Any:
            if not self.count and self.chosen(*args, **kwargs):
                self.count += 1
                raise ArithmeticError("no luck")
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, failing)


def engine_of(**options: Any) -> AsyncEngine:
    return AsyncEngine(
        EngineConfig(
            **{
                "device": "cpu",
                "attention_backend": "torch",
                "max_model_len": 128,
                "max_num_seqs": 8,
                "num_gpu_blocks_override": 100,
                **options,
            }
        )
    )


async def final(stream: Any) -> Any:
    async for output in stream:
        last = output
    return last


@pytest.mark.parametrize(
    ("owner", "name", "reason"),
    [
        (OutputText, "push_token", "error"),
        (StopStrings, "step", "error"),
        (IncrementalDetokenizer, "finish", "error"),
        (request_state, "_position", "error"),
        (EngineMetrics, "observe_first_token", "error"),
        # What only counts has no part in the output.
        (EngineMetrics, "observe_inter_token", "length"),
        pytest.param(EngineMetrics, "observe_finished", "length", marks=pytest.mark.slow),
        pytest.param(EngineMetrics, "observe_step", "length", marks=pytest.mark.slow),
        (PluginEvents, "request_finished", "length"),
    ],
)
async def test_an_error_with_one_requests_output_ends_it_alone(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, reason: str
) -> None:
    async with engine_of() as engine:
        engine.core.events.wants_requests = True  # type: ignore[attr-defined]
        alone = (await final(engine.generate("One", LONG))).outputs[0].text
        await final(engine.generate("One", POISON))  # What is made once for equal stops is there.
        failure = Once(monkeypatch, owner, name)
        params = [POISON, LONG, LONG, LONG]
        outputs = await asyncio.gather(*(final(engine.generate("One", p)) for p in params))
        assert failure.count == 1
        failed = [output for output in outputs if output.error is not None]
        assert len(failed) == (reason == "error")
        for output in outputs:
            (completion,) = output.outputs
            if output in failed:
                assert completion.finish_reason == "error"
                assert "ArithmeticError: no luck" in output.error
            else:
                assert (completion.text, completion.finish_reason) == (alone, "length")
        assert engine.healthy
        assert (await final(engine.generate("One", LONG))).outputs[0].text == alone
        engine.core.outputs.check_idle()  # type: ignore[attr-defined]
        assert engine.stats().kv_blocks_used == 0


async def test_all_completions_of_the_request_end(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=40, ignore_eos=True)
    async with engine_of() as engine:
        failure = Once(monkeypatch, OutputText, "push_token")
        failure.chosen = lambda text, token_id, count: count == 5
        output = await final(engine.generate("One", params))
        assert [item.finish_reason for item in output.outputs] == ["error"] * 3
        assert "ArithmeticError" in output.error
        engine.core.outputs.check_idle()  # type: ignore[attr-defined]


async def test_a_text_that_cannot_be_ended_does_not_keep_an_abort_from_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with engine_of() as engine:
        params = SamplingParams(n=3, seed=1, max_tokens=100, ignore_eos=True)
        stream = engine.generate("One", params, request_id="a")
        await anext(stream)
        Once(monkeypatch, IncrementalDetokenizer, "finish")
        assert await engine.abort("a")
        reasons = [item.finish_reason for item in (await final(stream)).outputs]
        assert reasons == ["error", "abort", "abort"]
        engine.core.outputs.check_idle()  # type: ignore[attr-defined]


async def test_every_stream_ends_with_an_error_when_the_engine_dies_though_a_text_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with engine_of() as engine:
        streams = [engine.generate("One", LONG) for _ in range(6)]
        for stream in streams:
            await anext(stream)
        Once(monkeypatch, IncrementalDetokenizer, "finish")
        engine.core.steps.fail(RuntimeError("the device is gone"))  # type: ignore[attr-defined]
        for stream in streams:
            output = await final(stream)
            assert output.outputs[0].finish_reason == "error"
            assert output.error
