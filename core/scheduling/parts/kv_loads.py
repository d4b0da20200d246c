"""The KV loads that have begun, and what came of those that ended."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ...cache.kv_manager import KVCacheManager
from ...request import Request, Status


@dataclass(slots=True)
class Load:
    """Fills blocks that no prefix hit can find before its end."""

    request: Request
    num_hits: int
    """Blocks cached before, held until then."""
    block_ids: list[int]
    keys: list[bytes]

    @property
    def waits(self) -> bool:
        """Whether its request still waits for it."""
        return self.request.status is Status.LOADING


class Loads:
    """Loads by the number of their transfer."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._loads: dict[int, Load] = {}
        self._keys: set[bytes] = set()
        """Keys of all of them."""
        self.num_failed = 0
        self.num_loaded_tokens = 0

    def __iter__(self) -> Iterator[int]:
        return iter([*self._loads])

    def any_of(self, keys: Sequence[bytes]) -> bool:
        """Return whether one of these blocks is being loaded."""
        return not self._keys.isdisjoint(keys)

    def begin(self, transfer: int, load: Load) -> None:
        self._loads[transfer] = load
        self._keys.update(load.keys)

    def end(self, transfer: int) -> Load | None:
        """Forget a load. None: the transfer is not one."""
        load = self._loads.pop(transfer, None)
        if load is not None:
            self._keys.difference_update(load.keys)
        return load

    def give_up(self, transfer: int) -> Load | None:
        """Forget a load that fills no block."""
        load = self.end(transfer)
        if load is not None:
            self.num_failed += 1
        return load

    def register(self, load: Load, unfilled: Collection[int]) -> list[tuple[int, bytes]]:
        """Register the blocks of an ended load up to the first unfilled one. Return these, with
        their keys."""
        filled = []
        for block_id, key in zip(load.block_ids, load.keys, strict=True):
            if block_id in unfilled:
                self.num_failed += 1
                break
            filled.append((block_id, key))
        blocks, keys = [block_id for block_id, _ in filled], [key for _, key in filled]
        self._kv.register_as(load.request, load.num_hits, blocks, keys)
        load.request.num_loaded_tokens = len(filled) * self._kv.block_size
        self.num_loaded_tokens += load.request.num_loaded_tokens
        return filled

    def clear(self) -> None:
        self._loads.clear()
        self._keys.clear()

    def awaited(self) -> list[Request]:
        """Return the requests that wait for a load."""
        return [load.request for load in self._loads.values() if load.waits]

    def check(self) -> None:
        """Raise AssertionError if a hit could find a block that is being filled."""
        loads = self._loads.values()
        keys = [key for load in loads for key in load.keys]
        assert set(keys) == self._keys, "pending keys differ from the loads'"
        for load in loads:
            for key in load.keys:
                assert self._kv.pool.lookup(key) not in load.block_ids, (
                    "a hit could find a block that is being filled"
                )
