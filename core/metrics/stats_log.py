"""Logs the engine's activity at intervals, and that of its drafts at every sixth."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable

from ..outputs import EngineStats

logger = logging.getLogger("jackfield.stats")
LOG_SECONDS = 10.0
"""Interval of vLLM's."""
DRAFT_LINE = 6
"""Intervals after which there is a line about drafts."""


class StatsLog:
    """Turns snapshots into lines about the time between them."""

    def __init__(self, stats: EngineStats, now: float) -> None:
        self._stats, self._now = stats, now

    def line(self, stats: EngineStats, now: float) -> str | None:
        """Return a snapshot's line; None if nothing ran."""
        before, seconds = self._stats, now - self._now
        self._stats, self._now = stats, now
        # An engine of several that is started again counts from 0.
        prompt = max(stats.prompt_tokens - before.prompt_tokens, 0)
        generated = max(stats.generation_tokens - before.generation_tokens, 0)
        present = stats.num_requests_running + stats.num_requests_waiting
        if not (present or prompt or generated or stats.steps > before.steps):
            return None
        looked_up = stats.prefix_cache_queries - before.prefix_cache_queries
        hits = stats.prefix_cache_hits - before.prefix_cache_hits
        rate = f"{hits / looked_up:.1%}" if looked_up > 0 else "-"
        return (
            f"Prompt throughput: {prompt / seconds:.1f} tokens/s, "
            f"generation throughput: {generated / seconds:.1f} tokens/s, "
            f"running: {stats.num_requests_running} reqs, "
            f"waiting: {stats.num_requests_waiting} reqs, "
            f"KV cache usage: {stats.kv_cache_usage:.1%}, prefix cache hit rate: {rate}"
        )


class DraftLog:
    """Turns snapshots into lines about the drafts between them; the words are vLLM's."""

    def __init__(self, stats: EngineStats, now: float) -> None:
        self._stats, self._now = stats, now

    def line(self, stats: EngineStats, now: float) -> str | None:
        """Return a snapshot's line; None if no drafts were verified."""
        before, seconds = self._stats, now - self._now
        self._stats, self._now = stats, now
        rows = stats.spec_decode_num_drafts - before.spec_decode_num_drafts
        drafted = stats.spec_decode_num_draft_tokens - before.spec_decode_num_draft_tokens
        accepted = stats.spec_decode_num_accepted_tokens - before.spec_decode_num_accepted_tokens
        if rows <= 0 or drafted <= 0:
            return None  # Or an engine of several was started again.
        earlier = before.spec_decode_num_accepted_tokens_per_pos
        places = ", ".join(
            f"{(count - earlier.get(place, 0)) / rows:.3f}"
            for place, count in sorted(stats.spec_decode_num_accepted_tokens_per_pos.items())
        )
        return (
            f"SpecDecoding metrics: Mean acceptance length: {1 + accepted / rows:.2f}, "
            f"Accepted throughput: {accepted / seconds:.2f} tokens/s, "
            f"Drafted throughput: {drafted / seconds:.2f} tokens/s, "
            f"Accepted: {accepted} tokens, Drafted: {drafted} tokens, "
            f"Per-position acceptance rate: {places}, "
            f"Avg Draft acceptance rate: {accepted / drafted:.1%}"
        )


@contextlib.asynccontextmanager
async def logging_stats(
    read: Callable[[], EngineStats], seconds: float = LOG_SECONDS
) -> AsyncIterator[None]:
    """Log a line every `seconds` of activity.

    read: returns a snapshot, over all engines.
    """
    if not logger.isEnabledFor(logging.INFO):
        yield
        return

    async def log() -> None:
        stats, now = read(), time.monotonic()
        stats_log, draft_log = StatsLog(stats, now), DraftLog(stats, now)
        for number in itertools.count(1):
            await asyncio.sleep(seconds)
            stats, now = read(), time.monotonic()
            lines = [stats_log.line(stats, now)]
            if number % DRAFT_LINE == 0:
                lines.append(draft_log.line(stats, now))
            for line in filter(None, lines):
                logger.info(line)

    task = asyncio.create_task(log(), name="jackfield-stats")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
