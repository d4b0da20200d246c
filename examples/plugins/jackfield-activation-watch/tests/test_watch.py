"""The part passes Jackfield's kit; both halves work in one process and with two ranks."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable
from typing import Any

import pytest

from jackfield import AsyncEngine, EngineConfig, OutputKind, SamplingParams
from jackfield.core.errors import ConfigError, InvalidRequest
from jackfield.plugins.conformance.parts import PartKit

OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "block_size": 4, "max_model_len": 64,
    "max_num_batched_tokens": 16, "num_gpu_blocks_override": 60, "max_num_seqs": 4,
    "load_format": "dummy", "skip_tokenizer_init": True, "parts": {"activation_watch": {}},
}  # fmt: skip
MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 64,
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "eos_token_id": 2,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
PROMPT = list(range(40, 63))


def awaited(test: Callable[..., Any]) -> Callable[..., None]:
    """A test that is a coroutine, without another plugin of pytest's."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        asyncio.run(test(**arguments))

    return run


class TestConformance(PartKit):
    name = "activation_watch"


@pytest.fixture(scope="module")
def two_heads(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose heads two ranks can divide."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL))
    return str(folder)


def params(limit: float | None) -> SamplingParams:
    return SamplingParams(
        max_tokens=8, ignore_eos=True, temperature=0, output_kind=OutputKind.FINAL_ONLY,
        extra_args=None if limit is None else {"activation_limit": limit},
    )  # fmt: skip


async def final(engine: AsyncEngine, limit: float | None) -> Any:
    return [output async for output in engine.generate(PROMPT, params(limit))][-1]


@pytest.mark.parametrize("ranks", [1, 2])
@awaited
async def test_large_activations_end_their_request_alone(two_heads: str, ranks: int) -> None:
    config = EngineConfig(model=two_heads, tensor_parallel_size=ranks, **OPTIONS)
    async with AsyncEngine(config) as engine:
        calls = (final(engine, limit) for limit in (None, 1e-9, 1e9))
        plain, ended, watched = await asyncio.gather(*calls)
        assert ended.outputs[0].finish_reason == "error"
        assert ended.error.startswith("activation_limit: an activation is ")
        assert plain.error is watched.error is None
        assert watched.outputs[0].token_ids == plain.outputs[0].token_ids
        # One more step may have been in flight.
        assert engine.stats().part_counts["activation_watch.rows_over_limit"] in (1, 2)


@awaited
async def test_the_peak_is_that_of_the_tokens_computed(two_heads: str) -> None:
    """By bisection: the limit at which a request ends is the number that its error has."""
    options = {**OPTIONS, "enable_prefix_caching": False}
    async with AsyncEngine(EngineConfig(model=two_heads, **options)) as engine:
        error = (await final(engine, 1e-9)).error
        peak = float(error.split("activation is ")[1].split(";")[0])
        assert (await final(engine, peak * 0.99)).error
        peaks = [peak]
        while (output := await final(engine, peaks[-1] * 1.001)).error:
            peaks.append(float(output.error.split("activation is ")[1].split(";")[0]))
        assert peaks == sorted(peaks)


@awaited
async def test_tokens_are_only_counted_where_that_is_asked_for(two_heads: str) -> None:
    parts = {"activation_watch": {"ends": False}}
    options = {**OPTIONS, "parts": parts}
    async with AsyncEngine(EngineConfig(model=two_heads, **options)) as engine:
        output = await final(engine, 1e-9)
        assert output.error is None
        # The last token is sampled, and not computed.
        assert engine.stats().part_counts == {
            "activation_watch.watched_tokens": len(PROMPT) + 7,
            "activation_watch.rows_over_limit": 2 + 7,
        }


@pytest.mark.parametrize("limit", [0, -1, "much", None, True, float("inf")])
def test_other_limits_are_refused_by_name(limit: Any) -> None:
    from jackfield_activation_watch.part import ActivationWatch

    with pytest.raises(InvalidRequest, match="activation_limit"):
        ActivationWatch.check(SamplingParams(extra_args={"activation_limit": limit}))


@awaited
async def test_it_is_refused_with_stages(two_heads: str) -> None:
    engine = AsyncEngine(EngineConfig(model=two_heads, pipeline_parallel_size=2, **OPTIONS))
    with pytest.raises(ConfigError, match=r"parts\.activation_watch: the stage"):
        await engine.start()
