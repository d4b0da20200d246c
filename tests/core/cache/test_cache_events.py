"""Events of a cache: what a reader of them knows of blocks and their tokens."""

from __future__ import annotations

from test_kv_manager import compute, make_request

from jackfield.core.cache.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheEvents,
)
from jackfield.core.cache.groups import CacheGroup
from jackfield.core.cache.kv_manager import KVCacheManager
from jackfield.core.cache.reach import Reach
from jackfield.core.parts.adapters import NAME, AdapterUse, adapter_name


def watched(num_blocks: int = 10, **options) -> tuple[KVCacheManager, CacheEvents]:
    kv, events = KVCacheManager(num_blocks, 4, True, **options), CacheEvents(4, adapter_name)
    kv.watch(events)
    return kv, events


def test_stored_blocks_have_tokens_and_the_hash_of_the_block_before():
    kv, events = watched()
    request = make_request(list(range(10)))
    compute(kv, request)
    (first,) = events.take()
    assert first.token_ids == list(range(8)) and first.parent_block_hash is None
    assert list(first.block_hashes) == request.block_hashes and len(first.block_hashes[0]) == 32
    request.output_token_ids += [70, 71, 72]
    assert kv.allocate(request, 3) is not None
    request.num_computed_tokens += 3
    kv.register(request)
    (second,) = events.take()
    assert second.token_ids == [8, 9, 70, 71]
    assert second.parent_block_hash == first.block_hashes[-1]


def test_what_was_found_is_not_stored_again():
    kv, events = watched()
    compute(kv, make_request(list(range(9))))
    events.take()
    compute(kv, make_request([*range(8), 50, 51, 52, 53, 54]))
    (event,) = events.take()
    assert event.token_ids == [50, 51, 52, 53]


def test_reused_blocks_are_removed_before_their_new_content_is_stored():
    kv, events = watched(num_blocks=4)  # One is the null block.
    first = make_request(list(range(12)))
    compute(kv, first)
    kv.free(first)
    stored = events.take()
    compute(kv, make_request(list(range(20, 32))))
    removed, added = events.take()
    assert isinstance(removed, BlockRemoved) and isinstance(added, BlockStored)
    assert set(removed.block_hashes) == {each for event in stored for each in event.block_hashes}


def test_what_a_hash_depends_on_besides_tokens_is_named_where_it_begins():
    kv, events = watched(num_blocks=20)
    request = make_request(
        list(range(17)), cache_salt="tenant", cache_extra=("digest of an adapter",),
        late_extra=((9, "digest of a picture"),), parts={NAME: AdapterUse(1, 1, 0, "poet")},
    )  # fmt: skip
    compute(kv, request)
    (event,) = events.take()
    assert event.lora_name == "poet"
    assert event.extra_keys == (
        ("digest of an adapter", "tenant"), (), (("digest of a picture", 1),), (),
    )  # fmt: skip
    activated = make_request(list(range(40, 49)), parts={NAME: AdapterUse(1, 1, 5, "poet")})
    compute(kv, activated)
    (event,) = events.take()
    assert event.lora_name is None, "its first blocks are those of the base model"


def test_each_group_has_its_own_blocks():
    kv, events = watched(num_blocks=30, groups=(CacheGroup((0,)), CacheGroup((1,), Reach(6))))
    request = make_request(list(range(12)))
    compute(kv, request)
    stored = events.take()
    assert [event.group for event in stored] == [0, 1]
    assert stored[0].block_hashes == stored[1].block_hashes
    kv.invalidate(request)
    removed = events.take()
    assert {(event.group, each) for event in removed for each in event.block_hashes} == {
        (group, each) for group in (0, 1) for each in request.block_hashes[:3]
    }


def test_a_reset_clears_what_was_said_and_tells_at_once():
    told = []
    kv = KVCacheManager(10, 4, True)
    events = CacheEvents(4, cleared=lambda: told.append(events.take()))
    kv.watch(events)
    request = make_request(list(range(12)))
    compute(kv, request)
    kv.free(request)
    assert kv.reset_prefix_cache()
    assert told == [[AllBlocksCleared()]]


def test_other_weights_clear_all_and_name_anew():
    kv, events = watched()
    request = make_request(list(range(12)))
    compute(kv, request)
    events.take()
    kv.change_weights("others", [request])
    assert events.take() == [AllBlocksCleared()]
    compute(kv, make_request(list(range(12))))
    (event,) = events.take()
    assert event.token_ids == list(range(12))


def test_blocks_for_siblings_alone_are_not_told():
    kv = KVCacheManager(10, 4, enable_prefix_caching=False)
    events = CacheEvents(4)
    kv.watch(events)
    compute(kv, make_request(list(range(12)), private_salt="theirs"))
    assert events.take() == []
