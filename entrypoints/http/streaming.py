"""Streams: one frame per chunk, an error frame if a stream fails, and the last frame. Mostly
server-sent events, which end with [DONE].
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence, Sized
from typing import Any, NamedTuple, TypeVar

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from ...core.engine.output_stream import OutputStream
from ...core.errors import JackfieldError, RequestFailed
from ...core.outputs import RequestOutput
from .context import OPTIONS, encoder, error_body
from .large_responses import FEW_VALUES, off_loop, routed_size
from .request_log import mark_left

T = TypeVar("T")
logger = logging.getLogger("jackfield.server")
EVENT_STREAM = "text/event-stream; charset=utf-8"
HEADERS = {
    "Content-Type": EVENT_STREAM,
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which readers of events leave out."""
_MARK = uuid.uuid4().hex
"""Placeholder in a template; random, so in no other text."""


def frame(data: Any) -> bytes:
    return b"data: " + encoder.encode(data) + b"\n\n"


def named_frame(event: dict[str, Any]) -> bytes:
    """Return an event's frame, named by its type."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encoder.encode(event))


def output_size(output: RequestOutput, first: bool) -> int:
    """Return about how many log-probabilities an output has, or what takes as long; the first also
    has the prompt's."""
    size = 0
    for completion in output.outputs:  # For each token of each stream: a loop calls least.
        if completion.logprobs:
            size += _num_values(completion.logprobs)
        if completion.routed_experts is not None:
            size += routed_size(completion)
    if first and output.prompt_logprobs:
        size += _num_values(output.prompt_logprobs)
    return size


def _num_values(positions: Sequence[Sized | None]) -> int:
    return len(positions) * len(positions[-1] or ())


class Protocol(NamedTuple):
    failure: Callable[[JackfieldError], bytes]
    """Returns an error's frame."""
    end: bytes
    """The last frame, even after an error."""
    content_type: str = EVENT_STREAM


OPENAI = Protocol(failure=lambda error: frame(error_body(error)), end=DONE)


class Template:
    """Frames that differ in one text; the rest is encoded once."""

    def __init__(self, make: Callable[[str], bytes]) -> None:
        """make: returns the frame of any text, as a JSON string."""
        self._parts = make(_MARK).split(encoder.encode(_MARK))

    def frame(self, text: str) -> bytes:
        """Return `text`'s frame, identical to `streaming.frame`'s."""
        return encoder.encode(text).join(self._parts)


class EventStream:
    """A response of server-sent events, or of lines of JSON. Comments keep the connection of events
    open while nothing else is sent (`--sse-keep-alive-interval`); lines have none.

    The status line waits for `begin` or the first comment: errors until then have their own status.
    """

    def __init__(self, request: web.Request, content_type: str = EVENT_STREAM) -> None:
        self.response = web.StreamResponse(headers=HEADERS | {"Content-Type": content_type})
        has_comments = content_type == EVENT_STREAM
        self.interval = request.app[OPTIONS].sse_keep_alive_interval if has_comments else 0
        """Seconds; 0: no comments."""
        self._request = request
        self._loop = asyncio.get_running_loop()
        self._written = self._loop.time()

    @property
    def has_begun(self) -> bool:
        return self.response.prepared

    async def begin(self) -> AbstractStreamWriter:
        """Send status and headers, once."""
        writer = await self.response.prepare(self._request)
        assert writer is not None
        return writer

    async def write(self, data: bytes) -> None:
        await self.begin()
        await self.response.write(data)
        self.mark_written()

    def mark_written(self) -> None:
        """Begin a new interval without comments."""
        self._written = self._loop.time()

    async def wait_for(self, future: asyncio.Future[T]) -> T:
        """Return a future's result, and send comments until it is there."""
        while self.interval and not future.done():
            left = self._written + self.interval - self._loop.time()
            if left > 0:
                await asyncio.wait([future], timeout=left)
            else:
                await self.write(KEEP_ALIVE)
        return await future

    async def result_of(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work as `wait_for` does, and cancel it with this one."""
        if not self.interval:
            return await work
        task = asyncio.ensure_future(work)
        try:
            return await self.wait_for(task)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def pieces(self, frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield frames, and send comments until they are there."""
        while (piece := await self.result_of(_next(frames))) is not None:
            yield piece


async def _next(frames: AsyncIterator[T]) -> T | None:
    return await anext(frames, None)


async def stream_outputs(
    request: web.Request,
    outputs: OutputStream,
    encode: Callable[[RequestOutput], bytes],
    final_chunk: Callable[[], bytes],
    *,
    protocol: Protocol = OPENAI,
) -> web.StreamResponse:
    """Send `encode` of each output, and `final_chunk` at the end.

    The first output precedes the status line, so that refused requests get their own status.
    Further ones are written when the engine delivers them, all streams in sequence
    (`OutputStream.listen`). A slow client gets fewer, larger outputs, so its buffer stays small.
    """
    events = EventStream(request, protocol.content_type)
    try:
        try:
            output = await events.result_of(outputs.__anext__())
            start = await off_loop(output_size(output, first=True), encode, output)
            writer = await events.begin()
            await events.write(start)
            if not output.finished:
                await _Delivery(request, events, writer, outputs, encode).done()
            await events.write(final_chunk() + protocol.end)
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:
            if not events.has_begun:
                raise
            await events.write(protocol.failure(_shown(error)) + protocol.end)
        await events.response.write_eof()
    except ConnectionError:
        if not events.has_begun:
            raise
        mark_left(request)  # Leaving aborts its request.
    finally:
        await outputs.aclose()
    return events.response


def _shown(error: Exception) -> JackfieldError:
    """Return what the client is told of an error in a stream."""
    if isinstance(error, JackfieldError):
        return error
    logger.error("a stream failed", exc_info=error)
    return RequestFailed("the request failed")


class _Delivery:
    """Writes outputs as they arrive, without waking a task."""

    def __init__(
        self,
        request: web.Request,
        events: EventStream,
        writer: AbstractStreamWriter,
        outputs: OutputStream,
        encode: Callable[[RequestOutput], bytes],
    ) -> None:
        self._protocol = request.protocol
        self._events = events
        self._writer = writer
        self._outputs = outputs
        self._encode = encode
        self._chunked: bool = getattr(writer, "chunked", False)
        self._large: RequestOutput | None = None
        """An output being encoded on a thread, which blocks others."""
        self._wake: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def done(self) -> None:
        """Wait until the last output is written. Raises errors of `encode`, and ConnectionError."""
        self._outputs.listen(self._push)
        self._push()
        while not await self._events.wait_for(self._wake):
            large, self._large = self._large, None
            if large is not None:
                self._write(await off_loop(output_size(large, first=False), self._encode, large))
                if large.finished:
                    return
            await self._writer.drain()
            self._wake = asyncio.get_running_loop().create_future()
            self._push()

    def _push(self) -> None:
        """Write available outputs; wake `done` at the end, for a large output, or for a slow
        client.
        """
        wake = self._wake
        if wake.done():
            return
        try:
            if self._protocol.writing_paused:
                wake.set_result(False)
                return
            output = self._outputs.take_output()
            if output is None:
                return
            if output_size(output, first=False) > FEW_VALUES:
                self._large = output
                wake.set_result(False)
                return
            self._write(self._encode(output))
            if output.finished:
                wake.set_result(True)
        except Exception as error:
            wake.set_exception(error)

    def _write(self, data: bytes) -> None:
        """Raises ConnectionResetError if the client left."""
        if not data:
            return
        transport = self._protocol.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has disconnected")
        piece = b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data
        transport.write(piece)
        self._writer.output_size += len(piece)
        if self._events.interval:
            self._events.mark_written()


async def stream(request: web.Request, frames: AsyncIterator[bytes]) -> web.StreamResponse:
    """Send `frames`; the first precedes the status line, so that refused requests get their own
    status.
    """
    events = EventStream(request)
    try:
        try:
            async for piece in events.pieces(frames):
                await events.write(piece)
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:
            if not events.has_begun:
                raise
            await events.write(frame(error_body(_shown(error))))
        await events.write(DONE)
        await events.response.write_eof()
    except ConnectionError:
        if not events.has_begun:
            raise
        mark_left(request)  # Leaving aborts its request.
    finally:
        with contextlib.suppress(Exception):
            await frames.aclose()  # type: ignore[attr-defined]
    return events.response
