"""Tracks KV transfers: which blocks a connector reads or fills, and for which requests."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count

from ...cache.kv_manager import PrefixHits
from ...config import KVTransferConfig
from ...parts.kv_transfer import NAME, KVDetached, KVReport, TransferPlan, TransferResult
from ...request import Request, Status
from ...step import StepPlan, StepResult
from ..plan_builder import PlanBuilder
from .guarded_connector import GuardedConnector
from .kv_loads import Load, Loads
from .kv_saves import Saves
from .part import PartServices, Readiness, SchedulerPart

logger = logging.getLogger("jackfield.engine")


class KVTransfer(SchedulerPart):
    """Starts transfers, and holds their blocks until their end is reported.

    A load fills blocks that no prefix hit can find. When it has ended, the filled blocks are
    registered in the prefix cache, where the request finds them. So a failed load is a shorter
    hit, and a waiting request holds no blocks.

    A connector that fails is not called any more. Transfers whose metadata was not sent never begin
    and are withdrawn; the worker half ends the others as usual. If the worker half fails, no
    request waits for a load any more, but blocks stay held until it has closed: it may still read
    and write them. If it cannot close, they are lost.
    """

    name = NAME
    pauses_decodes = False
    counts_late = False

    def __init__(
        self, services: PartServices, connector: GuardedConnector, transfer: KVTransferConfig
    ) -> None:
        """transfer: the role of `connector`."""
        kv = services.kv
        if len(kv.groups) > 1 or kv.groups[0].reach is not None:
            raise ValueError("KV transfers are for caches of one group that keeps all tokens")
        self.connector = connector
        self.kv = kv
        self._services = services
        self._loading = transfer.kv_role != "kv_producer"
        self._fail_on_load = transfer.kv_load_failure_policy == "fail"
        self._external_ends: dict[Request, int] = {}
        """Unfinished request → leading tokens whose blocks the connector has; 0: it has none that
        are to be loaded."""
        self._loads = Loads(kv)
        self._saves = Saves(kv, saving=transfer.kv_role != "kv_consumer")
        self._ends: dict[int, list[int]] = {}
        """Step in flight → [num_rows] tokens computed with it, drafts included."""
        self._row_ends: list[int] = []
        """The same of the step whose result is processed."""
        self._numbers = count()
        self._blocks_of: dict[int, list[int]] = {}
        """Transfer → blocks that it holds."""
        self._unsent: set[int] = set()
        """Transfers of `_blocks_of` that the worker half does not know of yet."""
        self._failure_seen = False
        self._detached: KVDetached | None = None
        """State of a worker half that has failed."""
        self._not_taken: deque[bytes] = deque()
        """Metadata of plans that the executor did not take, to be sent again."""
        self.num_lost_blocks = 0
        """Blocks that are lost: held until the engine ends."""
        self._report_pending = False
        self._metadata: bytes | None = None
        """What the plan that is being made carries."""
        self._num_queried_tokens = 0

    @classmethod
    def maker(
        cls, connector: GuardedConnector, transfer: KVTransferConfig | None = None
    ) -> Callable[[PartServices], KVTransfer]:
        role = transfer or KVTransferConfig(kv_connector="")
        return lambda services: cls(services, connector, role)

    # ------------------------------------------------------------ loads

    def readiness(self, request: Request, hits: PrefixHits, reserve: int) -> Readiness:
        """Load what the connector has past `hits`, if it has any."""
        external_end = self._external_ends.get(request)
        if not self._loading or self.failure is not None or external_end == 0:
            return Readiness.READY
        if request.params.prompt_logprobs is not None:
            return Readiness.READY
        kv = self.kv
        block_size = kv.block_size
        computed = hits.num_blocks * block_size
        # Look up only with room for the blocks, so that the load follows the lookup soon.
        if not kv.can_hold(request.num_tokens, hits, reserve):
            return Readiness.NO_ROOM
        if external_end is None:
            limit = (request.num_known_tokens - 1) // block_size * block_size
            num_external: int | None = 0
            if limit > computed:
                num_external = self.connector.num_external_tokens(request, computed)
            if num_external is None:
                return Readiness.LATER
            self._num_queried_tokens += limit - computed
            end = min(computed + num_external, limit) // block_size * block_size
            external_end = self._external_ends[request] = end if end > computed else 0
        if external_end <= computed:
            return Readiness.READY
        keys = kv.block_keys(request, external_end // block_size)[hits.num_blocks :]
        if self._loads.any_of(keys):
            return Readiness.LATER
        kv.pool.hold(hits.block_ids)
        blocks = kv.pool.allocate(len(keys))
        transfer = next(self._numbers)
        self._blocks_of[transfer] = [*hits.block_ids, *blocks]
        self._unsent.add(transfer)
        self._loads.begin(transfer, Load(request, hits.num_blocks, blocks, keys))
        request.status = Status.LOADING
        self._external_ends[request] = 0
        self.connector.start_load(transfer, request, keys, blocks)
        return Readiness.LOADING

    def admit(self, request: Request, hits: PrefixHits, builder: PlanBuilder) -> None:
        """Note which cached blocks need not be offered."""
        self._saves.admitted(request, hits.num_blocks)

    # ------------------------------------------------------------ saves

    def settle(self, request: Request, row: int, plan: StepPlan, result: StepResult) -> None:
        """Offer the connector the full blocks that are new among the tokens whose results have
        arrived, and which are no drafts."""
        computed = min(self._row_ends[row], request.num_known_tokens)
        offer = self._saves.next_offer(request, computed)
        if offer is None:
            return
        keys, blocks = offer
        transfer = next(self._numbers)
        saved = set(self.connector.start_save(transfer, request, keys, blocks))
        if saved:
            pairs = zip(blocks, keys, strict=True)
            self._hold(transfer, [block for block in blocks if block in saved])
            self._saves.store((block, key) for block, key in pairs if block in saved)
        self._saves.let_prompt_go(request)

    def hold_prompt(self, request: Request) -> None:
        """Hold what is not offered yet of a prompt, as its cache is about to be compacted."""
        if self.failure is None:
            self._saves.hold_prompt(request)

    def let_prompt_go(self, request: Request) -> None:
        """Release what `hold_prompt` holds."""
        self._saves.let_prompt_go(request)

    def leave(self, request: Request) -> None:
        """Look up again what the connector has, if the request was preempted."""
        self._saves.let_prompt_go(request)
        self._external_ends.pop(request, None)

    def ended(self, request: Request) -> None:
        """Notify the connector that a request has ended."""
        self._saves.ended(request)
        self._external_ends.pop(request, None)
        transfer = next(self._numbers)
        is_retained, request.kv_transfer_params = self.connector.request_finished(transfer, request)
        if is_retained and request.block_ids and request.is_named:
            self._hold(transfer, list(request.block_ids))

    def _hold(self, transfer: int, block_ids: list[int]) -> None:
        self.kv.pool.hold(block_ids)
        self._blocks_of[transfer] = block_ids
        self._unsent.add(transfer)

    # ------------------------------------------------------------ a connector that fails

    @property
    def failure(self) -> str | None:
        """Why the connector is not called any more; None: it works."""
        return self.connector.failure

    def withdraw(self) -> list[Request]:
        """Release the transfers that the worker half does not know of.

        Return the requests that wait for one of them.
        """
        waiting = []
        for transfer in sorted(self._unsent):
            load = self._loads.give_up(transfer)
            if load is not None and load.waits:
                waiting.append(load.request)
            self.kv.pool.release(self._blocks_of.pop(transfer))
        self._unsent.clear()
        return waiting

    def detach(self, detached: KVDetached) -> list[Request]:
        """Record that the worker half has failed, as every result reports from then on.

        Return the requests that wait for a load.
        """
        if detached == self._detached:
            return []
        self._detached = detached
        self._not_taken.clear()
        self.connector.detach(detached.failure)
        waiting = self.withdraw()
        for transfer in self._loads:
            load = self._loads.give_up(transfer)
            assert load is not None, "a load that has begun"
            if load.waits:
                waiting.append(load.request)
            self.kv.pool.release(self._blocks_of[transfer][: load.num_hits])
            self._blocks_of[transfer] = load.block_ids
        if detached.closed:
            self._release_all()
        elif detached.closed is not None:
            self.num_lost_blocks = len({b for blocks in self._blocks_of.values() for b in blocks})
            logger.error(
                "%d KV blocks are out of use until the engine is started anew: they may still be "
                "read and written", self.num_lost_blocks,
            )  # fmt: skip
        return waiting

    # ------------------------------------------------------------ plans

    def begin_plan(self, builder: PlanBuilder) -> None:
        """Queue requests again whose load will never begin, if the connector has failed."""
        self._withdraw_if_failed()

    def rows_chosen(self, builder: PlanBuilder) -> bool:
        """Ask the connector for what goes with the plan. If it fails, requests need not wait for
        it."""
        self._metadata = self._next_metadata()
        return self._withdraw_if_failed()

    def needs_plan(self) -> bool:
        pending, self._report_pending = self._report_pending, False
        return pending or self._metadata is not None

    def plan_part(self, step: int, builder: PlanBuilder) -> TransferPlan | None:
        self._ends[step] = [request.num_computed_tokens for request in builder.rows]
        metadata, self._metadata = self._metadata, None
        return None if metadata is None else TransferPlan(metadata)

    def _next_metadata(self) -> bytes | None:
        if self._not_taken:
            return self._not_taken.popleft()
        metadata = self.connector.build_metadata()
        if metadata is not None:
            self._unsent.clear()
        return metadata

    def not_taken(self, part: TransferPlan) -> None:  # type: ignore[override]
        """Keep metadata to send it again."""
        self._not_taken.append(part.metadata)

    def _withdraw_if_failed(self) -> bool:
        """Return whether the connector has failed since the last call."""
        if self.failure is None or self._failure_seen:
            return False
        self._failure_seen = True
        for request in self.withdraw():
            self._load_ended(request, complete=False)
        return True

    # ------------------------------------------------------------ results

    def expect_report(self) -> None:
        """Record that a step is needed to fetch a report of the worker half."""
        self._report_pending = True

    def begin_result(self, plan: StepPlan, result: StepResult) -> None:
        """Process the report of a step."""
        self._row_ends = self._ends.pop(plan.step)
        self._take(result)

    def step_failed(self, dropped: Iterable[StepResult]) -> None:
        """Go on: the worker half has been notified of transfers in plans that were not run, and a
        report that the failed step should have brought comes with the next."""
        self._ends.clear()
        for result in dropped:
            self._take(result)
        self.expect_report()

    def _take(self, result: StepResult) -> None:
        """Process a result's report; requests with finished loads queue again."""
        taken: TransferResult | None = result.parts.get(NAME)
        if taken is None:
            return
        if taken.report is not None:
            for request, complete in self.take_report(taken.report):
                self._load_ended(request, complete)
        if taken.detached is not None:
            num_lost = self.num_lost_blocks
            for request in self.detach(taken.detached):
                self._load_ended(request, complete=False)
            if self.num_lost_blocks != num_lost:
                self._services.lose_blocks(self.num_lost_blocks)

    def _load_ended(self, request: Request, complete: bool) -> None:
        requests = self._services.requests
        if complete or not self._fail_on_load:
            requests.wait_again(request)
            return
        because = f": {self.failure}" if self.failure else ""
        error = f"its KV could not be loaded{because}"
        self._services.publish(requests.fail(request, error))

    def take_report(self, report: KVReport) -> list[tuple[Request, bool]]:
        """Release the transfers that have ended.

        Return the requests whose load is among them, each with whether the load was complete.
        Requests that ended meanwhile are left out.
        """
        ended = []
        finished = dict.fromkeys(report.finished)
        failed: tuple[int, ...] | None
        for transfer, failed in [*finished.items(), *report.failed.items()]:
            block_ids = self._blocks_of.pop(transfer, None)
            if block_ids is None:
                logger.error("the KV connector ended transfer %d, which is not pending", transfer)
                continue
            self._unsent.discard(transfer)
            load = self._loads.end(transfer)
            if load is not None:
                unfilled = () if failed is None else failed or load.block_ids
                filled = self._loads.register(load, unfilled)
                self._saves.store(filled)
                if load.waits:
                    ended.append((load.request, len(filled) == len(load.keys)))
            elif failed is not None:
                self._saves.lose(failed or block_ids)
            self.kv.pool.release(block_ids)
        self.connector.update(report)
        return ended

    def abandon(self) -> None:
        """Release all blocks; no further report will come."""
        self._release_all()
        self._unsent.clear()
        self._loads.clear()
        self._ends.clear()

    def _release_all(self) -> None:
        for block_ids in self._blocks_of.values():
            self.kv.pool.release(block_ids)
        self._blocks_of.clear()

    # ------------------------------------------------------------ looking in

    def __len__(self) -> int:
        return len(self._blocks_of)

    @property
    def counts(self) -> dict[str, int]:
        """Lookups, hits and failures of loads."""
        return {
            "external_prefix_cache_queries": self._num_queried_tokens,
            "external_prefix_cache_hits": self._loads.num_loaded_tokens,
            "num_kv_load_failures": self._loads.num_failed,
        }

    @property
    def held(self) -> Iterator[int]:
        """Held block ids, one entry per reference."""
        return chain(chain.from_iterable(self._blocks_of.values()), self._saves.held)

    def awaited(self) -> list[Request]:
        """Return the requests of loads."""
        return self._loads.awaited()

    def held_blocks(self, running: list[Request]) -> Iterator[int]:
        """Return `held`. Raises AssertionError if the loads contradict each other."""
        self._loads.check()
        return self.held
