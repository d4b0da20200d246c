"""Checks that an engine's worker replies, or ends a step."""

from __future__ import annotations

import asyncio
from typing import Any

from ..errors import EngineStopped
from ..protocols.executors import Executor
from ..scheduling.scheduler import Scheduler
from ..step import Ping


class WorkerCheck:
    """Pings the worker. Checks share a ping, which would otherwise queue after a hung step."""

    def __init__(self, executor: Executor, scheduler: Scheduler) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._ping: asyncio.Future[Any] | None = None

    async def run(self, timeout: float) -> None:
        """Raise EngineStopped unless the worker replies, or a step ends, within `timeout`
        seconds."""
        before = self._scheduler.num_steps
        try:
            if self._ping is None or self._ping.done():
                self._ping = self._executor.ask(Ping())
            await asyncio.wait_for(asyncio.shield(self._ping), timeout)
        except TimeoutError:
            if self._scheduler.num_steps == before:
                raise EngineStopped(
                    f"the worker has not answered for {timeout:g} seconds"
                ) from None
        except NotImplementedError:
            pass
        except RuntimeError as error:
            raise EngineStopped(f"the worker does not answer: {error}") from None
