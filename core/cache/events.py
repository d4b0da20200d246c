"""What changes in the set of blocks that prefix hits find, for those who watch it from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import msgspec

from ..request import Request
from .groups import CacheGroup
from .prefix_index import DIGEST_BYTES


class KVCacheInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache of an engine."""

    member: int
    """The engine's number, of several (`data_parallel_size`); 0: the first, or the only one."""
    block_size: int
    """Tokens per block."""
    num_blocks: int
    groups: tuple[CacheGroup, ...]
    """Layers that share a block table. A prefix of tokens has its blocks in each of them."""
    enable_prefix_caching: bool


class BlockStored(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that follow each other in a request were cached."""

    group: int
    """Number of the cache group, in `KVCacheInfo.groups`."""
    block_hashes: tuple[bytes, ...]
    """[num_blocks]; of 32 bytes each."""
    parent_block_hash: bytes | None
    """Hash of the block before them; None: they are the first ones."""
    token_ids: list[int]
    """[num_blocks * block_size]"""
    extra_keys: tuple[tuple[str | int | tuple[str, int], ...], ...]
    """[num_blocks]: what else a block's hash depends on from there on: in the first block of a
    request its adapter, `cache_salt` and source, in others items that begin there, each as (digest,
    offset in the block)."""
    lora_name: str | None


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks are no longer found."""

    group: int
    block_hashes: tuple[bytes, ...]


class AllBlocksCleared(msgspec.Struct, frozen=True):
    """No block that was cached so far is found any more."""


CacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class CacheEvents:
    """Collects the events of a cache, in order.

    Blocks of requests alone: those of an encoder-decoder's source, and of requests that only their
    siblings find, are left out.
    """

    def __init__(
        self,
        block_size: int,
        adapter_name: Callable[[Request], str | None] = lambda _: None,
        cleared: Callable[[], object] = lambda: None,
    ) -> None:
        """cleared: called when all blocks are, perhaps while no step runs."""
        self._block_size = block_size
        self._adapter_name = adapter_name
        self._when_cleared = cleared
        self._events: list[CacheEvent] = []
        self._removed: list[bytes] = []
        """Hashes removed from `_removed_group` since the last event."""
        self._removed_group = 0

    def take(self) -> list[CacheEvent]:
        """Return the events since the last call."""
        self._end_removed()
        events, self._events = self._events, []
        return events

    def stored(
        self, request: Request, group: int, first: int, hashes: Sequence[bytes], new: Iterable[int]
    ) -> None:
        """Blocks of a request were cached.

        first: number of the block in the request that has the first of `hashes`. new: places in
        `hashes` of blocks that were not cached before, ascending.
        """
        if request.private_salt is not None:
            return
        if len(request.block_hashes) < first + len(hashes):
            return  # Other weights compute by now; under these keys no request will look.
        run: list[int] = []
        for place in new:
            if run and place != run[-1] + 1:
                self._store(request, group, first, hashes, run)
                run = []
            run.append(place)
        if run:
            self._store(request, group, first, hashes, run)

    def _store(
        self, request: Request, group: int, first: int, hashes: Sequence[bytes], run: list[int]
    ) -> None:
        self._end_removed()
        begin, size = first + run[0], self._block_size
        end = begin + len(run)
        parent = None
        if begin:
            parent = hashes[run[0] - 1] if run[0] else request.block_hashes[begin - 1]
        self._events.append(
            BlockStored(
                group=group,
                block_hashes=tuple(hashes[place][:DIGEST_BYTES] for place in run),
                parent_block_hash=None if parent is None else parent[:DIGEST_BYTES],
                token_ids=list(request.known_tokens(begin * size, end * size)),
                extra_keys=tuple(self._extra_keys(request, block) for block in range(begin, end)),
                lora_name=self._adapter_name(request),
            )
        )

    def _extra_keys(self, request: Request, block: int) -> tuple[str | int | tuple[str, int], ...]:
        keys: list[str | int | tuple[str, int]] = []
        if block == 0:
            keys += request.cache_extra
            if request.cache_salt is not None:
                keys.append(request.cache_salt)
        for position, digest in request.late_extra:
            if position // self._block_size == block:
                keys.append((digest, position % self._block_size))
        return tuple(keys)

    def removed(self, key: bytes) -> None:
        """A block is no longer found under this key: its hash, and the number of a group but the
        first."""
        group = key[DIGEST_BYTES:]
        if len(group) > 1:  # Of a source.
            return
        number = group[0] if group else 0
        if number != self._removed_group:
            self._end_removed()
            self._removed_group = number
        self._removed.append(key[:DIGEST_BYTES])

    def cleared(self) -> None:
        self._removed.clear()
        self._events = [AllBlocksCleared()]
        self._when_cleared()

    def _end_removed(self) -> None:
        if self._removed:
            hashes, self._removed = tuple(self._removed), []
            self._events.append(BlockRemoved(group=self._removed_group, block_hashes=hashes))
