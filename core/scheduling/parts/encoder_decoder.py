"""Sources of encoder-decoder models: blocks for their keys and values, and time to encode them."""

from __future__ import annotations

from collections.abc import Callable

from ...cache.kv_manager import PrefixHits
from ...parts.encoder_decoder import NAME, EncodeItem, EncodePlan, Source, SourceStart
from ...request import Request
from ...step import TableWrite
from ..plan_builder import PlanBuilder
from .part import PartServices, SchedulerPart


class EncoderDecoder(SchedulerPart):
    """Pool blocks for sources' keys and values, found by content.

    Requests with equal sources (and salts) share blocks, also after preemption. Others are encoded
    whole, up to a number of tokens per plan.
    """

    name = NAME

    def __init__(self, services: PartServices, max_source_tokens: int) -> None:
        self._kv, self._pool = services.kv, services.kv.pool
        self._table = len(services.kv.groups)
        """Index of the sources' tables, after the groups'."""
        self._max_tokens = max(max_source_tokens, services.max_num_batched_tokens)
        """Most source tokens per step; no source is longer."""
        self._budget = self._max_tokens
        self._encode: list[EncodeItem] = []
        self._blocks: dict[str, list[int]] = {}

    @classmethod
    def maker(cls, max_source_tokens: int) -> Callable[[PartServices], EncoderDecoder]:
        return lambda services: cls(services, max_source_tokens)

    def begin_plan(self, builder: PlanBuilder) -> None:
        self._budget = self._max_tokens

    def cost(self, request: Request, hits: PrefixHits) -> int | None:
        """Return the source's blocks; 0 if running requests share them."""
        blocks = self._find(request)
        # Blocks that no request holds may be reused before `admit`.
        if blocks and not any(map(self._pool.is_free, blocks)):
            return 0
        if _source(request).num_tokens > self._budget:
            return None
        return self._num_blocks(request)

    def admit(self, request: Request, hits: PrefixHits, builder: PlanBuilder) -> None:
        """Hold the source's blocks, new ones if not encoded."""
        blocks = self._find(request)
        if blocks:
            self._pool.hold(blocks)
        else:
            source = _source(request)
            self._budget -= source.num_tokens
            blocks = self._pool.allocate(self._num_blocks(request))
            self._encode.append(EncodeItem(source, tuple(blocks)))
            # Known from now on: steps run in the order of their plans.
            keys = self._kv.source_keys(request, len(blocks))
            for block_id, key in zip(blocks if keys else (), keys, strict=True):
                self._pool.register(block_id, key)
        self._blocks[request.request_id] = blocks
        builder.table_writes.append(TableWrite(request.slot, self._table, 0, tuple(blocks)))

    def start_part(self, request: Request) -> SourceStart:
        return SourceStart(_source(request).num_tokens)

    def plan_part(self, step: int, builder: PlanBuilder) -> EncodePlan | None:
        if not self._encode:
            return None
        items, self._encode = self._encode, []
        return EncodePlan(tuple(items))

    def leave(self, request: Request) -> None:
        self._pool.release(self._blocks.pop(request.request_id))

    def invalidate(self, request: Request) -> None:
        for block_id in self._blocks.get(request.request_id, ()):
            self._pool.forget(block_id)

    def held_blocks(self, running: list[Request]) -> list[int]:
        ids = {request.request_id for request in running}
        assert ids == set(self._blocks), f"sources without a request: {ids ^ set(self._blocks)}"
        return [block_id for blocks in self._blocks.values() for block_id in blocks]

    def _num_blocks(self, request: Request) -> int:
        return self._kv.blocks_for(_source(request).num_tokens)

    def _find(self, request: Request) -> list[int]:
        """Return the source's blocks, all or []."""
        keys = self._kv.source_keys(request, self._num_blocks(request))
        blocks = [self._pool.lookup(key) for key in keys]
        return [] if None in blocks else [block_id for block_id in blocks if block_id is not None]


def _source(request: Request) -> Source:
    source: Source = request.parts[NAME]
    return source
