"""Cache events as vLLM 0.33 writes them: maps with their type, in a batch that is an array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core.cache.events import BlockRemoved, BlockStored, CacheEvent, KVCacheInfo
from ...core.cache.groups import CacheGroup

MEDIUM = "GPU"
"""Where the blocks are, in vLLM's words: in the memory of the device that computes."""


class WireForm:
    """Writes the events of one cache."""

    def __init__(self, cache: KVCacheInfo, *, int_block_hashes: bool) -> None:
        self._cache = cache
        self._ints = int_block_hashes
        self._kinds = [_kind(group) for group in cache.groups]

    def batch(self, seconds: float, events: Sequence[CacheEvent]) -> tuple[Any, ...]:
        """Return a batch. seconds: since 1970."""
        return seconds, [self._event(event) for event in events], self._cache.member

    def _event(self, event: CacheEvent) -> dict[str, Any]:
        if isinstance(event, BlockStored):
            return self._stored(event)
        if isinstance(event, BlockRemoved):
            return {
                "type": "BlockRemoved",
                "block_hashes": [self._hash(each) for each in event.block_hashes],
                "medium": MEDIUM,
                "group_idx": event.group,
            }
        return {"type": "AllBlocksCleared"}

    def _stored(self, event: BlockStored) -> dict[str, Any]:
        parent = event.parent_block_hash
        return {
            "type": "BlockStored",
            "block_hashes": [self._hash(each) for each in event.block_hashes],
            "parent_block_hash": None if parent is None else self._hash(parent),
            "token_ids": event.token_ids,
            "block_size": self._cache.block_size,
            "lora_id": None,
            "medium": MEDIUM,
            "lora_name": event.lora_name,
            "extra_keys": [keys or None for keys in event.extra_keys],
            "group_idx": event.group,
            **self._kinds[event.group],
        }

    def _hash(self, digest: bytes) -> int | bytes:
        return int.from_bytes(digest[-8:], "big") if self._ints else digest


def _kind(group: CacheGroup) -> dict[str, Any]:
    """Return how far back the layers of a group see."""
    reach = group.reach
    if reach is None:
        return {"kv_cache_spec_kind": "full_attention"}
    if reach.alignment > 1:
        return {"kv_cache_spec_kind": "chunked_local_attention"}
    return {
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": reach.most_tokens,
    }
