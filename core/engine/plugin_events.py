"""Events of requests and steps, for the plugins that listen."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import Context
from typing import Any

from ..registry import Plugins
from ..step import StepPlan, StepResult
from .pooling import PoolingState
from .request_state import RequestState


class PluginEvents:
    """Emits `request_finished` and `step_finished`, each in a task.

    Listeners are looked up once: without them events cost nothing.
    """

    def __init__(self, plugins: Plugins) -> None:
        self.wants_requests = plugins.has_listeners("request_finished")
        self.wants_steps = plugins.has_listeners("step_finished")
        self._plugins = plugins
        self._tasks: set[asyncio.Future[Any]] = set()

    def request_finished(self, state: RequestState | PoolingState) -> None:
        """Announce a request's last, cumulative output, in the context of its caller."""
        context, state.context = state.context, None
        if self.wants_requests and state.announced and (output := state.final_output()) is not None:
            emitted = self._plugins.emit("request_finished", output=output, params=state.params)
            self._spawn(emitted, context)

    def step_finished(self, plan: StepPlan, result: StepResult) -> None:
        """Announce a published step."""
        self._spawn(self._plugins.emit("step_finished", plan=plan, result=result))

    async def settled(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, coroutine: Coroutine[Any, Any, None], context: Context | None = None) -> None:
        task = asyncio.get_running_loop().create_task(coroutine, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
