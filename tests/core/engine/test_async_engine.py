"""AsyncEngine as its callers see it: streams, aborts, seeds, limits, life."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from jackfield import AsyncEngine, EngineConfig, OutputKind, SamplingParams
from jackfield.core.errors import (
    ConfigError,
    ContextLengthExceeded,
    EngineOverloaded,
    EngineStopped,
    InvalidRequest,
)
from jackfield.core.live.engine_jobs import ReportMemoryUse, Resume, Sleep

from helpers import VOCAB, at_once, make_checkpoint

PROMPT = [5, 6, 7, 8, 9, 10, 11]


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
            "max_num_seqs": 8,
            "num_gpu_blocks_override": 100,
            "attention_backend": "torch",
            **options,
        }
    )


async def collect(stream: Any) -> list[Any]:
    return [output async for output in stream]


async def final(stream: Any) -> Any:
    return (await collect(stream))[-1]


async def test_cumulative_delta_and_final_outputs_agree(checkpoint: Path) -> None:
    async with AsyncEngine(config(checkpoint)) as engine:

        def generate(kind: OutputKind) -> Any:
            return engine.generate(
                PROMPT, SamplingParams(temperature=0, max_tokens=9, output_kind=kind)
            )

        cumulative = await collect(generate(OutputKind.CUMULATIVE))
        delta = await collect(generate(OutputKind.DELTA))
        only = await collect(generate(OutputKind.FINAL_ONLY))
        assert len(only) == 1
        tokens = only[0].outputs[0].token_ids
        assert cumulative[-1].outputs[0].token_ids == tokens
        assert [t for d in delta for t in d.outputs[0].token_ids] == tokens
        assert [o.finished for o in cumulative] == [False] * (len(cumulative) - 1) + [True]
        assert only[0].outputs[0].finish_reason == "length"


async def test_leaving_the_loop_frees_the_blocks_at_once(checkpoint: Path) -> None:
    async with AsyncEngine(config(checkpoint)) as engine:
        async for _ in engine.generate(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True)):
            break
        gc.collect()
        stats = engine.stats()
        assert (stats.kv_blocks_used, stats.num_requests_running) == (0, 0)


async def test_cancelling_the_task_frees_the_blocks(checkpoint: Path) -> None:
    async with AsyncEngine(config(checkpoint)) as engine:
        first = asyncio.Event()

        async def consume() -> None:
            async for _ in engine.generate(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True)):
                first.set()

        task = asyncio.create_task(consume())
        await first.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        stats = engine.stats()
        assert (stats.kv_blocks_used, stats.num_requests_running) == (0, 0)


async def test_abort_ends_the_stream_with_its_reason(checkpoint: Path) -> None:
    async with AsyncEngine(config(checkpoint)) as engine:
        stream = engine.generate(
            PROMPT, SamplingParams(max_tokens=100, ignore_eos=True), request_id="a"
        )
        await anext(stream)
        assert await engine.abort("a")
        assert not await engine.abort("a")
        output = await final(stream)
        assert output.finished
        assert output.outputs[0].finish_reason == "abort"


async def test_seeded_request_gives_the_same_tokens_whatever_else_runs(checkpoint: Path) -> None:
    seeded = SamplingParams(seed=11, temperature=1.0, max_tokens=20, ignore_eos=True)
    async with AsyncEngine(config(checkpoint)) as engine:
        alone = await final(engine.generate(PROMPT, seeded))
        others = [
            final(
                engine.generate(
                    [3 + i] * (i + 1),
                    SamplingParams(max_tokens=5 + i, ignore_eos=True, top_p=0.8),
                )
            )
            for i in range(6)
        ]
        together, *_ = await asyncio.gather(final(engine.generate(PROMPT, seeded)), *others)
        different = await final(
            engine.generate(PROMPT, SamplingParams(seed=12, max_tokens=20, ignore_eos=True))
        )
    assert together.outputs[0].token_ids == alone.outputs[0].token_ids
    assert different.outputs[0].token_ids != alone.outputs[0].token_ids


async def test_seeded_request_survives_preemption_unchanged(checkpoint: Path) -> None:
    def params(seed: int) -> SamplingParams:
        return SamplingParams(seed=seed, max_tokens=40, ignore_eos=True)

    async with AsyncEngine(config(checkpoint)) as engine:
        expected = [await final(engine.generate([9, 9 + i], params(i))) for i in range(5)]
    small = config(checkpoint, num_gpu_blocks_override=20, block_size=4, max_model_len=64)
    async with AsyncEngine(small) as engine:
        crowded = await at_once(
            engine, *(final(engine.generate([9, 9 + i], params(i))) for i in range(5))
        )
        assert engine.stats().num_preemptions > 0
        assert engine.stats().kv_blocks_used == 0
    for first, other in zip(expected, crowded, strict=True):
        assert first.outputs[0].token_ids == other.outputs[0].token_ids


@pytest.mark.parametrize("caching", [True, False])
async def test_n_completions_share_the_prompt_blocks(checkpoint: Path, caching: bool) -> None:
    options = {"enable_prefix_caching": caching, "block_size": 4}
    async with AsyncEngine(config(checkpoint, **options)) as engine:
        prompt = [3 + i for i in range(41)]
        stream = engine.generate(
            prompt, SamplingParams(n=4, seed=5, max_tokens=30, ignore_eos=True)
        )
        most = 0
        outputs = []
        async for item in stream:
            outputs.append(item)
            most = max(most, engine.stats().kv_blocks_used)
        output = outputs[-1]
        assert [c.index for c in output.outputs] == [0, 1, 2, 3]
        assert len({tuple(c.token_ids) for c in output.outputs}) == 4
        assert all(len(c.token_ids) == 30 for c in output.outputs)
        # 10 shared prompt blocks and 4 x at most 9 own ones; unshared it would be 4 x 18 = 72.
        assert most <= 10 + 4 * 9
        single = await final(
            engine.generate(prompt, SamplingParams(seed=5 + 2, max_tokens=30, ignore_eos=True))
        )
        assert single.outputs[0].token_ids == output.outputs[2].token_ids


async def test_stop_token_ends_with_its_id(checkpoint: Path) -> None:
    async with AsyncEngine(config(checkpoint)) as engine:
        greedy = await final(
            engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
        )
        tokens = greedy.outputs[0].token_ids
        stop = tokens[4]
        cut = tokens.index(stop) + 1
        output = await final(
            engine.generate(
                PROMPT,
                SamplingParams(
                    temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=(stop,)
                ),
            )
        )
        assert output.outputs[0].token_ids == tokens[:cut]
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)


async def test_allowed_tokens_and_bias_and_min_tokens_hold(checkpoint: Path) -> None:
    async with AsyncEngine(config(checkpoint)) as engine:
        allowed = await final(
            engine.generate(
                PROMPT,
                SamplingParams(allowed_token_ids=(7, 9), max_tokens=20, ignore_eos=True),
            )
        )
        assert set(allowed.outputs[0].token_ids) <= {7, 9}
        eager = SamplingParams(temperature=0, logit_bias={2: 100.0}, max_tokens=10)
        stopped = await final(engine.generate(PROMPT, eager))
        assert stopped.outputs[0].token_ids == [2]
        assert stopped.outputs[0].finish_reason == "stop"
        later = SamplingParams(temperature=0, logit_bias={2: 100.0}, max_tokens=10, min_tokens=4)
        delayed = await final(engine.generate(PROMPT, later))
        assert len(delayed.outputs[0].token_ids) == 5
        assert delayed.outputs[0].token_ids[4] == 2


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([], {}, "prompt"),
        ([VOCAB], {}, "prompt"),
        ([-1], {}, "prompt"),
        ("text", {}, "prompt"),
        ([1], {"logprobs": 21}, "logprobs"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ([1], {"stop": ("x",)}, "stop"),
        ([1], {"truncate_prompt_tokens": 128}, "truncate_prompt_tokens"),
    ],
)
async def test_bad_requests_are_refused_by_name_and_nothing_is_lost(
    checkpoint: Path, prompt: Any, params: dict[str, Any], param: str
) -> None:
    async with AsyncEngine(config(checkpoint)) as engine:
        with pytest.raises(InvalidRequest) as caught:
            await final(engine.generate(prompt, SamplingParams(**params)))
        assert caught.value.param == param
        good = await final(engine.generate(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True)))
        assert len(good.outputs[0].token_ids) == 3


async def test_limits_of_context_and_cache(checkpoint: Path) -> None:
    async with AsyncEngine(config(checkpoint, max_waiting_requests=1)) as engine:
        with pytest.raises(ContextLengthExceeded):
            await final(engine.generate([5] * 128))
        fits = await final(engine.generate([5] * 127, SamplingParams(max_tokens=50)))
        assert len(fits.outputs[0].token_ids) == 1
        with pytest.raises(InvalidRequest, match="generates text"):
            await engine.encode("x")
        long = SamplingParams(max_tokens=60, ignore_eos=True)
        streams = [engine.generate(PROMPT, long) for _ in range(9)]
        tasks = [asyncio.create_task(anext(stream)) for stream in streams]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert any(isinstance(r, EngineOverloaded) for r in results)


async def test_duplicate_running_request_id_is_refused(checkpoint: Path) -> None:
    async with AsyncEngine(config(checkpoint)) as engine:
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        stream = engine.generate(PROMPT, params, request_id="same")
        await anext(stream)
        with pytest.raises(InvalidRequest) as caught:
            await anext(engine.generate(PROMPT, params, request_id="same"))
        assert caught.value.param == "request_id"


async def test_drain_lets_running_requests_finish_and_refuses_new_ones(checkpoint: Path) -> None:
    async with AsyncEngine(config(checkpoint)) as engine:
        stream = engine.generate(PROMPT, SamplingParams(max_tokens=30, ignore_eos=True))
        await anext(stream)
        draining = asyncio.create_task(engine.drain())
        await asyncio.sleep(0)
        with pytest.raises(EngineStopped):
            await anext(engine.generate(PROMPT))
        output = await final(stream)
        assert output.outputs[0].finish_reason == "length"
        assert await draining


async def test_two_engines_live_in_one_process(checkpoint: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    async with AsyncEngine(config(checkpoint)) as first, AsyncEngine(config(checkpoint)) as two:
        a, b = await asyncio.gather(
            final(first.generate(PROMPT, params)), final(two.generate(PROMPT, params))
        )
    assert a.outputs[0].token_ids == b.outputs[0].token_ids


async def test_event_hooks_are_called(checkpoint: Path) -> None:
    from jackfield import hookimpl
    from jackfield.core.registry import load_plugins

    class Watcher:
        def __init__(self) -> None:
            self.seen: list[str] = []

        @hookimpl
        async def engine_started(self, engine: Any) -> None:
            self.seen.append("started")

        @hookimpl
        def request_finished(self, output: Any) -> None:
            self.seen.append(f"finished {output.outputs[0].finish_reason}")

        jackfield_api = 3

        @hookimpl
        def step_finished(self, plan: Any, result: Any) -> None:
            assert plan.step == result.step
            if "step" not in self.seen:
                self.seen.append("step")

        @hookimpl
        def engine_stopping(self, engine: Any) -> None:
            self.seen.append("stopping")

    watcher = Watcher()
    plugins = load_plugins(extra=[watcher])
    async with AsyncEngine(config(checkpoint), plugins=plugins) as engine:
        await final(engine.generate(PROMPT, SamplingParams(max_tokens=2, ignore_eos=True)))
    assert watcher.seen[0] == "started"
    assert watcher.seen[-1] == "stopping"
    assert {"step", "finished length"} <= set(watcher.seen)


async def test_wrong_options_are_refused_with_their_name(checkpoint: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        await AsyncEngine(config(checkpoint, attention_backend="tritn")).start()
    assert caught.value.param == "attention_backend"
    with pytest.raises(ConfigError) as caught:
        await AsyncEngine(config(checkpoint, max_model_len=100_000)).start()
    assert caught.value.param == "max_model_len"


async def test_an_engine_that_was_not_started_says_so() -> None:
    engine = AsyncEngine(EngineConfig())
    for stream in (engine.generate("x"), engine.chat([{"role": "user", "content": "x"}])):
        with pytest.raises(EngineStopped, match="has not started, which `async with` or start"):
            await anext(stream)
    with pytest.raises(EngineStopped, match="has not started"):
        await engine.encode("x")
    with pytest.raises(EngineStopped, match="has not started"):
        engine.stats()
    for method in (engine.render_metrics, engine.reset_prefix_cache):
        with pytest.raises(EngineStopped, match="has not started"):
            await method()


async def test_an_engine_that_has_stopped_says_so_to_live_jobs(checkpoint: Path) -> None:
    engine = AsyncEngine(config(checkpoint))
    await engine.start()
    await engine.stop()
    for job in (ReportMemoryUse(), Sleep(level=1), Resume()):
        with pytest.raises(EngineStopped, match="is stopping or stopped"):
            await engine.ask_live(job)


@pytest.mark.parametrize("name", ["info", "model_config", "metrics_registry"])
async def test_what_the_start_finds_out_is_not_known_before(name: str) -> None:
    with pytest.raises(EngineStopped, match="has not started"):
        getattr(AsyncEngine(EngineConfig()), name)


async def test_another_event_loop_is_refused_and_does_not_hang(checkpoint: Path) -> None:
    async with AsyncEngine(config(checkpoint)) as engine:
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        uses = (lambda: final(engine.generate(PROMPT, params)), engine.stop)
        for use in uses:
            with pytest.raises(RuntimeError, match="the event loop that started it"):
                await asyncio.to_thread(asyncio.run, use())
        assert len((await final(engine.generate(PROMPT, params))).outputs[0].token_ids) == 2


async def test_parameters_of_another_type_are_refused_by_name(checkpoint: Path) -> None:
    async with AsyncEngine(config(checkpoint)) as engine:
        fields: Any = {"max_tokens": 3}
        with pytest.raises(InvalidRequest, match="params: must be SamplingParams, got dict"):
            await anext(engine.generate(PROMPT, fields))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", 5),
        ("stop_token_ids", 5),
        ("bad_words", {"a": 1}),
        ("allowed_token_ids", 5),
        ("logit_bias", [1]),
        ("logit_bias", {1: "x"}),
        ("logit_bias", {1: float("nan")}),
        ("ignore_eos", "no"),
        ("detokenize", 0),
        ("output_kind", 9),
    ],
)
def test_sampling_parameters_of_the_wrong_type_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field} must be ") as refused:
        SamplingParams(**{field: value})
    assert refused.value.param == field
