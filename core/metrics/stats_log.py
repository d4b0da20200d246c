"""Logs the engine's activity every ten seconds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable

from ..outputs import EngineStats

logger = logging.getLogger("jackfield.stats")
LOG_SECONDS = 10.0


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


@contextlib.asynccontextmanager
async def logging_stats(read: Callable[[], EngineStats]) -> AsyncIterator[None]:
    """Log a line every LOG_SECONDS of activity.

    read: returns a snapshot, over all engines.
    """
    if not logger.isEnabledFor(logging.INFO):
        yield
        return

    async def log() -> None:
        stats_log = StatsLog(read(), time.monotonic())
        while True:
            await asyncio.sleep(LOG_SECONDS)
            line = stats_log.line(read(), time.monotonic())
            if line is not None:
                logger.info(line)

    task = asyncio.create_task(log(), name="jackfield-stats")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
