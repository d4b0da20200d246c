"""The manager's contract: lookups without effect, allocation all or nothing, chained hashes."""

from __future__ import annotations

import random

import pytest

from jackfield.core.cache.groups import CacheGroup
from jackfield.core.cache.kv_manager import NO_HITS, KVCacheManager
from jackfield.core.cache.reach import Reach
from jackfield.core.request import Request
from jackfield.core.sampling_params import SamplingParams


def make_request(tokens: list[int], **more) -> Request:
    return Request("r", tokens, more.pop("params", SamplingParams()), max_tokens=8, seed=0, **more)


def find(kv: KVCacheManager, request: Request) -> list[int]:
    """Blocks hit, of the only group."""
    return list(kv.find_hits(request).block_ids)


def compute(kv: KVCacheManager, request: Request) -> list[int]:
    """Plan all known tokens; returns the blocks hit."""
    hits = kv.find_hits(request)
    left = request.num_known_tokens - hits.num_blocks * kv.block_size
    assert kv.allocate(request, left, hits) is not None
    request.num_computed_tokens += left
    kv.register(request)
    return list(hits.block_ids)


def snapshot(kv: KVCacheManager, request: Request) -> tuple:
    return kv.pool.num_free, list(request.block_ids), request.num_computed_tokens


def test_lookup_changes_nothing():
    kv = KVCacheManager(10, 4, True)
    first, second = make_request(list(range(12))), make_request(list(range(12)))
    compute(kv, first)
    before = snapshot(kv, second)
    assert find(kv, second) == find(kv, second) == first.block_ids[:2]
    assert snapshot(kv, second) == before


@pytest.mark.parametrize(("length", "blocks"), [(8, 1), (9, 2), (4, 0), (1, 0)])
def test_hits_always_leave_a_token_to_compute(length, blocks):
    kv = KVCacheManager(10, 4, True)
    compute(kv, make_request(list(range(12))))
    assert len(find(kv, make_request(list(range(length))))) == blocks


def test_a_difference_anywhere_before_ends_the_hits():
    kv = KVCacheManager(10, 4, True)
    compute(kv, make_request(list(range(16))))
    assert len(find(kv, make_request([*range(16), 0]))) == 4
    changed = [*range(16), 0]
    changed[5] = 99
    assert len(find(kv, make_request(changed))) == 1
    changed[0] = 99
    assert find(kv, make_request(changed)) == []


def test_failed_allocation_changes_nothing():
    kv = KVCacheManager(6, 4, True)
    first = make_request(list(range(12)))
    compute(kv, first)
    kv.free(first)
    request = make_request([*range(12), *range(50, 62)])
    hits = kv.find_hits(request)
    assert hits.num_blocks == 3
    before = snapshot(kv, request)
    assert kv.allocate(request, 12, hits) is None, "3 hits revived and 3 new are more than 5"
    assert snapshot(kv, request) == before
    assert kv.allocate(request, 8, hits) is not None
    request.num_computed_tokens += 8
    kv.check([request])


def test_blocks_are_appended_to_all_requests_or_to_none():
    kv = KVCacheManager(6, 4, True)  # One is the null block.
    first, second = make_request([1, 2, 3, 4]), make_request([5, 6, 7, 8])
    compute(kv, first)
    compute(kv, second)
    writes = kv.append_blocks([first, second])
    assert writes is not None and len(first.block_ids) == len(second.block_ids) == 2
    assert [list(write.block_ids) for write in writes] == [
        first.block_ids[1:],
        second.block_ids[1:],
    ]
    third = make_request([9])
    compute(kv, third)  # The last free block.
    kv.free(first)
    assert kv.append_blocks([second, third]) is not None, "as many are free as are needed"
    before = snapshot(kv, second)
    assert kv.append_blocks([second]) is None and snapshot(kv, second) == before


def test_only_known_tokens_are_registered():
    kv = KVCacheManager(10, 4, True)
    request = make_request([1, 2, 3])
    compute(kv, request)
    request.num_computed_tokens, request.num_tokens = 4, 5  # the fourth token is in flight
    kv.register(request)
    assert request.num_registered_blocks == 0
    request.output_token_ids.append(7)
    kv.register(request)
    assert request.num_registered_blocks == 1
    assert find(kv, make_request([1, 2, 3, 7, 0])) == request.block_ids
    assert find(kv, make_request([1, 2, 3, 8, 0])) == []


def test_hashes_are_made_once_and_are_unpredictable_across_managers():
    kv, other = KVCacheManager(10, 4, True), KVCacheManager(10, 4, True)
    request = make_request(list(range(9)))
    find(kv, request)
    first = list(request.block_hashes)
    find(kv, request)
    assert request.block_hashes == first and len(first) == 2
    twin = make_request(list(range(9)))
    other.find_hits(twin)
    assert not set(twin.block_hashes) & set(first)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({"cache_salt": None}, {"cache_salt": "None"}),
        ({"cache_extra": ("x", "y")}, {"cache_extra": ("x, y",)}),
        ({"cache_salt": "a"}, {"cache_extra": ("a",)}),
        ({"cache_extra": (1,)}, {"cache_extra": ("1",)}),
    ],
)
def test_different_salts_and_extras_never_meet(first, second):
    kv = KVCacheManager(10, 4, True)
    compute(kv, make_request(list(range(9)), **first))
    assert len(find(kv, make_request(list(range(9)), **first))) == 2
    assert find(kv, make_request(list(range(9)), **second)) == []


GROUPS = (CacheGroup((0,)), CacheGroup((1,), Reach(9)), CacheGroup((2,), Reach(14)))
CHUNKS = (
    CacheGroup((0,)), CacheGroup((1,), Reach(chunk_size=12)),
    CacheGroup((2,), Reach(chunk_size=10, chunk_lookback=1)),
)  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("groups", [GROUPS, GROUPS[:2], GROUPS[1:2], CHUNKS, CHUNKS[1:2]])
def test_a_hit_is_the_longest_prefix_that_all_groups_have(groups, seed):
    """Whatever was given away of a sequence: against trying every length."""
    draw = random.Random(seed)
    kv = KVCacheManager(200, 4, True, groups=groups, max_chunk=8)
    request = make_request(list(range(80)))
    while request.num_computed_tokens < 80:
        assert kv.allocate(request, 8) is not None
        request.num_computed_tokens += 8
        kv.register(request)
    kv.free(request)
    for block_id in draw.sample(range(1, 60), draw.randrange(12)):
        kv.pool.forget(block_id)

    def has(number: int, columns: range) -> bool:
        return all(kv._cached(request.block_hashes[i], number) is not None for i in columns)

    again = make_request([*range(80), 0])
    hits = kv.find_hits(again)
    expected = max(
        end for end in range(21)
        if all(has(n, range(g.first_block(end * 4, 4), end)) for n, g in enumerate(groups))
    )  # fmt: skip
    assert hits.num_blocks == expected
    assert kv.allocate(again, 81 - 4 * expected, hits) is not None
    again.num_computed_tokens = 81
    kv.check([again])


def test_a_hit_asks_few_blocks_where_nothing_is_cached():
    kv = KVCacheManager(200, 1, True, groups=(CacheGroup((0,), Reach(101)),))
    keys = []
    lookup = kv.pool.lookup
    kv.pool.lookup = lambda key: keys.append(key) or lookup(key)  # type: ignore[method-assign]
    assert kv.find_hits(make_request(list(range(10_001)))) == NO_HITS
    assert len(keys) == 100


def test_blocks_of_former_chunks_come_back():
    """Chunks of 12 tokens in blocks of 4, and of 10 tokens with the one before."""
    groups = (CacheGroup((0,), Reach(chunk_size=12)), CacheGroup((1,), CHUNKS[2].reach))
    kv = KVCacheManager(50, 4, False, groups=groups, max_chunk=4)
    request = make_request(list(range(44)))
    held = []
    for position in range(0, 44, 4):
        assert kv.allocate(request, 4) is not None
        held.append(tuple(sum(map(bool, table)) for table in request.tables))
        assert sum(held[-1]) == kv.num_used_blocks
        request.num_computed_tokens = position + 4
    # A token at 20 sees from 10 on, in block 2; at 40 from 30 on, in block 7.
    assert held == [
        (1, 1), (2, 2), (3, 3), (1, 4), (2, 5), (3, 4), (1, 5), (2, 6), (3, 4), (1, 5), (2, 4),
    ]  # fmt: skip
    assert [max(counts) for counts in zip(*held, strict=True)] == [3, 6]
    assert [group.most_blocks(44, 4, 4) for group in groups] == [4, 7]


def test_a_prefix_that_ends_with_a_chunk_needs_none_of_its_blocks():
    kv = KVCacheManager(50, 4, True, groups=CHUNKS[1:2], max_chunk=4)
    request = make_request(list(range(24)))
    while request.num_computed_tokens < 24:
        assert kv.allocate(request, 4) is not None
        request.num_computed_tokens += 4
        kv.register(request)
    for block_hash in request.block_hashes[3:6]:
        kv.pool.forget(kv.pool.lookup(block_hash))
    for length, hits, read in ((25, 6, 0), (24, 3, 0), (12, 2, 2)):
        found = kv.find_hits(make_request([*range(length - 1), 99]))
        assert (found.num_blocks, len(found.tables[0])) == (hits, read)


def test_what_a_failed_request_gave_back_is_not_found():
    kv = KVCacheManager(50, 4, True, groups=(CacheGroup((0,), Reach(6)),), max_chunk=4)
    request = make_request(list(range(40)))
    while request.num_computed_tokens < 40:
        assert kv.allocate(request, 4) is not None
        request.num_computed_tokens += 4
        kv.register(request)
    assert request.block_ids[:5] == [0] * 5
    early = make_request([*range(20), 99])
    assert kv.find_hits(early).num_blocks == 5
    kv.invalidate(request)
    assert kv.find_hits(early) == NO_HITS
    kv.free(request)
    assert kv.find_hits(early) == NO_HITS


def test_prompt_logprobs_bypass_the_lookup():
    kv = KVCacheManager(10, 4, True)
    compute(kv, make_request(list(range(9))))
    asking = make_request(list(range(9)), params=SamplingParams(prompt_logprobs=0))
    assert find(kv, asking) == []


def test_freed_blocks_are_hit_until_reused():
    kv = KVCacheManager(4, 4, True)
    request = make_request(list(range(9)))
    compute(kv, request)
    kv.free(request)
    assert kv.usage == 0.0
    assert len(find(kv, make_request(list(range(9))))) == 2
    compute(kv, make_request(list(range(50, 62))))
    assert find(kv, make_request(list(range(9)))) == [] and kv.usage == 1.0


def test_a_request_computed_again_is_registered_again():
    kv = KVCacheManager(4, 4, True)
    request = make_request(list(range(9)))
    compute(kv, request)
    kv.free(request)
    request.num_computed_tokens = 0
    intruder = make_request(list(range(50, 62)))
    compute(kv, intruder)
    kv.pool.release(intruder.block_ids)
    assert compute(kv, request) == []
    assert find(kv, make_request(list(range(9)))) == request.block_ids[:2]


def test_a_block_of_prompt_and_output_is_hashed_over_both():
    request = make_request([1, 2, 3])
    request.output_token_ids += [4, 5, 6, 7, 8]
    sequence = [1, 2, 3, 4, 5, 6, 7, 8]
    for start in range(8):
        for end in range(start, 9):
            assert request.known_tokens(start, end) == sequence[start:end]


def test_reset_only_while_no_block_is_in_use():
    kv = KVCacheManager(10, 4, True)
    request = make_request(list(range(9)))
    compute(kv, request)
    assert not kv.reset_prefix_cache()
    kv.free(request)
    assert kv.reset_prefix_cache()
    assert find(kv, make_request(list(range(9)))) == []
    kv.check([])


def test_caching_off_finds_and_registers_nothing():
    kv = KVCacheManager(10, 4, False)
    compute(kv, make_request(list(range(9))))
    assert find(kv, make_request(list(range(9)))) == []
