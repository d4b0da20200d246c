"""Caches of small integers through the whole engine: against a model whose keys and values are
rounded likewise, and the room that they take."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from bare_attention import Bare
from rounded_cache import RoundedCache

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.cache.formats import QUANTIZED_FORMATS
from jackfield.core.errors import ConfigError
from jackfield.core.hooks import hookimpl
from jackfield.core.nn.attention import Attention
from jackfield.core.nn.context import BuildContext
from jackfield.core.nn.operations import Operations
from jackfield.core.protocols.attention import AttentionSpec
from jackfield.core.recording.recording import Recording
from jackfield.core.registry import load_plugins
from jackfield.core.worker.kv_cache.formats import choose_formats
from jackfield.entrypoints.replay import replay, replay_config

from helpers import VOCAB, at_once, interpreted, make_checkpoint, reference_model

PROMPT = [3 + 7 * i % (VOCAB - 3) for i in range(41)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def config(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(**{
        "model": str(folder), "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True,
        "attention_backend": "torch", "max_model_len": 80, "max_num_seqs": 4, "block_size": 4,
        "max_num_batched_tokens": 16, "num_gpu_blocks_override": 60, **options,
    })  # fmt: skip


async def serve(engine: AsyncEngine, prompt: list[int], **params: Any) -> Any:
    wanted = SamplingParams(**{
        "temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "logprobs": 3, **params
    })  # fmt: skip
    last: Any = None
    async for output in engine.generate(prompt, wanted):
        last = output
    return last


async def output(folder: Path, **options: Any) -> Any:
    """Serve one prompt, in chunks, with all log-probabilities."""
    plugins, count = options.pop("plugins", None), options.pop("count", 8)
    async with AsyncEngine(config(folder, **options), plugins=plugins) as engine:
        return await serve(engine, PROMPT, prompt_logprobs=1, max_tokens=count)


def deviation(output: Any, cache: RoundedCache | None, folder: Path) -> float:
    """Largest difference of a log-probability, of the prompt or of the output, to those of the
    `transformers` model with this cache; None: an exact one."""
    (completion,) = output.outputs
    tokens = [*PROMPT, *completion.token_ids]
    with torch.no_grad():
        logits = reference_model(folder)(torch.tensor([tokens]), past_key_values=cache).logits
    expected = torch.log_softmax(logits[0].float(), -1)
    places = [*enumerate(output.prompt_logprobs[1:])]
    places += enumerate(completion.logprobs, start=len(PROMPT) - 1)
    return max(
        abs(logprob.logprob - float(expected[position, token]))
        for position, table in places
        for token, logprob in table.items()
    )


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "int8"), ("llama", "int8_int4"), ("llama", "int4"),
        ("gemma3", "int8"), ("glm4", "int4"), ("gpt-oss", "int8"),
    ],
)  # fmt: skip
async def test_it_is_the_model_with_rounded_keys_and_values(
    family: str, name: str, tmp_path: Path
) -> None:
    """Of a wrong scale, or a forgotten one, the deviation would be that of other formats."""
    folder = make_checkpoint(family, tmp_path)
    served = await output(folder, kv_cache_dtype=name)
    exact = deviation(served, None, folder)
    assert deviation(served, RoundedCache(name), folder) < min(2e-3, exact / 10)


async def test_more_bits_are_nearer_to_the_exact_model(folder: Path) -> None:
    deviations = [
        deviation(await output(folder, kv_cache_dtype=name), None, folder)
        for name in ("auto", "int8", "int8_int4", "int4")
    ]
    exact, int8, mixed, int4 = deviations
    assert exact < 1e-4 < 1e-2 < int8 < 0.2, deviations
    assert 4 * int8 < mixed < int4 < 3.0, deviations


async def test_vllms_name_means_int8(folder: Path) -> None:
    own = await output(folder, kv_cache_dtype="int8")
    other = await output(folder, kv_cache_dtype="int8_per_token_head")
    assert other.prompt_logprobs == own.prompt_logprobs and other.outputs == own.outputs


async def test_layers_are_skipped(folder: Path) -> None:
    """Of three layers: the first and the last one; all of them."""
    some = await output(folder, kv_cache_dtype="int4", kv_cache_dtype_skip_layers=[0, -1])
    assert deviation(some, RoundedCache("int4", skipped=(0, 2)), folder) < 2e-3
    plain = await output(folder)
    every = await output(folder, kv_cache_dtype="int4", kv_cache_dtype_skip_layers=(0, 1, 2))
    assert every.prompt_logprobs == plain.prompt_logprobs and every.outputs == plain.outputs


async def test_layers_with_windows_are_skipped(tmp_path: Path) -> None:
    folder = make_checkpoint("gemma3", tmp_path)
    served = await output(
        folder, kv_cache_dtype="int4", kv_cache_dtype_skip_layers="sliding_window"
    )
    assert deviation(served, RoundedCache("int4", skipped=(0, 2)), folder) < 2e-3


def test_layers_with_chunks_are_skipped_by_the_same_word() -> None:
    shape = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "scale": 0.25}
    specs = [AttentionSpec(**shape), AttentionSpec(**shape, attention_chunk_size=8)]
    build = BuildContext(torch.device("cpu"), torch.float32, Operations())
    layers = [Attention(spec, build) for spec in specs]
    config = EngineConfig(
        model="m", kv_cache_dtype="int8", kv_cache_dtype_skip_layers="sliding_window"
    )
    choose_formats(layers, config, None, torch.float32)
    assert [layer.cache_format for layer in layers] == [QUANTIZED_FORMATS["int8"], torch.float32]


@pytest.mark.parametrize(
    ("options", "heads_bytes"),
    [
        ({}, 2 * 16 * 4), ({"kv_cache_dtype": "fp8"}, 2 * 16), ({"kv_cache_dtype": "int8"}, 2 * 20),
        ({"kv_cache_dtype": "int8_int4"}, 20 + 12), ({"kv_cache_dtype": "int4"}, 2 * 12),
    ],
)  # fmt: skip
async def test_the_room_of_a_cache_is_that_of_its_parts(
    folder: Path, options: dict[str, Any], heads_bytes: int
) -> None:
    """3 layers of 2 heads with 16 channels; all of the room is used for blocks."""
    room = 60_000
    options = {
        **options, "num_gpu_blocks_override": None, "max_num_seqs": 64,
        "cpu_kvcache_space": room / 2**30, "max_model_len": 40,
    }  # fmt: skip
    async with AsyncEngine(config(folder, **options)) as engine:
        assert engine.info is not None
        num_blocks, nbytes = engine.info.num_blocks, engine.info.kv_cache_bytes
    block = 3 * 2 * heads_bytes * 4
    assert nbytes == num_blocks * block and num_blocks == room // block


@pytest.mark.parametrize("name", [pytest.param("int8", marks=pytest.mark.slow), "int4"])
async def test_prefixes_preemption_and_other_rows_change_no_token(folder: Path, name: str) -> None:
    """With room for two of five sequences, whose prompts share their beginnings."""
    prompts = [[*PROMPT[: 20 + 5 * n], 50 + n] for n in range(5)]

    async def run(together: bool, **options: Any) -> tuple[list[list[int]], Any]:
        async with AsyncEngine(config(folder, kv_cache_dtype=name, **options)) as engine:
            if together:
                done = await at_once(
                    engine, *(serve(engine, one, max_tokens=16) for one in prompts)
                )
            else:
                done = [await serve(engine, one, max_tokens=16) for one in prompts]
            stats = engine.stats()
        return [one.outputs[0].token_ids for one in done], stats

    alone, _ = await run(False, enable_prefix_caching=False)
    shared, stats = await run(True, num_gpu_blocks_override=24)
    assert shared == alone and stats.num_preemptions > 0
    hits, stats = await run(False)
    assert hits == alone and stats.prefix_cache_hits > 0


@interpreted
@pytest.mark.parametrize(
    "name",
    # Keys of the one and values of the other; each alone by night.
    [pytest.param("int8", marks=pytest.mark.slow), "int8_int4",
     pytest.param("int4", marks=pytest.mark.slow)],
)  # fmt: skip
async def test_triton_gives_the_tokens_of_torch(folder: Path, name: str) -> None:
    options: Any = {"kv_cache_dtype": name, "count": 3}
    expected = await output(folder, **options)
    served = await output(folder, attention_backend="triton", operations="triton", **options)
    assert served.outputs[0].token_ids == expected.outputs[0].token_ids
    assert deviation(served, RoundedCache(name), folder) < 2e-3


@pytest.mark.parametrize("name", ["int8", "int8_int4", "int4"])
async def test_what_a_connector_brings_back_is_what_was_stored(
    folder: Path, tmp_path: Path, name: str
) -> None:
    transfer = {
        "kv_connector": "file_store", "kv_role": "kv_both",
        "kv_connector_extra_config": {"path": str(tmp_path)},
    }  # fmt: skip
    outputs = []
    for hits in (0, 40):
        settings = config(folder, kv_cache_dtype=name, kv_transfer_config=transfer)
        async with AsyncEngine(settings) as engine:
            outputs.append(await serve(engine, PROMPT))
            assert engine.stats().external_prefix_cache_hits == hits
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    for one, other in zip(*(each.outputs[0].logprobs for each in outputs), strict=True):
        assert one.keys() == other.keys()
        for token in one:
            assert one[token].logprob == pytest.approx(other[token].logprob, abs=1e-5)


async def test_a_recording_replays(folder: Path, tmp_path: Path) -> None:
    file = str(tmp_path / "steps")
    await output(folder, kv_cache_dtype="int8_int4", record_steps=file, count=3)
    recording = Recording(file)
    settings = replay_config(recording.header.config, recording.header.info)
    assert settings.kv_cache_dtype == "int8_int4"
    assert (await replay(recording, settings, load_plugins())).num_steps > 3


@pytest.mark.parametrize(
    "stored", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("fp8", "int8")), "int4"]
)
async def test_all_policies_compact_it(folder: Path, stored: str) -> None:
    """Also those that merge values; a request that is not compacted says what it says alone."""
    alone = (await output(folder, kv_cache_dtype=stored)).outputs[0].token_ids
    for policy in load_plugins()["kv_compressor"]:
        options = {"kv_compression": policy, "kv_compression_ratio": 0.5}
        async with AsyncEngine(config(folder, kv_cache_dtype=stored, **options)) as engine:
            whole, short = await asyncio.gather(
                serve(engine, PROMPT, kv_compression="off"), serve(engine, PROMPT[::-1])
            )
            assert engine.stats().kv_compactions == 1, policy
            engine.core.scheduler.check_invariants()
        assert short.error is None and len(short.outputs[0].token_ids) == 8, policy
        assert whole.outputs[0].token_ids == alone, policy


class OwnWrites(Operations):
    """Operations that write caches themselves, and know of no quantized ones."""

    name = "own_writes"

    def write_cache(self, *args: Any) -> None:
        return super().write_cache(*args)


class Outside:
    jackfield_api = 3

    @hookimpl
    def register_operations(self, registry: Any) -> None:
        registry.add("own_writes", f"{__name__}:OwnWrites")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "int8", "attention_backend": "bare"}, "bare.* no int8 cache"),
        ({"kv_cache_dtype": "int4", "operations": "own_writes"}, "write_cache.quantized"),
        ({"kv_cache_dtype": "int8", "calculate_kv_scales": True}, "calculate_kv_scales"),
        ({"kv_cache_dtype_skip_layers": "0"}, "kv_cache_dtype_skip_layers"),
        ({"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": "3"}, "'3' names no layer"),
        ({"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": "sliding_window"},
         "'sliding_window' names no layer"),
    ],
)  # fmt: skip
async def test_what_does_not_go_together_is_refused(
    folder: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await output(folder, plugins=load_plugins(extra=[Outside(), Bare()]), **options)


async def test_heads_of_an_odd_size_have_no_4_bits(folder: Path) -> None:
    from jackfield.core.cache.formats import QUANTIZED_FORMATS

    assert QUANTIZED_FORMATS["int8"].refusal(17) is None
    for name in ("int4", "int8_int4"):
        assert "17" in str(QUANTIZED_FORMATS[name].refusal(17))
