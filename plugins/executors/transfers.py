"""Merges the ends of KV transfers over ranks. Imports nothing large."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ...core.parts import kv_transfer
from ...core.parts.kv_transfer import KVDetached, KVReport, TransferResult
from ...core.step import StepResult


class RankTransfers:
    """Merges the reports of the ranks' worker halves: a transfer ends when it has on every rank.
    For the event loop only.

    If one half raises, the others are closed, too; once all are closed, no transfer uses any block.
    """

    def __init__(
        self, num_ranks: int, news: Callable[[], None], detach: Callable[[str], None]
    ) -> None:
        """news: called when a later step's result has something to report. detach: called once,
        with the failure, to close all halves.
        """
        self._num_ranks = num_ranks
        self._news = news
        self._detach = detach
        self._ends: dict[int, list[tuple[int, ...] | None]] = {}
        """Transfer → per rank where it ended, None for success, or its value in
        `KVReport.failed`."""
        self._finished: list[int] = []
        self._failed: dict[int, tuple[int, ...]] = {}
        self._halves: dict[int, KVDetached] = {}
        """By rank, once its half is detached."""
        self._detached: KVDetached | None = None
        """Once all are detached."""

    def take(self, rank: int, report: KVReport | None, detached: KVDetached | None) -> None:
        """Add another rank's report."""
        if self._note(rank, report, detached):
            self._news()

    def into(self, result: StepResult) -> StepResult:
        """Return rank 0's result with the transfers that ended on all ranks."""
        sent: TransferResult = result.parts.get(kv_transfer.NAME, TransferResult())
        own = sent.report
        self._note(0, own, sent.detached)
        payload: Any = None if own is None else own.payload
        report = None
        if self._finished or self._failed or payload is not None:
            report = KVReport(tuple(self._finished), self._failed, payload)
            self._finished, self._failed = [], {}
        parts = {name: part for name, part in result.parts.items() if name != kv_transfer.NAME}
        if report is not None or self._detached is not None:
            parts[kv_transfer.NAME] = TransferResult(report, self._detached)
        return msgspec.structs.replace(result, parts=parts)

    def _note(self, rank: int, report: KVReport | None, detached: KVDetached | None) -> bool:
        """Return whether there is something new to report."""
        before = len(self._finished), len(self._failed), self._detached
        if report is not None:
            ended: dict[int, tuple[int, ...] | None] = dict.fromkeys(report.finished)
            for transfer, blocks in (ended | report.failed).items():
                self._end(transfer, blocks)
        if detached is not None:
            self._note_detached(rank, detached)
        return before != (len(self._finished), len(self._failed), self._detached)

    def _note_detached(self, rank: int, detached: KVDetached) -> None:
        self._halves[rank] = detached
        closed = [half.closed for half in self._halves.values()]
        all_closed = True if closed == [True] * self._num_ranks else None
        state = False if False in closed else all_closed
        if self._detached is not None:
            self._detached = msgspec.structs.replace(self._detached, closed=state)
            return
        failure = f"rank {rank}: {detached.failure}"
        self._detached = KVDetached(failure, closed=state)
        self._detach(failure)

    def _end(self, transfer: int, blocks: tuple[int, ...] | None) -> None:
        """Record a transfer's end on one more rank."""
        ends = self._ends.setdefault(transfer, [])
        ends.append(blocks)
        if len(ends) < self._num_ranks:
            return
        del self._ends[transfer]
        failed = KVReport.merged(ends)
        if failed is None:
            self._finished.append(transfer)
        else:
            self._failed[transfer] = failed
