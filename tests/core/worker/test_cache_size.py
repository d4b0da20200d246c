"""What the KV cache's blocks weigh, and how many there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.cache.groups import CacheGroup, CachePart, TokenCache, sequence_blocks
from jackfield.core.cache.reach import Reach
from jackfield.core.errors import ConfigError, ContextLengthExceeded, OutOfMemory
from jackfield.core.nn.rotary import Rotary
from jackfield.core.worker.kv_cache.memory import CacheDemand, bytes_per_block, num_kv_blocks
from jackfield.core.worker.slot_table import SlotTable

from helpers import make_checkpoint

WHOLE = (CacheGroup((0, 1, 2)),)
WINDOWS = (CacheGroup((1,)), CacheGroup((0,), Reach(24)), CacheGroup((2,), Reach(24)))


def spec(heads: int = 2, dtype: str = "bfloat16") -> TokenCache:
    return TokenCache((CachePart("key", (heads, 8), dtype), CachePart("value", (heads, 8), dtype)))


def test_a_block_has_the_layers_of_one_group():
    layer = 2 * 2 * 8 * 2 * 16
    assert bytes_per_block([spec()] * 3, WHOLE, 16) == 3 * layer
    assert bytes_per_block([spec()] * 3, WINDOWS, 16) == layer
    groups = (CacheGroup((0, 1)), CacheGroup((2,), Reach(9)))
    assert bytes_per_block([spec()] * 3, groups, 16) == 2 * layer
    assert bytes_per_block([spec(dtype="float8_e4m3fn")] * 3, WHOLE, 16) == 3 * layer // 2
    assert bytes_per_block([spec(1), spec(4)], (CacheGroup((0, 1)),), 16) == (1 + 4) * layer // 2


def blocks(available: int, groups: tuple[CacheGroup, ...], **options: Any) -> int:
    config = EngineConfig(model="somewhere", device="cpu", max_num_seqs=8, **options)
    demand = CacheDemand(groups, block_bytes=10, block_size=16, max_model_len=1024, max_chunk=100)
    return num_kv_blocks(config, demand, available)


@pytest.mark.parametrize("groups", [WHOLE, WINDOWS])
def test_one_sequence_fits_and_no_more_is_taken_than_is_of_use(groups):
    each = sequence_blocks(groups, 1024, 16, 100)
    assert blocks(10**9, groups) == 8 * each + 1
    assert blocks(10 * (each + 1), groups) == each + 1
    with pytest.raises(OutOfMemory, match="at most") as caught:
        blocks(10 * each, groups)
    assert caught.value.param == "max_model_len"
    (fits,) = [int(word) for word in str(caught.value).split("at most ")[1].split()[:1]]
    assert sequence_blocks(groups, fits, 16, 100) <= each - 1
    assert sequence_blocks(groups, fits + 1, 16, 100) > each - 1
    assert blocks(0, groups, num_gpu_blocks_override=7) == 7
    assert blocks(10 * each, groups, max_model_len="auto") == each
    assert blocks(10**9, groups, max_model_len="auto") == 8 * each + 1
    with pytest.raises(OutOfMemory, match="auto takes no less than 2") as caught:
        blocks(10, groups, max_model_len="auto")
    assert caught.value.param == "max_model_len"


def test_windows_need_less_memory_for_the_same_sequences():
    """Bytes of a block of all three layers against those of one."""
    whole = 3 * sequence_blocks(WHOLE, 1024, 16, 100)
    assert sequence_blocks(WINDOWS, 1024, 16, 100) < whole / 2


LONG = 10 * 2**20


@pytest.fixture
def num_rows(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Rows of the largest table of each kind that a start has made."""
    most = {"rotary": 0, "history": 0}
    make_table, init = Rotary.make_table, SlotTable.__init__

    def counted_table(self: Rotary, num_positions: int) -> torch.Tensor:
        most["rotary"] = max(most["rotary"], num_positions)
        return make_table(self, num_positions)

    def counted_init(self: SlotTable, *, max_model_len: int, **sizes: Any) -> None:
        most["history"] = max(most["history"], max_model_len)
        init(self, max_model_len=max_model_len, **sizes)

    monkeypatch.setattr(Rotary, "make_table", counted_table)
    monkeypatch.setattr(SlotTable, "__init__", counted_init)
    return most


async def test_a_context_that_does_not_fit_takes_no_memory_before_the_error_says_so(
    tmp_path: Path, num_rows: dict[str, int]
) -> None:
    """Of ten million tokens, the tables alone would be gigabytes."""
    folder = make_checkpoint("qwen3", tmp_path)
    options: dict[str, Any] = {
        "model": str(folder), "device": "cpu", "skip_tokenizer_init": True, "max_num_seqs": 2,
        "max_num_batched_tokens": 64, "cpu_kvcache_space": 2**-8,
        "hf_overrides": {"max_position_embeddings": LONG},
    }  # fmt: skip
    with pytest.raises(OutOfMemory, match=f"max_model_len={LONG} needs") as caught:
        await AsyncEngine(EngineConfig(**options)).start()
    fits = int(str(caught.value).split("at most ")[1].split()[0])
    assert num_rows == {"rotary": fits, "history": fits} and 64 < fits < LONG / 100
    for length in (fits, "auto"):
        async with AsyncEngine(EngineConfig(**options, max_model_len=length)) as engine:
            assert num_rows == {"rotary": fits, "history": fits}
            assert engine.model_config.max_model_len == fits
            params = SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False)
            prompt = [1 + n % 50 for n in range(fits - 8)]
            outputs = [output async for output in engine.generate(prompt, params)]
            assert len(outputs[-1].outputs[0].token_ids) == 8
            with pytest.raises(ContextLengthExceeded, match=f"length is {fits} tokens"):
                _ = [output async for output in engine.generate([*prompt, *range(9)])]
    with pytest.raises(OutOfMemory, match=f"max_model_len={fits + 16} needs"):
        await AsyncEngine(EngineConfig(**options, max_model_len=fits + 16)).start()


async def test_the_cache_has_the_bytes_that_are_stated(tmp_path: Path) -> None:
    """Instead of cpu_kvcache_space; the number of blocks is bytes by the size of a block."""
    folder = make_checkpoint("qwen3", tmp_path)
    options: dict[str, Any] = {
        "model": str(folder), "device": "cpu", "skip_tokenizer_init": True, "max_num_seqs": 64,
        "max_model_len": 256, "dtype": "float32", "block_size": 16,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="either bytes or blocks") as refused:
        EngineConfig(**options, kv_cache_memory_bytes=1 << 20, num_gpu_blocks_override=9)
    assert refused.value.param == "kv_cache_memory_bytes"
    async with AsyncEngine(EngineConfig(**options, kv_cache_memory_bytes=1 << 20)) as engine:
        config = engine.model_config
        kv_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
        assert engine.info.num_blocks == (1 << 20) // (16 * kv_bytes)
    with pytest.raises(OutOfMemory, match="raise kv_cache_memory_bytes"):
        await AsyncEngine(EngineConfig(**options, kv_cache_memory_bytes=1 << 10)).start()
