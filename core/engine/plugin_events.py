"""Events of requests and steps, for the plugins that listen."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from ..outputs import PoolingRequestOutput, RequestOutput
from ..registry import Plugins
from ..step import StepPlan, StepResult


class PluginEvents:
    """Emits `request_finished` and `step_finished`, each in a task.

    Listeners are looked up once: without them events cost nothing.
    """

    def __init__(self, plugins: Plugins) -> None:
        self.wants_requests = plugins.has_listeners("request_finished")
        self.wants_steps = plugins.has_listeners("step_finished")
        self._plugins = plugins
        self._tasks: set[asyncio.Future[Any]] = set()

    def request_finished(self, output: RequestOutput | PoolingRequestOutput) -> None:
        """Announce a request's last, cumulative output."""
        self._spawn(self._plugins.emit("request_finished", output=output))

    def step_finished(self, plan: StepPlan, result: StepResult) -> None:
        """Announce a published step."""
        self._spawn(self._plugins.emit("step_finished", plan=plan, result=result))

    async def settled(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, awaitable: Awaitable[Any]) -> None:
        task = asyncio.ensure_future(awaitable)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
