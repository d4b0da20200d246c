"""The scheduler's books on KV transfers: which blocks a connector reads or fills, and for whom."""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from ..cache.kv_manager import KVCacheManager
from ..protocols import KVConnectorScheduler
from ..types import KVReport
from .request import Request, Status

logger = logging.getLogger("jackfield.engine")


class Fetch(enum.Enum):
    """What asking the connector about a waiting request came to."""

    NOTHING = enum.auto()
    """Nothing to load: admit it as usual."""
    LATER = enum.auto()
    """Not known yet, or another request is loading the same: pass it over."""
    NO_ROOM = enum.auto()
    STARTED = enum.auto()


@dataclass(slots=True)
class _Load:
    request: Request
    num_hits: int
    """Blocks that were cached before, held so that they stay."""
    block_ids: list[int]
    keys: list[bytes]
    """[len(block_ids)]"""


class Transfers:
    """Asks the connector, and holds the blocks of every transfer until its end is reported.

    A load fills blocks that no hit can find. Those that were filled are named when it has ended:
    it is the prefix cache that the request then finds them in. So a failed load is a shorter hit,
    and a request that waits holds nothing.
    """

    def __init__(
        self, connector: KVConnectorScheduler, kv: KVCacheManager, *, loads: bool, saves: bool
    ) -> None:
        self.connector = connector
        self.kv = kv
        self._loading = loads
        self._saving = saves
        self._numbers = count()
        self._held: dict[int, list[int]] = {}
        """Transfer → blocks held, one reference each."""
        self._loads: dict[int, _Load] = {}
        self._keys_under_way: set[bytes] = set()
        self._news = False
        self.counts = {
            "external_prefix_cache_queries": 0,
            "external_prefix_cache_hits": 0,
            "num_kv_load_failures": 0,
        }
        """For `EngineStats`."""

    # ------------------------------------------------------------ loads

    def fetch(self, request: Request, hits: list[int], reserve: int) -> Fetch:
        """Load what the connector has past `hits`, if it has any."""
        if not self._loading or request.external_end == 0:
            return Fetch.NOTHING
        if request.params.prompt_logprobs is not None:
            return Fetch.NOTHING
        kv = self.kv
        block_size = kv.block_size
        computed = len(hits) * block_size
        # Asked when there is room, so that little time lies between the answer and the load.
        if not kv.can_hold(request.num_tokens, hits, reserve):
            return Fetch.NO_ROOM
        if request.external_end is None:
            limit = (request.num_known_tokens - 1) // block_size * block_size
            found = self.connector.num_external_tokens(request, computed) if limit > computed else 0
            if found is None:
                return Fetch.LATER
            self.counts["external_prefix_cache_queries"] += limit - computed
            end = min(computed + found, limit) // block_size * block_size
            request.external_end = end if end > computed else 0
        if request.external_end <= computed:
            return Fetch.NOTHING
        keys = kv.block_keys(request, request.external_end // block_size)[len(hits) :]
        if not self._keys_under_way.isdisjoint(keys):
            return Fetch.LATER
        kv.pool.hold(hits)
        blocks = kv.pool.allocate(len(keys))
        transfer = next(self._numbers)
        self._held[transfer] = [*hits, *blocks]
        self._loads[transfer] = _Load(request, len(hits), blocks, keys)
        self._keys_under_way.update(keys)
        request.status = Status.LOADING
        request.external_end = 0
        self.connector.start_load(transfer, request, keys, blocks)
        return Fetch.STARTED

    # ------------------------------------------------------------ saves

    def offer(self, request: Request, num_computed: int) -> None:
        """Steps have brought results for the request's first `num_computed` tokens: what is new
        and full may be saved."""
        first, full = request.num_offered_blocks, num_computed // self.kv.block_size
        if full <= first or not self._saving:
            return
        request.num_offered_blocks = full
        blocks = request.block_ids[first:full]
        keys = self.kv.block_keys(request, full)[first:]
        transfer = next(self._numbers)
        wanted = list(self.connector.start_save(transfer, request, keys, blocks))
        if wanted:
            self._hold(transfer, wanted)

    def finish(self, request: Request) -> None:
        """The request has ended, and still has its blocks."""
        transfer = next(self._numbers)
        held, request.kv_transfer_params = self.connector.request_finished(transfer, request)
        if held and request.block_ids:
            self._hold(transfer, list(request.block_ids))

    def _hold(self, transfer: int, block_ids: list[int]) -> None:
        self.kv.pool.hold(block_ids)
        self._held[transfer] = block_ids

    # ------------------------------------------------------------ steps

    def expect_report(self) -> None:
        """The worker half has news: a step is needed to bring them."""
        self._news = True

    def take_news(self) -> bool:
        """Whether a step is needed for its report alone; asked once for each that is planned."""
        news, self._news = self._news, False
        return news

    def take(self, report: KVReport) -> list[tuple[Request, bool]]:
        """Let go of what has ended → requests whose load has, and whether it brought everything.

        A request that ended meanwhile is not among them.
        """
        ended = []
        failed: tuple[int, ...]
        for transfer, failed in [*((t, ()) for t in report.finished), *report.failed.items()]:
            block_ids = self._held.pop(transfer, None)
            if block_ids is None:
                logger.error("the KV connector ended transfer %d, which is not under way", transfer)
                continue
            load = self._loads.pop(transfer, None)
            if load is not None:
                complete = self._loaded(load, failed)
                if load.request.status is Status.LOADING:
                    ended.append((load.request, complete))
            self.kv.pool.release(block_ids)
        self.connector.update(report)
        return ended

    def _loaded(self, load: _Load, failed: tuple[int, ...]) -> bool:
        """Name the blocks that were filled, up to the first that was not."""
        self._keys_under_way.difference_update(load.keys)
        unfilled = set(failed)
        num_filled = 0
        for block_id, key in zip(load.block_ids, load.keys, strict=True):
            if block_id in unfilled:
                break
            self.kv.pool.register(block_id, key)
            num_filled += 1
        load.request.num_loaded_tokens = num_filled * self.kv.block_size
        self.counts["external_prefix_cache_hits"] += num_filled * self.kv.block_size
        if num_filled < len(load.keys):
            self.counts["num_kv_load_failures"] += 1
            return False
        return True

    def abandon(self) -> None:
        """No report will come any more: let go of everything."""
        for block_ids in self._held.values():
            self.kv.pool.release(block_ids)
        self._held.clear()
        self._loads.clear()
        self._keys_under_way.clear()

    # ------------------------------------------------------------ looking in

    def __len__(self) -> int:
        return len(self._held)

    @property
    def held_blocks(self) -> Iterator[int]:
        """One entry a reference."""
        return (block_id for held in self._held.values() for block_id in held)

    def metadata(self) -> Any:
        """For the step that is planned now."""
        return self.connector.build_metadata()

    def check(self, loading: set[str]) -> None:
        """Raise AssertionError unless exactly these requests wait for a load."""
        waited = {
            load.request.request_id
            for load in self._loads.values()
            if load.request.status is Status.LOADING
        }
        assert waited == loading, f"loads and loading requests differ: {waited ^ loading}"
        keys = [key for load in self._loads.values() for key in load.keys]
        assert set(keys) == self._keys_under_way, "keys under way differ from the loads'"
        for load in self._loads.values():
            for key in load.keys:
                assert self.kv.pool.lookup(key) not in load.block_ids, (
                    "a hit could find a block that is being filled"
                )
