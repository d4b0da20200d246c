"""The manager's contract: lookups without effect, allocation all or nothing, chained hashes."""

from __future__ import annotations

import pytest

from jackfield.core.cache.kv_manager import KVCacheManager
from jackfield.core.scheduling.request import Request
from jackfield.core.types import SamplingParams


def make_request(tokens: list[int], **more) -> Request:
    return Request("r", tokens, more.pop("params", SamplingParams()), max_tokens=8, seed=0, **more)


def compute(kv: KVCacheManager, request: Request) -> list[int]:
    """Plan all known tokens; returns the blocks hit."""
    hits = kv.find_hits(request)
    left = request.num_known_tokens - len(hits) * kv.block_size
    assert kv.allocate(request, left, hits) is not None
    request.num_computed_tokens += left
    kv.register(request)
    return hits


def snapshot(kv: KVCacheManager, request: Request) -> tuple:
    return kv.pool.num_free, list(request.block_ids), request.num_computed_tokens


def test_lookup_changes_nothing():
    kv = KVCacheManager(10, 4, True)
    first, second = make_request(list(range(12))), make_request(list(range(12)))
    compute(kv, first)
    before = snapshot(kv, second)
    assert kv.find_hits(second) == kv.find_hits(second) == first.block_ids[:2]
    assert snapshot(kv, second) == before


@pytest.mark.parametrize(("length", "blocks"), [(8, 1), (9, 2), (4, 0), (1, 0)])
def test_hits_always_leave_a_token_to_compute(length, blocks):
    kv = KVCacheManager(10, 4, True)
    compute(kv, make_request(list(range(12))))
    assert len(kv.find_hits(make_request(list(range(length))))) == blocks


def test_a_difference_anywhere_before_ends_the_hits():
    kv = KVCacheManager(10, 4, True)
    compute(kv, make_request(list(range(16))))
    assert len(kv.find_hits(make_request([*range(16), 0]))) == 4
    changed = [*range(16), 0]
    changed[5] = 99
    assert len(kv.find_hits(make_request(changed))) == 1
    changed[0] = 99
    assert kv.find_hits(make_request(changed)) == []


def test_failed_allocation_changes_nothing():
    kv = KVCacheManager(6, 4, True)
    first = make_request(list(range(12)))
    compute(kv, first)
    kv.free(first)
    request = make_request([*range(12), *range(50, 62)])
    hits = kv.find_hits(request)
    assert len(hits) == 3
    before = snapshot(kv, request)
    assert kv.allocate(request, 12, hits) is None, "3 hits revived and 3 new are more than 5"
    assert snapshot(kv, request) == before
    assert kv.allocate(request, 8, hits) is not None
    kv.check([request])


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
    assert kv.find_hits(make_request([1, 2, 3, 7, 0])) == request.block_ids
    assert kv.find_hits(make_request([1, 2, 3, 8, 0])) == []


def test_hashes_are_made_once_and_are_unpredictable_across_managers():
    kv, other = KVCacheManager(10, 4, True), KVCacheManager(10, 4, True)
    request = make_request(list(range(9)))
    kv.find_hits(request)
    first = list(request.block_hashes)
    kv.find_hits(request)
    assert request.block_hashes == first and len(first) == 2
    twin = make_request(list(range(9)))
    other.find_hits(twin)
    assert not set(twin.block_hashes) & set(first)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({"cache_salt": None}, {"cache_salt": "None"}),
        ({"cache_extra": ("x", "y")}, {"cache_extra": ("x, y",)}),
        ({"cache_salt": "a"}, {"cache_extra": ("a",)}),
        ({"cache_extra": (1,)}, {"cache_extra": ("1",)}),
    ],
)
def test_different_salts_and_extras_never_meet(one, two):
    kv = KVCacheManager(10, 4, True)
    compute(kv, make_request(list(range(9)), **one))
    assert len(kv.find_hits(make_request(list(range(9)), **one))) == 2
    assert kv.find_hits(make_request(list(range(9)), **two)) == []


def test_prompt_logprobs_bypass_the_lookup():
    kv = KVCacheManager(10, 4, True)
    compute(kv, make_request(list(range(9))))
    asking = make_request(list(range(9)), params=SamplingParams(prompt_logprobs=0))
    assert kv.find_hits(asking) == []


def test_freed_blocks_are_hit_until_reused():
    kv = KVCacheManager(4, 4, True)
    request = make_request(list(range(9)))
    compute(kv, request)
    kv.free(request)
    assert kv.usage == 0.0
    assert len(kv.find_hits(make_request(list(range(9))))) == 2
    compute(kv, make_request(list(range(50, 62))))
    assert kv.find_hits(make_request(list(range(9)))) == [] and kv.usage == 1.0


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
    assert kv.find_hits(make_request(list(range(9)))) == request.block_ids[:2]


def test_a_block_of_prompt_and_output_is_hashed_over_both():
    request = make_request([1, 2, 3])
    request.output_token_ids += [4, 5, 6, 7, 8]
    sequence = [1, 2, 3, 4, 5, 6, 7, 8]
    for start in range(8):
        for end in range(start, 9):
            assert request.known_tokens(start, end) == sequence[start:end]


def test_reset_only_while_nothing_is_held():
    kv = KVCacheManager(10, 4, True)
    request = make_request(list(range(9)))
    compute(kv, request)
    assert not kv.reset_prefix_cache()
    kv.free(request)
    assert kv.reset_prefix_cache()
    assert kv.find_hits(make_request(list(range(9)))) == []
    kv.check([])


def test_caching_off_finds_and_registers_nothing():
    kv = KVCacheManager(10, 4, False)
    compute(kv, make_request(list(range(9))))
    assert kv.find_hits(make_request(list(range(9)))) == []
