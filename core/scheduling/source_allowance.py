"""The allowance of encoder-decoder models: blocks for a request's source, and time to encode it."""

from __future__ import annotations

from collections.abc import Iterable

from ..cache.kv_manager import KVCacheManager
from ..request import Request
from ..step import EncodeItem, TableWrite
from .allowances import Allowance, Granted


class SourceAllowance(Allowance):
    """Blocks of the KV cache's pool for the keys and values of sources, found again by content.

    Requests with equal sources (and salts) share blocks: completions of one call, and a preempted
    request whose blocks were not reused meanwhile. Others are encoded again, whole sources at a
    time, up to a number of tokens per plan.
    """

    def __init__(self, kv: KVCacheManager, table: int, max_tokens: int) -> None:
        """table: the number of sources' block tables, behind those of groups of layers. max_tokens:
        tokens of sources that a step encodes at most; no source is longer."""
        self._kv, self._pool = kv, kv.pool
        self._table = table
        self._max_tokens = self._budget = max_tokens
        self._blocks: dict[str, list[int]] = {}
        """Request id → its blocks."""

    def begin_plan(self) -> None:
        """Open the tokens that one step encodes."""
        self._budget = self._max_tokens

    def cost(self, request: Request) -> int | None:
        """Return the blocks of the source, 0 if other running requests have them."""
        blocks = self._find(request)
        # Blocks that no request holds may be reused before `take`.
        if blocks and not any(map(self._pool.is_free, blocks)):
            return 0
        if len(request.source_token_ids) > self._budget:
            return None
        return self._num_blocks(request)

    def take(self, request: Request) -> Granted:
        """Hold the blocks of the source, new ones if it must be encoded."""
        blocks = self._find(request)
        encode: tuple[EncodeItem, ...] = ()
        if blocks:
            self._pool.hold(blocks)
        else:
            token_ids = tuple(request.source_token_ids)
            self._budget -= len(token_ids)
            blocks = self._pool.allocate(self._num_blocks(request))
            encode = (EncodeItem(token_ids, tuple(blocks)),)
            # Known from now on: steps run in the order of their plans.
            keys = self._kv.source_keys(request, len(blocks))
            for block_id, key in zip(blocks if keys else (), keys, strict=True):
                self._pool.register(block_id, key)
        self._blocks[request.request_id] = blocks
        return Granted((TableWrite(request.slot, self._table, 0, tuple(blocks)),), encode)

    def give_back(self, request: Request) -> None:
        """Release the blocks; their content is found until they are reused."""
        self._pool.release(self._blocks.pop(request.request_id))

    def invalidate(self, request: Request) -> None:
        """Remove the blocks' names."""
        for block_id in self._blocks.get(request.request_id, ()):
            self._pool.forget(block_id)

    def held_blocks(self, running: Iterable[Request]) -> list[int]:
        """Return the blocks of all sources."""
        ids = {request.request_id for request in running}
        assert ids == set(self._blocks), f"sources without a request: {ids ^ set(self._blocks)}"
        return [block_id for blocks in self._blocks.values() for block_id in blocks]

    def _num_blocks(self, request: Request) -> int:
        return self._kv.blocks_for(len(request.source_token_ids))

    def _find(self, request: Request) -> list[int]:
        """Return the blocks that have the source, all of them or []."""
        keys = self._kv.source_keys(request, self._num_blocks(request))
        blocks = [self._pool.lookup(key) for key in keys]
        return [] if None in blocks else [block_id for block_id in blocks if block_id is not None]
