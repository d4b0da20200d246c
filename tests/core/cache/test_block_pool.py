"""Counting, reuse order and hits of the block pool."""

from __future__ import annotations

import pytest

from jackfield.core.cache.block_pool import BlockPool


def test_the_null_block_is_never_handed_out():
    pool = BlockPool(4)
    assert sorted(pool.allocate(3)) == [1, 2, 3]
    assert pool.num_free == 0


def test_a_block_is_free_when_its_last_holder_lets_go():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.hold([block])
    pool.release([block])
    assert not pool.is_free(block)
    pool.release([block])
    assert pool.is_free(block)
    pool.check([])


def test_freeing_twice_is_an_error():
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release(blocks)


def test_cached_blocks_go_least_recently_used_first_tails_before_heads():
    pool = BlockPool(6)
    old, young = pool.allocate(2), pool.allocate(2)
    for block in old + young:
        pool.register(block, bytes([block]))
    pool.release(old)
    pool.release(young)
    assert pool.allocate(5) == [5, old[1], old[0], young[1], young[0]]
    assert all(pool.lookup(bytes([block])) is None for block in old + young)


def test_uncached_blocks_are_reused_before_cached_ones():
    pool = BlockPool(3)
    cached, plain = pool.allocate(2)
    pool.register(cached, b"h")
    pool.release([cached])
    pool.release([plain])
    assert pool.allocate(1) == [plain]
    assert pool.lookup(b"h") == cached


def test_a_hit_revives_a_free_block():
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.register(blocks[0], b"h")
    pool.release(blocks)
    pool.hold([pool.lookup(b"h")])
    assert pool.num_free == 1
    assert pool.allocate(1) == [blocks[1]]
    pool.check(blocks)


def test_equal_content_is_found_in_the_block_that_had_it_first():
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.register(first, b"h")
    pool.register(second, b"h")
    assert pool.lookup(b"h") == first
    pool.forget(second)
    assert pool.lookup(b"h") == first
    pool.check([first, second])


def test_check_names_the_block_that_leaked():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    with pytest.raises(AssertionError, match=f"block {block} has 1 references, 0 holders"):
        pool.check([])


def test_too_few_blocks_are_refused():
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(1)
