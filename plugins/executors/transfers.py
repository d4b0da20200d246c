"""Which KV transfers have ended on all ranks. Imports nothing large."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ...core.step import KVDetached, KVReport, StepResult


class RankTransfers:
    """Merges the reports of the ranks' worker halves: a transfer has ended once it has on every
    rank. All on the event loop."""

    def __init__(self, num_ranks: int, news: Callable[[], None]) -> None:
        """news: called when there is something that a later step's result is to bring."""
        self._num_ranks = num_ranks
        self._news = news
        self._ends: dict[int, list[tuple[int, ...]]] = {}
        """Transfer → the blocks that were not filled, of each rank where it has ended."""
        self._finished: list[int] = []
        self._failed: dict[int, tuple[int, ...]] = {}
        self._detached: KVDetached | None = None

    def take(self, rank: int, report: KVReport | None, detached: KVDetached | None) -> None:
        """Take in what another rank reports."""
        if self._note(rank, report, detached):
            self._news()

    def into(self, result: StepResult) -> StepResult:
        """Return rank 0's result with what has ended on all ranks, in place of its own report."""
        own = result.kv_report
        self._note(0, own, result.kv_detached)
        payload: Any = None if own is None else own.payload
        report = None
        if self._finished or self._failed or payload is not None:
            report = KVReport(tuple(self._finished), self._failed, payload)
            self._finished, self._failed = [], {}
        return msgspec.structs.replace(result, kv_report=report, kv_detached=self._detached)

    def _note(self, rank: int, report: KVReport | None, detached: KVDetached | None) -> bool:
        """Return whether there is something new to bring."""
        before = len(self._finished), len(self._failed), self._detached
        if report is not None:
            unfilled = {**dict.fromkeys(report.finished, ()), **report.failed}
            for transfer, blocks in unfilled.items():
                self._end(transfer, blocks)
        if detached is not None and self._detached is None:
            # The other ranks' halves go on, so none can say that no block is in use any more.
            self._detached = KVDetached(f"rank {rank}: {detached.failure}", closed=False)
        return before != (len(self._finished), len(self._failed), self._detached)

    def _end(self, transfer: int, blocks: tuple[int, ...]) -> None:
        """Note that a transfer has ended on one more rank."""
        ends = self._ends.setdefault(transfer, [])
        ends.append(blocks)
        if len(ends) < self._num_ranks:
            return
        del self._ends[transfer]
        if unfilled := {block for each in ends for block in each}:
            self._failed[transfer] = tuple(sorted(unfilled))
        else:
            self._finished.append(transfer)
