"""Which saved block goes first when a tier is full."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple, TypeAlias

Eviction: TypeAlias = Literal["recency", "frequency", "importance"]
"""recency: the least recently used. frequency: the least often used, where uses before others were
evicted count less (LFU with dynamic aging, https://doi.org/10.1145/346152.346163). importance:
that of the least urgent requests, by the smallest `priority` of those that used it. Among equals,
the least recently used."""


class SavedBlock(NamedTuple):
    row: int
    rank: int
    """The lowest goes first."""
    uses: int


class SavedBlocks:
    """Rows by block key, in the order of eviction."""

    def __init__(self, eviction: Eviction = "recency") -> None:
        self._eviction = eviction
        self._blocks: dict[bytes, SavedBlock] = {}
        self._ranks: list[int] = []
        """Ranks of `_keys`, ascending."""
        self._keys: dict[int, OrderedDict[bytes, None]] = {}
        """Rank → keys, least recently used first."""
        self._age = 0
        """Rank of the last block that was evicted by frequency."""

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over keys, the next one to go first."""
        for rank in self._ranks:
            yield from self._keys[rank]

    def row(self, key: bytes) -> int | None:
        block = self._blocks.get(key)
        return None if block is None else block.row

    def add(self, key: bytes, row: int, priority: int) -> None:
        """Add a block that a request of this priority has saved, or one's row anew."""
        self._forget(key)
        self._place(key, row, count=1, rank=-priority)

    def use(self, key: bytes, priority: int) -> None:
        """Note that a request of this priority reads a block."""
        if (block := self._blocks.get(key)) is not None:
            self._forget(key)
            self._place(key, block.row, block.uses + 1, max(block.rank, -priority))

    def evict(self, kept: Collection[int]) -> int | None:
        """Forget the first block whose row is not among `kept`, and return its row; None: there is
        none.
        """
        key = next((key for key in self if self._blocks[key].row not in kept), None)
        if key is None:
            return None
        block = self._forget(key)
        assert block is not None
        if self._eviction == "frequency":
            self._age = block.rank
        return block.row

    def _place(self, key: bytes, row: int, count: int, rank: int) -> None:
        """rank: by importance."""
        if self._eviction != "importance":
            rank = self._age + count if self._eviction == "frequency" else 0
        if rank not in self._keys:
            insort(self._ranks, rank)
            self._keys[rank] = OrderedDict()
        self._keys[rank][key] = None
        self._blocks[key] = SavedBlock(row, rank, count)

    def _forget(self, key: bytes) -> SavedBlock | None:
        block = self._blocks.pop(key, None)
        if block is not None:
            keys = self._keys[block.rank]
            del keys[key]
            if not keys:
                del self._keys[block.rank]
                self._ranks.remove(block.rank)
        return block
