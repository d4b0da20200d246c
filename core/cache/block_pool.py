"""Ref-counted KV blocks: a free list in LRU order, and an index of cached ones by hash."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

NULL_BLOCK = 0
"""Never handed out: padding rows write there."""


class BlockPool:
    """`num_blocks` blocks, ids 1 .. num_blocks - 1, each free or held by some number of requests.

    A free block may still be cached: its content is good until the block is handed out again,
    which happens in the order in which blocks became free (least recently used first).
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks: a pool needs the null block and one more, {num_blocks=}")
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks held by requests."""
        return self.num_blocks - 1 - len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks found by hash."""
        return len(self._cached)

    def find(self, block_hash: bytes) -> int | None:
        """The cached block with this content, held or free."""
        return self._cached.get(block_hash)

    def is_free(self, block: int) -> bool:
        """Nobody holds it."""
        return self._refs[block] == 0

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks, forgetting what they cached. Raises ValueError if too few."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} free")
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._refs[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each of these cached blocks."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One holder less for each; those without holders become free, in the order given."""
        for block in blocks:
            if self._refs[block] <= 0:
                raise ValueError(f"block {block} is released, but nobody holds it")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None

    def register(self, block: int, block_hash: bytes) -> None:
        """Make a full block findable. The first block with a content keeps its place."""
        if block_hash not in self._cached and self._hashes[block] is None:
            self._cached[block_hash] = block
            self._hashes[block] = block_hash

    def forget_all(self) -> None:
        """Drop the index."""
        self._cached.clear()
        self._hashes = [None] * self.num_blocks

    def check(self, holders: dict[int, int]) -> None:
        """AssertionError unless exactly `holders` (block → count) hold blocks and all is consistent."""
        for block in range(1, self.num_blocks):
            expected = holders.get(block, 0)
            assert self._refs[block] == expected, (
                f"block {block}: {self._refs[block]} references, {expected} holders"
            )
            assert (block in self._free) == (expected == 0), f"block {block}: free list is wrong"
        assert NULL_BLOCK not in holders and NULL_BLOCK not in self._free
        for block_hash, block in self._cached.items():
            assert self._hashes[block] == block_hash, f"block {block}: index and hash disagree"

    def _forget(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            self._hashes[block] = None
            del self._cached[block_hash]
