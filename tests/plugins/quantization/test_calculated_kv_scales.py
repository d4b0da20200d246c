"""An fp8 cache whose scales come from the first step: `calculate_kv_scales`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from encoders import save_encoder
from safetensors.torch import load_file, save_file

from jackfield import AsyncEngine, EngineConfig, SamplingParams, hookimpl
from jackfield.core.errors import ConfigError
from jackfield.core.nn.attention import Attention
from jackfield.core.registry import load_plugins
from jackfield.core.worker.graphs.decode_graphs import DecodeGraphs
from jackfield.core.worker.kv_cache.scales import KEY_RANGE, VALUE_RANGE
from jackfield.plugins.executors.inprocess import InProcessExecutor

from helpers import VOCAB, at_once, make_checkpoint, reference_model

BEYOND = 2.0**13
"""So much larger keys and values, and so much smaller queries and output projections."""
PROMPTS = [[3 + (7 + n) * i % (VOCAB - 3) for i in range(20 + 9 * n)] for n in range(4)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Right in float32, and all its keys and values are beyond what e4m3 reaches."""
    folder = make_checkpoint("qwen3", tmp_path_factory.mktemp("beyond"))
    path = folder / "model.safetensors"
    tensors = load_file(path)
    factors = {
        "k_norm.weight": BEYOND,
        "q_norm.weight": 1 / BEYOND,
        "v_proj.weight": BEYOND,
        "v_proj.bias": BEYOND,
        "o_proj.weight": 1 / BEYOND,
    }
    for name in tensors:
        for ending, factor in factors.items():
            if name.endswith(ending):
                tensors[name] *= factor
    save_file(tensors, path, {"format": "pt"})
    return folder


def config(folder: Path, **options: Any) -> EngineConfig:
    common = {
        "model": str(folder), "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True,
        "max_model_len": 80, "max_num_seqs": 4, "max_num_batched_tokens": 32,
    }  # fmt: skip
    return EngineConfig(**common, **options)


async def answer(engine: AsyncEngine, prompt: list[int], **params: Any) -> Any:
    last = None
    sampling_params = SamplingParams(
        **{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **params}
    )
    async for output in engine.generate(prompt, sampling_params):
        last = output
    return last


def layers(engine: AsyncEngine) -> list[Attention]:
    executor: Any = engine.core.executor
    model = executor._worker.runner.model
    return [module for module in model.modules() if isinstance(module, Attention)]


async def mean_error(folder: Path, **options: Any) -> float:
    """Of the log-probabilities of prompts after the first one, against transformers."""
    model = reference_model(folder)
    errors = []
    async with AsyncEngine(config(folder, **options)) as engine:
        await answer(engine, PROMPTS[0])
        for prompt in PROMPTS[1:]:
            output = await answer(engine, prompt, prompt_logprobs=1)
            with torch.no_grad():
                expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0].float(), -1)
            errors += [
                abs(logprob.logprob - float(expected[position, token]))
                for position, table in enumerate(output.prompt_logprobs[1:])
                for token, logprob in table.items()
            ]
    return sum(errors) / len(errors)


@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
async def test_calculated_scales_bring_large_keys_into_the_cache(
    checkpoint: Path, kind: str
) -> None:
    assert await mean_error(checkpoint) < 1e-3
    cut_off = await mean_error(checkpoint, kv_cache_dtype="fp8")
    calculated = await mean_error(checkpoint, kv_cache_dtype=kind, calculate_kv_scales=True)
    assert calculated < cut_off / 5
    assert calculated < (0.1 if kind == "fp8_e4m3" else 0.2)


async def test_next_tokens_are_those_of_the_float_cache(checkpoint: Path) -> None:
    """One after each prompt: where one differs, those behind it answer another prompt."""
    prompts = [[3 + (5 + n) * i % (VOCAB - 3) for i in range(6 + n)] for n in range(40)]

    async def tokens(**options: Any) -> list[int]:
        async with AsyncEngine(config(checkpoint, **options)) as engine:
            results = await at_once(engine, *(answer(engine, p, max_tokens=1) for p in prompts))
        return [output.outputs[0].token_ids[0] for output in results]

    def agree(ours: list[int]) -> int:
        return sum(a == b for a, b in zip(ours, plain, strict=True))

    plain = await tokens()
    calculated = agree(await tokens(kv_cache_dtype="fp8", calculate_kv_scales=True))
    cut_off = agree(await tokens(kv_cache_dtype="fp8"))
    assert calculated > 26
    assert cut_off < 10


async def test_scales_are_those_of_the_first_step_and_stay(checkpoint: Path) -> None:
    """By hand for the first layer: its keys and values do not depend on any cache."""
    model = reference_model(checkpoint)
    seen: dict[str, float] = {}
    attention = model.model.layers[0].self_attn
    attention.v_proj.register_forward_hook(
        lambda *call: seen.update(value=float(call[-1].abs().max()))
    )
    with torch.no_grad():
        cache = model(torch.tensor([PROMPTS[0]]), use_cache=True).past_key_values
    seen["key"] = float(cache.layers[0].keys.abs().max())

    options: Any = {"kv_cache_dtype": "fp8", "calculate_kv_scales": True}
    async with AsyncEngine(config(checkpoint, **options)) as engine:
        assert {(layer.spec.key_scale, layer.spec.value_scale) for layer in layers(engine)} == {
            (1.0, 1.0)
        }
        await answer(engine, PROMPTS[0])
        scales = [(layer.spec.key_scale, layer.spec.value_scale) for layer in layers(engine)]
        assert scales[0][0] == pytest.approx(seen["key"] / KEY_RANGE, rel=1e-4)
        assert scales[0][1] == pytest.approx(seen["value"] / VALUE_RANGE, rel=1e-4)
        alone = [await answer(engine, prompt) for prompt in PROMPTS]
        together = await at_once(engine, *(answer(engine, prompt) for prompt in PROMPTS))
        assert together[0].num_cached_tokens > 0, "a prefix hit"
        for first, other in zip(alone, together, strict=True):
            assert first.outputs[0].token_ids == other.outputs[0].token_ids
        assert scales == [
            (layer.spec.key_scale, layer.spec.value_scale) for layer in layers(engine)
        ]


async def test_requests_that_come_together_share_the_first_step(checkpoint: Path) -> None:
    """More prompts than a step takes; each answer is what it is when the scales are known."""
    options: Any = {"kv_cache_dtype": "fp8", "calculate_kv_scales": True}
    async with AsyncEngine(config(checkpoint, **options)) as engine:
        first = await at_once(engine, *(answer(engine, prompt) for prompt in PROMPTS))
        await engine.reset_prefix_cache()
        again = [await answer(engine, prompt) for prompt in PROMPTS]
    for left, other in zip(first, again, strict=True):
        assert left.outputs[0].token_ids == other.outputs[0].token_ids


class Recording(InProcessExecutor):
    """Where there are no CUDA graphs, a replay is a call. Keeps the scales of each recording."""

    recorded: list[float] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)

        def record(function: Callable[[], None]) -> Callable[[], None]:
            runner: Any = self._worker.runner
            layer = next(m for m in runner.model.modules() if isinstance(m, Attention))
            self.recorded.append(layer.spec.key_scale)
            return function

        self._worker._recorder = lambda: record  # type: ignore[method-assign]


class Plugin:
    jackfield_api = 3

    @hookimpl
    def register_executors(self, registry: Any) -> None:
        registry.add("recording", Recording)

    @hookimpl
    def register_attention_backends(self, registry: Any) -> None:
        from jackfield.plugins.attention.torch import TorchAttention

        registry.add("safe", type("Safe", (TorchAttention,), {"graph_safe": True}))


async def test_decode_steps_are_recorded_with_the_final_scales_only(checkpoint: Path) -> None:
    Recording.recorded.clear()
    options: Any = {"executor": "recording", "attention_backend": "safe", "kv_cache_dtype": "fp8"}
    plugins = load_plugins(extra=[Plugin()])
    engine_config = config(checkpoint, calculate_kv_scales=True, **options)
    async with AsyncEngine(engine_config, plugins=plugins) as engine:
        assert not Recording.recorded
        await answer(engine, PROMPTS[0])
        executor: Any = engine.core.executor
        assert isinstance(executor._worker.runner.decode.graphs, DecodeGraphs)
        final = layers(engine)[0].spec.key_scale
    assert final != 1.0 and set(Recording.recorded) == {final}


async def test_scales_of_the_checkpoint_are_kept(checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "scaled"))
    tensors = load_file(folder / "model.safetensors")
    for name, scale in (("k_scale", 30.0), ("v_scale", 40.0)):
        tensors[f"model.layers.0.self_attn.{name}"] = torch.tensor(scale)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    options: Any = {"kv_cache_dtype": "fp8", "calculate_kv_scales": True}
    async with AsyncEngine(config(folder, **options)) as engine:
        await answer(engine, PROMPTS[0])
        first, second = layers(engine)[:2]
        assert (first.spec.key_scale, first.spec.value_scale) == (30.0, 40.0)
        assert second.spec.key_scale not in (1.0, 30.0)


async def test_what_has_no_scales_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    encoder = save_encoder(tmp_path / "encoder", "Bert")
    for folder, options in (
        (checkpoint, {}),
        (checkpoint, {"kv_cache_dtype": "float32"}),
        (encoder, {"kv_cache_dtype": "fp8"}),
    ):
        engine = AsyncEngine(config(folder, calculate_kv_scales=True, **options))
        with pytest.raises(ConfigError, match="calculate_kv_scales: ") as refused:
            await engine.start()
        assert refused.value.param == "calculate_kv_scales"
    with pytest.raises(ConfigError, match=r"calculate_kv_scales: .*kv_transfer_config"):
        config(
            checkpoint, kv_cache_dtype="fp8", calculate_kv_scales=True,
            kv_transfer_config={"kv_connector": "cpu_offload"},
        )  # fmt: skip
