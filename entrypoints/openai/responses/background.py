"""A server's stored and background responses."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from aiohttp import web

from ....core.engine.async_engine import AsyncEngine
from ....core.errors import EngineOverloaded, InvalidRequest, NotFound, shown
from ....core.tenancy import Tenant
from ....core.text.text_threads import rough_size
from ....core.text.token_limit import LONG_TEXT
from ...http.auth.usage import Usage
from ...http.context import encoder
from ...http.options import ServerOptions
from ...http.streaming import named_frame
from .events import Event
from .input_items import check_count, read_items
from .item_kinds import Item
from .protocol import ID_PREFIX, ResponsesRequest
from .request import ResponseCompletion, new_response_job, tools_of
from .store import ResponseStore, StoredResponse
from .tools import Tools
from .truncation import truncated

FEW_ITEMS = 256
"""Most items of an input read on the event loop."""


class Running:
    """A background response in progress, with any number of followers."""

    def __init__(self, completion: ResponseCompletion, owner: str) -> None:
        self.completion = completion
        self.owner = owner
        self.kept = True
        """False once deleted."""
        self.frames: list[bytes] = []
        """Its events' frames by sequence number, if it streams."""
        self.task: asyncio.Task[None] | None = None
        self.ended = False
        self._changed = asyncio.Event()
        self._uncount: Callable[[], None] | None = None

    def count(self, usage: Usage, tenant: Tenant) -> None:
        """Count it against its tenant's limits after the creating request."""
        if not self.ended:
            usage.hold(tenant)
            self._uncount = functools.partial(usage.end, tenant)

    def end(self) -> None:
        self.ended = True
        if self._uncount is not None:
            self._uncount()
        self.wake()

    def take(self, event: Event) -> None:
        """Add an event, and wake followers."""
        if self.completion.body.stream:
            self.frames.append(named_frame(event))
        self.wake()

    def wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self, first: int) -> AsyncIterator[bytes]:
        """Yield the frames from this sequence number on."""
        while True:
            event = self._changed
            while first < len(self.frames):
                yield self.frames[first]
                first += 1
            if self.ended:
                return
            await event.wait()


class Responses:
    def __init__(self, options: ServerOptions) -> None:
        self.store = ResponseStore(options.max_stored_responses, options.max_stored_response_bytes)
        self.running: dict[tuple[str, str], Running] = {}
        """By (owner, id)."""

    async def close(self, _: web.Application) -> None:
        tasks = [run.task for run in self.running.values() if run.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------ making

    async def new_completion(
        self, engine: AsyncEngine, body: ResponsesRequest, owner: str
    ) -> ResponseCompletion:
        """Validate a request with this owner's earlier responses that it continues. Raises
        InvalidRequest, EngineOverloaded.
        """
        body.check()
        store = self.store.enabled and body.store is not False
        if body.background and not store:
            raise InvalidRequest(
                "background: this server stores no responses (--max-stored-responses 0)",
                param="background",
            )
        if body.background and len(self.running) >= self.store.max_count:
            raise EngineOverloaded("too many responses run in the background; try again later")
        earlier = self._earlier(body.previous_response_id, owner)
        by_id = {item["id"]: item for item in earlier}
        num_given = len(body.input) if isinstance(body.input, list) else 1
        check_count(len(earlier) + num_given)

        def read() -> tuple[list[Item], Tools]:
            find_item = self.store.finder(owner)
            own = read_items(body.input, lambda id: by_id.get(id) or find_item(id))
            return own, tools_of(body, earlier + own)

        size = rough_size(body.tools, [item for item in body.input or () if _has_tools(item)])
        if num_given < FEW_ITEMS and size < LONG_TEXT:
            own, tools = read()
        else:
            own, tools = await engine.in_text_threads(size + rough_size(body.input), read)
        job = new_response_job(engine, body, earlier + own, tools)
        if body.truncation == "auto":
            job = await truncated(job, body, earlier + own)
        if self._running(job.id, owner) or self.store.get(job.id, owner):
            raise InvalidRequest(
                f"request_id: there is a response {shown(job.id)} already", param="request_id"
            )
        return ResponseCompletion(job, body, earlier, own, tools, stored=store)

    def _earlier(self, id: str | None, owner: str) -> list[Item]:
        if id is None:
            return []
        if self._running(id, owner) is not None:
            raise InvalidRequest(
                f"previous_response_id: {shown(id)} is still running", param="previous_response_id"
            )
        response = self.store.get(id, owner)
        if response is None:
            error = InvalidRequest(
                f"previous_response_id: no response {shown(id)} is stored here",
                param="previous_response_id",
            )
            error.code = "previous_response_not_found"
            raise error
        return response.conversation()

    def keep(
        self, completion: ResponseCompletion, owner: str, frames: list[bytes] | None = None
    ) -> None:
        """Store an ended response, if requested."""
        if completion.stored:
            self.store.put(
                completion.snapshot(),
                completion.input,
                completion.own,
                b"".join(frames or ()),
                owner,
            )

    async def stream(self, completion: ResponseCompletion, owner: str) -> AsyncIterator[bytes]:
        """Yield the frames of a response that ends with its connection."""
        events = completion.events()
        try:
            async for event in events:
                if completion.ended and "response" in event:
                    self.keep(completion, owner)
                yield named_frame(event)
        finally:
            await events.aclose()  # type: ignore[attr-defined]

    async def start(self, completion: ResponseCompletion, owner: str) -> Running:
        """Run a response in the background; returns once admitted."""
        events = completion.events()
        running = Running(completion, owner)
        running.take(await anext(events))
        self.running[owner, completion.job.id] = running
        running.task = asyncio.create_task(self._run(running, events))
        return running

    async def _run(self, running: Running, events: AsyncIterator[Event]) -> None:
        completion = running.completion
        try:
            async for event in events:
                running.take(event)
        finally:
            del self.running[running.owner, completion.job.id]
            try:
                await events.aclose()  # type: ignore[attr-defined]
                if running.kept and completion.ended:
                    self.keep(completion, running.owner, running.frames)
            finally:
                running.end()

    # ------------------------------------------------------------ asking for

    def _running(self, id: str, owner: str) -> Running | None:
        return self.running.get((owner, id))

    def stored(self, id: str, owner: str) -> StoredResponse:
        response = self.store.get(id, owner)
        if response is None and not id.startswith(ID_PREFIX):
            raise InvalidRequest(
                f"response_id: {shown(id)} is no response's id; expected one that begins with "
                f"{ID_PREFIX!r}",
                param="response_id",
            )
        if response is None:
            raise NotFound(
                f"response_id: no response {shown(id)} is stored here", param="response_id"
            )
        return response

    def body(self, id: str, owner: str) -> bytes:
        """Return the encoded current response. Raises NotFound, InvalidRequest."""
        running = self._running(id, owner)
        return (
            self.stored(id, owner).body
            if running is None
            else encoder.encode(running.completion.snapshot())
        )

    def input(self, id: str, owner: str) -> list[Item]:
        """Return all items before the output. Raises NotFound."""
        running = self._running(id, owner)
        return self.stored(id, owner).items() if running is None else running.completion.input

    def follow(self, id: str, owner: str, first: int) -> AsyncIterator[bytes]:
        """Return a background response's stream from a sequence number. Raises NotFound,
        InvalidRequest.
        """
        running = self._running(id, owner)
        streamed = bool(
            running.completion.body.stream if running else self.stored(id, owner).events
        )
        if not streamed:
            raise InvalidRequest(
                "stream: only a response created with background and stream can be followed",
                param="stream",
            )
        return running.follow(first) if running else _replay(self.stored(id, owner).events, first)

    async def cancel(self, id: str, owner: str) -> bytes:
        """Cancel and return a background response. Raises NotFound, InvalidRequest."""
        running = self._running(id, owner)
        if running is None:
            response = self.stored(id, owner)
            if not msgspec.json.decode(response.body)["background"]:
                raise InvalidRequest(
                    "response_id: only background responses can be cancelled", param="response_id"
                )
            return response.body
        await self._abort(running)
        return encoder.encode(running.completion.snapshot())

    async def delete(self, id: str, owner: str) -> dict[str, Any]:
        """Delete a response, cancelling it if running. Raises NotFound."""
        running = self._running(id, owner)
        if running is not None:
            running.kept = False
            await self._abort(running)
        else:
            self.stored(id, owner)
            self.store.delete(id, owner)
        return {"id": id, "object": "response", "deleted": True}

    async def _abort(self, running: Running) -> None:
        await running.completion.job.abort()
        assert running.task is not None
        await asyncio.wait([running.task])


def _has_tools(item: Any) -> bool:
    return isinstance(item, dict) and "tools" in item


async def _replay(events: bytes, first: int) -> AsyncIterator[bytes]:
    for frame in events.split(b"\n\n")[first:-1]:
        yield frame + b"\n\n"
