"""The responses of one server: those that are kept, and those that run with nobody waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from aiohttp import web

from ...core.engine.async_engine import AsyncEngine
from ...core.errors import EngineOverloaded, InvalidRequest, NotFound
from ...core.text.text_threads import rough_size
from .context import ServerOptions, encoder
from .responses_events import Event
from .responses_input import Item, check_count, read_items
from .responses_job import ResponseJob
from .responses_protocol import ResponsesRequest
from .responses_store import ResponseStore, StoredResponse
from .streaming import named_frame

FEW_ITEMS = 256
"""Items of an input that are read on the event loop."""


class Running:
    """A background response that has not ended. Many may follow it, or nobody."""

    def __init__(self, job: ResponseJob, owner: str) -> None:
        self.job = job
        self.owner = owner
        self.kept = True
        """False once it was deleted."""
        self.frames: list[bytes] = []
        """If it was asked to stream: what was told, by sequence number."""
        self.task: asyncio.Task[None] | None = None
        self.ended = False
        """Everything was told."""
        self._changed = asyncio.Event()

    def take(self, event: Event) -> None:
        """Tell the followers."""
        if self.job.wanted.stream:
            self.frames.append(named_frame(event))
        self.wake()

    def wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self, first: int) -> AsyncIterator[bytes]:
        """Frames from this sequence number on, up to the last."""
        while True:
            changed = self._changed
            while first < len(self.frames):
                yield self.frames[first]
                first += 1
            if self.ended:
                return
            await changed.wait()


class Responses:
    """Kept and running responses of one application."""

    def __init__(self, options: ServerOptions) -> None:
        self.store = ResponseStore(options.max_stored_responses, options.max_stored_response_bytes)
        self.running: dict[str, Running] = {}

    async def close(self, _: web.Application) -> None:
        """End what runs in the background."""
        tasks = [one.task for one in self.running.values() if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------ making

    async def job(self, engine: AsyncEngine, wanted: ResponsesRequest, owner: str) -> ResponseJob:
        """A response that has not begun, on what this owner has stored. Raises InvalidRequest,
        EngineOverloaded."""
        wanted.check()
        stored = self.store.enabled and wanted.store is not False
        if wanted.background and not stored:
            raise InvalidRequest(
                "background: this server stores no responses (--max-stored-responses 0)",
                param="background",
            )
        if wanted.background and len(self.running) >= self.store.max_count:
            raise EngineOverloaded("too many responses run in the background; try again later")
        earlier = self._earlier(wanted.previous_response_id, owner)
        by_id = {item["id"]: item for item in earlier}
        num_given = len(wanted.input) if isinstance(wanted.input, list) else 1
        check_count(len(earlier) + num_given)

        def read() -> list[Item]:
            find_item = self.store.finder(owner)
            return read_items(wanted.input, lambda id: by_id.get(id) or find_item(id))

        if num_given < FEW_ITEMS:
            own = read()
        else:
            own = await engine.in_text_threads(rough_size(wanted.input), read)
        job = ResponseJob(engine, wanted, earlier, own, stored=stored)
        await job.fit()
        return job

    def _earlier(self, id: str | None, owner: str) -> list[Item]:
        if id is None:
            return []
        if self._running(id, owner) is not None:
            raise InvalidRequest(
                f"previous_response_id: {id!r} is still running", param="previous_response_id"
            )
        stored = self.store.get(id, owner)
        if stored is None:
            error = InvalidRequest(
                f"previous_response_id: no response {id!r} is stored here",
                param="previous_response_id",
            )
            error.code = "previous_response_not_found"
            raise error
        return stored.conversation()

    def keep(self, job: ResponseJob, owner: str, frames: list[bytes] | None = None) -> None:
        """Store a response that has ended, if it is to be stored."""
        if job.stored:
            self.store.put(job.body(), job.input, job.own, b"".join(frames or ()), owner)

    async def stream(self, job: ResponseJob, owner: str) -> AsyncIterator[bytes]:
        """The frames of a response that ends when its caller leaves."""
        events = job.events()
        try:
            async for event in events:
                if job.ended and "response" in event:
                    self.keep(job, owner)
                yield named_frame(event)
        finally:
            await events.aclose()  # type: ignore[attr-defined]

    async def start(self, job: ResponseJob, owner: str) -> Running:
        """Let a response run by itself; returns when the engine has taken it."""
        events = job.events()
        running = Running(job, owner)
        running.take(await anext(events))
        self.running[job.id] = running
        running.task = asyncio.create_task(self._run(running, events))
        return running

    async def _run(self, running: Running, events: AsyncIterator[Event]) -> None:
        job = running.job
        try:
            async for event in events:
                running.take(event)
        finally:
            await events.aclose()  # type: ignore[attr-defined]
            del self.running[job.id]
            if running.kept and job.ended:
                self.keep(job, running.owner, running.frames)
            running.ended = True
            running.wake()

    # ------------------------------------------------------------ asking for

    def _running(self, id: str, owner: str) -> Running | None:
        found = self.running.get(id)
        return found if found is not None and found.owner == owner else None

    def stored(self, id: str, owner: str) -> StoredResponse:
        """Raises NotFound."""
        found = self.store.get(id, owner)
        if found is None:
            raise NotFound(f"response_id: no response {id!r} is stored here", param="response_id")
        return found

    def body(self, id: str, owner: str) -> bytes:
        """A response as it is now, encoded. Raises NotFound."""
        running = self._running(id, owner)
        return (
            self.stored(id, owner).body if running is None else encoder.encode(running.job.body())
        )

    def input(self, id: str, owner: str) -> list[Item]:
        """All items before its output. Raises NotFound."""
        running = self._running(id, owner)
        return self.stored(id, owner).items() if running is None else running.job.input

    def follow(self, id: str, owner: str, first: int) -> AsyncIterator[bytes]:
        """The stream of a background response, from a sequence number on. Raises NotFound,
        InvalidRequest."""
        running = self._running(id, owner)
        streamed = bool(running.job.wanted.stream if running else self.stored(id, owner).events)
        if not streamed:
            raise InvalidRequest(
                "stream: only a response created with background and stream can be followed",
                param="stream",
            )
        return running.follow(first) if running else _replay(self.stored(id, owner).events, first)

    async def cancel(self, id: str, owner: str) -> bytes:
        """→ the response, which has ended. Raises NotFound; InvalidRequest unless it ran in the
        background."""
        running = self._running(id, owner)
        if running is None:
            stored = self.stored(id, owner)
            if not msgspec.json.decode(stored.body)["background"]:
                raise InvalidRequest(
                    "response_id: only background responses can be cancelled", param="response_id"
                )
            return stored.body
        await self._abort(running)
        return encoder.encode(running.job.body())

    async def delete(self, id: str, owner: str) -> dict[str, Any]:
        """Forget a response; one that runs is cancelled. Raises NotFound."""
        running = self._running(id, owner)
        if running is not None:
            running.kept = False
            await self._abort(running)
        else:
            self.stored(id, owner)
            self.store.delete(id)
        return {"id": id, "object": "response", "deleted": True}

    async def _abort(self, running: Running) -> None:
        await running.job.engine.abort(running.job.id)
        assert running.task is not None
        await asyncio.wait([running.task])


async def _replay(events: bytes, first: int) -> AsyncIterator[bytes]:
    for one in events.split(b"\n\n")[first:-1]:
        yield one + b"\n\n"
