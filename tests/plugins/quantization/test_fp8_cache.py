"""Keys and values cached in fp8: kernels, backends, and the engine with a checkpoint's scales."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from safetensors.torch import load_file, save_file

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import ConfigError
from jackfield.core.registry import load_plugins
from jackfield.kernels.attention import reference

from helpers import VOCAB, make_checkpoint, reference_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALES = (0.25, 2.0)
HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 16, 4


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers that fp8 holds exactly, times any power of two."""
    generator = torch.randint(-7, 8, shape, generator=torch.Generator().manual_seed(seed)) / 4
    return generator.to(DEVICE, torch.float32)


def cache(dtype: torch.dtype, lengths: list[int]) -> tuple[torch.Tensor, ...]:
    """→ kv cache full of NaN but for what rows may see, block table, lengths"""
    columns = -(-max(lengths) // BLOCK)
    table = torch.arange(1, 1 + columns * len(lengths), dtype=torch.int32).view(len(lengths), -1)
    wide = torch.full((2, 1 + table.numel(), BLOCK, KV_HEADS, DIM), float("nan"))
    for row, length in enumerate(lengths):
        for position in range(length):
            at = int(table[row, position // BLOCK]), position % BLOCK
            wide[:, at[0], at[1]] = draw(2, KV_HEADS, DIM, seed=100 * row + position).cpu()
    return (
        wide.to(dtype).to(DEVICE), table.to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_decode_kernel_reads_an_fp8_cache(dtype: torch.dtype) -> None:
    from jackfield.kernels.attention.paged_attention_decode import paged_attention_decode

    kv, table, lengths = cache(dtype, [1, 9, 70])
    query = draw(3, HEADS, DIM, seed=5)
    options: Any = {"scale": 0.3, "cache_scales": SCALES}
    expected = reference.paged_attention_decode(query, kv, table, lengths, **options)
    for splits in (1, 2):
        actual = paged_attention_decode(query, kv, table, lengths, num_splits=splits, **options)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_prefill_kernel_reads_an_fp8_cache() -> None:
    from jackfield.kernels.attention.paged_attention_prefill import paged_attention_prefill

    kv, table, lengths = cache(E4M3, [6, 13])
    query = draw(11, HEADS, DIM, seed=5)
    starts = torch.tensor([0, 4, 11], dtype=torch.int32, device=DEVICE)
    options: Any = {"scale": 0.3, "cache_scales": SCALES}
    expected = reference.paged_attention(query, kv, table, starts, lengths, **options)
    actual = paged_attention_prefill(query, kv, table, starts, lengths, max_query_len=7, **options)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_heads_kernel_writes_an_fp8_cache() -> None:
    from jackfield.kernels.attention.qk_norm_rope_cache import qk_norm_rope_cache

    slots = torch.tensor([5, 0, 11], device=DEVICE)
    positions = torch.arange(3, device=DEVICE)
    parts = []
    for function in (qk_norm_rope_cache, reference.qk_norm_rope_cache):
        kv = torch.zeros(2, 3, BLOCK, KV_HEADS, DIM, device=DEVICE).to(E4M3)
        fused = draw(3, (HEADS + 2 * KV_HEADS) * DIM)
        if DEVICE.type == "cuda":  # The interpreter does not cut off.
            fused[0, -1] = 5000.0
        function(
            fused, HEADS, KV_HEADS, positions,
            kv_cache=kv, slot_mapping=slots, cache_scales=SCALES,
        )  # fmt: skip
        parts.append(kv.float())
    assert torch.equal(*parts)
    if DEVICE.type == "cuda":
        assert parts[0][1].max() == 448.0, "values beyond the type's largest are cut off"
    assert (parts[0] != 0).any(dim=-1).sum() == 2 * 3 * KV_HEADS


def test_fused_decode_kernel_reads_and_writes_an_fp8_cache() -> None:
    from jackfield.kernels.attention.fused_decode_attention import fused_decode_attention

    lengths = [1, 9, 40]
    qkv = draw(3, (HEADS + 2 * KV_HEADS) * DIM, seed=3)
    kv, table, seq_lens = cache(E4M3, lengths)
    slots = torch.tensor(
        [int(table[r, (n - 1) // BLOCK]) * BLOCK + (n - 1) % BLOCK for r, n in enumerate(lengths)],
        device=DEVICE,
    )
    other = kv.clone()
    actual = fused_decode_attention(
        qkv, HEADS, KV_HEADS, kv, table, seq_lens, slots, scale=0.3, cache_scales=SCALES,
        counters=torch.zeros(64, dtype=torch.int32, device=DEVICE),
        workspace=torch.empty(10000, device=DEVICE), num_splits=2,
    )  # fmt: skip
    reference.qk_norm_rope_cache(
        qkv, HEADS, KV_HEADS, seq_lens - 1, kv_cache=other, slot_mapping=slots, cache_scales=SCALES
    )
    query = qkv.view(3, -1, DIM)[:, :HEADS]
    expected = reference.paged_attention_decode(
        query, other, table, seq_lens, scale=0.3, cache_scales=SCALES
    )
    assert torch.equal(kv.view(torch.uint8), other.view(torch.uint8))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("kernel", ["decode", "prefill", "fused"])
def test_queries_of_16_bits_read_an_fp8_cache(kernel: str, dtype: torch.dtype) -> None:
    """bfloat16 is multiplied as float16: exactly, but for its smallest and largest numbers."""
    from jackfield.kernels.attention.fused_decode_attention import fused_decode_attention
    from jackfield.kernels.attention.paged_attention_decode import paged_attention_decode
    from jackfield.kernels.attention.paged_attention_prefill import paged_attention_prefill

    gpu = DEVICE.type == "cuda"
    kv, table, lengths = cache(dtype, [5, 70, 33])
    width = (HEADS + 2 * KV_HEADS) * DIM if kernel == "fused" else HEADS * DIM
    qkv = draw(3, width, seed=5) * torch.tensor([[1e-6], [1.0], [30.0]], device=DEVICE)
    qkv = qkv.to(torch.bfloat16 if gpu else torch.float16)
    if gpu and kernel != "fused":
        qkv[2, :DIM] = torch.tensor([1e6, *[0.0] * (DIM - 1)])
        qkv[0, DIM] = torch.nan
    query = qkv.view(3, -1, DIM)[:, :HEADS]
    starts = torch.arange(4, dtype=torch.int32, device=DEVICE)
    options: Any = {"scale": 0.3, "cache_scales": SCALES}
    if kernel == "decode":
        actual = paged_attention_decode(query, kv, table, lengths, num_splits=2, **options)
    elif kernel == "prefill":
        actual = paged_attention_prefill(
            query, kv, table, starts, lengths, max_query_len=1, **options
        )
    else:
        at = (lengths - 1).long()
        slots = table.gather(1, at[:, None] // BLOCK)[:, 0] * BLOCK + at % BLOCK
        actual = fused_decode_attention(
            qkv, HEADS, KV_HEADS, kv, table, lengths, slots, num_splits=2, **options,
            counters=torch.zeros(64, dtype=torch.int32, device=DEVICE),
            workspace=torch.empty(10000, device=DEVICE),
        )  # fmt: skip
    expected = reference.paged_attention_decode(query, kv, table, lengths, **options)
    assert actual.isfinite().any()
    torch.testing.assert_close(actual, expected, atol=2e-2, rtol=2e-2, equal_nan=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With scales that fit its keys and values badly in two different ways, but within range."""
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("scaled"))
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for layer in range(3):
        attention = f"model.layers.{layer}.self_attn"
        tensors[f"{attention}.k_scale"] = torch.tensor(0.05)
        tensors[f"{attention}.attn.v_scale"] = torch.tensor([0.02])
    save_file(tensors, path, {"format": "pt"})
    return folder


def serve(folder: Path, **options: Any) -> tuple[list[int], Any]:
    """→ prompt, its greedy answer with log-probabilities"""
    prompt = [3 + 7 * i % (VOCAB - 3) for i in range(41)]
    config = EngineConfig(
        model=str(folder), device=str(DEVICE.type), dtype="float32", skip_tokenizer_init=True,
        max_model_len=80, max_num_seqs=2, max_num_batched_tokens=16, **options,
    )  # fmt: skip

    async def run() -> Any:
        params = SamplingParams(
            temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=1
        )
        last = None
        async with AsyncEngine(config) as engine:
            async for output in engine.generate(prompt, params):
                last = output
            assert engine.info is not None
            return last, engine.info

    output, info = asyncio.run(run())
    return prompt, (output, info)


def error(folder: Path, **options: Any) -> float:
    """Mean absolute error of the prompt's log-probabilities."""
    prompt, (output, _) = serve(folder, **options)
    model = reference_model(folder)
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0].float(), -1)
    errors = [
        abs(logprob.logprob - float(expected[position, token]))
        for position, table in enumerate(output.prompt_logprobs[1:])
        for token, logprob in table.items()
    ]
    return sum(errors) / len(errors)


def test_engine_with_an_fp8_cache_stays_near_the_float_model(checkpoint: Path) -> None:
    exact = error(checkpoint)
    assert exact < 1e-4, "scales of a cache that is not fp8 change nothing"
    e4m3 = error(checkpoint, kv_cache_dtype="fp8")
    e5m2 = error(checkpoint, kv_cache_dtype="fp8_e5m2")
    assert 1e-4 < e4m3 < 0.2
    assert e4m3 < e5m2 < 0.5, "one bit less of precision shows"


def test_fp8_cache_takes_a_quarter_of_float32s_room(checkpoint: Path) -> None:
    sizes = []
    for kind in ("auto", "fp8"):
        _, (_, info) = serve(checkpoint, kv_cache_dtype=kind, num_gpu_blocks_override=10)
        sizes.append(info.kv_cache_bytes)
    assert sizes[0] == 4 * sizes[1]


def test_scales_of_the_checkpoint_are_used(checkpoint: Path, tmp_path: Path) -> None:
    """Scales so small that keys are cut off spoil the answer: then they were applied."""
    import shutil

    folder = Path(shutil.copytree(checkpoint, tmp_path / "spoiled"))
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith("k_scale"):
            tensors[name] = torch.tensor(1e-5)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert error(folder, kv_cache_dtype="fp8") > 10 * error(checkpoint, kv_cache_dtype="fp8")


class NoFp8:
    """A backend of another, which does not say that it reads fp8."""

    from jackfield import hookimpl

    @hookimpl
    def register_attention_backends(self, registry: Any) -> None:
        from jackfield.plugins.attention.torch import TorchAttention

        registry.add("plain", type("Plain", (TorchAttention,), {"fp8_cache": False}))


def test_backend_that_reads_no_fp8_is_refused(checkpoint: Path) -> None:
    config = EngineConfig(
        model=str(checkpoint), device="cpu", skip_tokenizer_init=True, kv_cache_dtype="fp8",
        attention_backend="plain", max_model_len=64,
    )  # fmt: skip

    async def start() -> None:
        async with AsyncEngine(config, plugins=load_plugins(extra=[NoFp8()])):
            pass

    with pytest.raises(ConfigError, match=r"plain.*fp8"):
        asyncio.run(start())
