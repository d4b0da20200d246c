"""Snapshots of layers' states: which prefixes have them."""

from __future__ import annotations

from ...cache.kv_manager import PrefixHits
from ...cache.snapshots import StateSnapshots
from ...parts.states import NAME, StateCopy, StatePlan
from ...request import Request
from ..plan_builder import PlanBuilder
from .part import PartServices, SchedulerPart


class States(SchedulerPart):
    """Ends prompt chunks where states are worth keeping: after blocks that an equal request would
    find, and after prefixes shared with earlier requests.
    """

    name = NAME

    def __init__(self, services: PartServices) -> None:
        """Requires a cache with room for snapshots."""
        assert services.kv.snapshots is not None, "no room for snapshots"
        self._kv = services.kv
        self._snapshots: StateSnapshots = services.kv.snapshots
        self._chunked = services.chunked
        self._shared: dict[Request, int] = {}
        """Running request → shared prefix without states, which this request will keep."""
        self._loads: list[StateCopy] = []
        self._saves: list[StateCopy] = []

    def enter(self, request: Request, hits: PrefixHits) -> None:
        self._shared[request] = hits.num_seen * self._kv.block_size

    def admit(self, request: Request, hits: PrefixHits, builder: PlanBuilder) -> None:
        if hits.state is not None:
            self._loads.append(StateCopy(request.slot, self._snapshots.use(hits.state)))

    def look_at(self, request: Request) -> int | None:
        """Look at the chunk that passes the next boundary."""
        if not self._chunked:
            return None
        computed = request.num_computed_tokens
        return min((b for b in self._boundaries(request) if b > computed), default=None)

    def chunk_tokens(self, request: Request, count: int) -> int:
        boundary = self.look_at(request)
        return count if boundary is None else min(count, boundary - request.num_computed_tokens)

    def chunk_planned(self, request: Request) -> None:
        computed = request.num_computed_tokens
        if computed > 0 and computed in self._boundaries(request):
            row = self._kv.snapshot(request)
            if row is not None:
                self._saves.append(StateCopy(request.slot, row))

    def plan_part(self, step: int, builder: PlanBuilder) -> StatePlan | None:
        """Return the plan's copies; its snapshots are found from now on."""
        self._snapshots.commit()
        if not self._loads and not self._saves:
            return None
        part = StatePlan(tuple(self._loads), tuple(self._saves))
        self._loads, self._saves = [], []
        return part

    def leave(self, request: Request) -> None:
        del self._shared[request]

    def _boundaries(self, request: Request) -> tuple[int, int]:
        size = self._kv.block_size
        return (request.num_known_tokens - 1) // size * size, self._shared.get(request, 0)
