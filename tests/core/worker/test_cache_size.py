"""What the KV cache's blocks weigh, and how many there are."""

from __future__ import annotations

from typing import Any

import pytest

from jackfield import EngineConfig
from jackfield.core.cache.groups import CacheGroup, CachePart, TokenCache, sequence_blocks
from jackfield.core.cache.reach import Reach
from jackfield.core.errors import OutOfMemory
from jackfield.core.worker.kv_cache.memory import bytes_per_block, num_kv_blocks

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
    return num_kv_blocks(
        config, available=available, block_bytes=10, block_size=16, max_model_len=1024,
        groups=groups, max_chunk=100,
    )  # fmt: skip


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


def test_windows_need_less_memory_for_the_same_sequences():
    """Bytes of a block of all three layers against those of one."""
    whole = 3 * sequence_blocks(WHOLE, 1024, 16, 100)
    assert sequence_blocks(WINDOWS, 1024, 16, 100) < whole / 2
