"""Blocks of the KV cache: reference counts, free list, hashes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Protocol

NULL_BLOCK = 0
"""Padding rows write here; never allocated."""


class RemovalWatch(Protocol):
    """Follows which blocks hits no longer find."""

    def removed(self, key: bytes) -> None: ...
    def cleared(self) -> None: ...


class BlockPool:
    """Ref-counted blocks 1 .. num_blocks - 1; operations are O(1) per block.

    A free block keeps its hash and content until reallocation, for hits. Free blocks without a hash
    are allocated first, then in LRU order.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (one is the null block): {num_blocks}")
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self.watch: RemovalWatch | None = None

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Free blocks, cached or not."""
        return len(self._free)

    def is_free(self, block_id: int) -> bool:
        return self._ref_counts[block_id] == 0

    def num_holders(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def is_private(self, block_id: int) -> bool:
        return self._ref_counts[block_id] == 1

    def next_free(self, count: int) -> list[int]:
        """Return what `allocate` would, or fewer."""
        return list(islice(self._free, count))

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks without hashes; the caller has checked `num_free`."""
        hashes, ref_counts, free = self._hashes, self._ref_counts, self._free
        blocks = list(islice(free, count))
        for block_id in blocks:
            del free[block_id]
            if hashes[block_id] is not None:
                self.forget(block_id)
            ref_counts[block_id] = 1
        return blocks

    def hold(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop a reference of each block, last first, so that tails are reused first."""
        hashes, ref_counts, free = self._hashes, self._ref_counts, self._free
        for block_id in reversed(block_ids):
            count = ref_counts[block_id] - 1
            if count < 0:
                raise AssertionError(f"block {block_id} is freed twice")
            ref_counts[block_id] = count
            if count == 0:
                free[block_id] = None
                if hashes[block_id] is None:
                    free.move_to_end(block_id, last=False)

    def lookup(self, block_hash: bytes) -> int | None:
        """Return the block with this content, or None."""
        return self._cached.get(block_hash)

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Let hits find this block, unless another has this content."""
        self.register_all((block_id,), (block_hash,))

    def register_all(self, block_ids: Iterable[int], block_hashes: Iterable[bytes]) -> None:
        """Register blocks except the null block."""
        hashes, enter = self._hashes, self._cached.setdefault
        for block_id, block_hash in zip(block_ids, block_hashes, strict=True):
            if block_id != NULL_BLOCK and enter(block_hash, block_id) == block_id:
                hashes[block_id] = block_hash

    def forget(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            del self._cached[block_hash]
            self._hashes[block_id] = None
            if self.watch is not None:
                self.watch.removed(block_hash)

    def forget_all(self) -> None:
        for block_id in self._cached.values():
            self._hashes[block_id] = None
        self._cached.clear()
        if self.watch is not None:
            self.watch.cleared()

    def check(self, references: Iterable[int]) -> None:
        """Raise AssertionError unless `references` (one entry per holder) explains all counts."""
        expected = [0] * self.num_blocks
        for block_id in references:
            expected[block_id] += 1
        assert expected[NULL_BLOCK] == 0, "the null block is held by a request"
        for block_id, (want, have) in enumerate(zip(expected, self._ref_counts, strict=True)):
            assert want == have, f"block {block_id} has {have} references, {want} holders"
            free = block_id in self._free
            assert free == (want == 0 and block_id != NULL_BLOCK), (
                f"block {block_id} with {want} holders is {'' if free else 'not '}in the free list"
            )
        for block_hash, block_id in self._cached.items():
            assert self._hashes[block_id] == block_hash, f"block {block_id} has another hash"
        num_hashed = sum(block_hash is not None for block_hash in self._hashes)
        assert num_hashed == len(self._cached), f"{num_hashed} hashes, {len(self._cached)} indexed"
