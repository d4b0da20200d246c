"""Work on the event loop that outlives its callers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundTasks:
    """Tasks that go on if their callers are cancelled."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._shared: dict[Hashable, asyncio.Task[Any]] = {}
        """Key → the work in progress."""

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run work in a task of its own."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what work returns, which runs to its end in any case."""
        return await asyncio.shield(self.start(work))

    async def share(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return what `work` returns; calls with the same key meanwhile share it."""
        if (task := self._shared.get(key)) is None:
            task = self._shared[key] = self.start(work())
            task.add_done_callback(lambda _: self._shared.pop(key, None))
        result: T = await asyncio.shield(task)
        return result

    async def cancel(self) -> None:
        """End all tasks, and wait for that."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # Its callers have it; there may be none left.
