"""Server-sent events: one frame per chunk, an error frame if a stream fails, [DONE] at the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from ...core.engine.output_stream import OutputStream
from ...core.errors import JackfieldError, RequestFailed
from ...core.outputs import RequestOutput
from .context import encoder, error_body
from .large_responses import FEW_VALUES, off_loop
from .request_log import mark_left

logger = logging.getLogger("jackfield.server")
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
DONE = b"data: [DONE]\n\n"
_MARK = uuid.uuid4().hex
"""Placeholder in a template; random, so in no other text."""


def frame(data: Any) -> bytes:
    return b"data: " + encoder.encode(data) + b"\n\n"


def named_frame(event: dict[str, Any]) -> bytes:
    """Return an event's frame, named by its type."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encoder.encode(event))


def output_size(output: RequestOutput, first: bool) -> int:
    """Return about how many log-probabilities an output has; the first also has the prompt's."""
    lists = [completion.logprobs for completion in output.outputs]
    if first:
        lists.append(output.prompt_logprobs)  # type: ignore[arg-type]
    return sum(len(positions) * len(positions[-1] or ()) for positions in lists if positions)


class Protocol(NamedTuple):
    failure: Callable[[JackfieldError], bytes]
    """Returns an error's frame."""
    end: bytes
    """The last frame, even after an error."""


OPENAI = Protocol(failure=lambda error: frame(error_body(error)), end=DONE)


class Template:
    """Frames that differ in one text; the rest is encoded once."""

    def __init__(self, make: Callable[[str], bytes]) -> None:
        """make: returns the frame of any text, as a JSON string."""
        self._parts = make(_MARK).split(encoder.encode(_MARK))

    def frame(self, text: str) -> bytes:
        """Return `text`'s frame, identical to `streaming.frame`'s."""
        return encoder.encode(text).join(self._parts)


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
    try:
        output = await anext(outputs)
        start = await off_loop(output_size(output, first=True), encode, output)
    except BaseException:
        await outputs.aclose()
        raise
    response = web.StreamResponse(headers=HEADERS)
    try:
        writer = await response.prepare(request)
        assert writer is not None
        await response.write(start)
        try:
            if not output.finished:
                await _Delivery(request, writer, outputs, encode).done()
            await response.write(final_chunk() + protocol.end)
        except JackfieldError as error:
            await response.write(protocol.failure(error) + protocol.end)
        except (ConnectionError, TimeoutError):
            raise
        except Exception:
            logger.exception("a stream failed")
            failure = RequestFailed("the request failed")
            await response.write(protocol.failure(failure) + protocol.end)
        await response.write_eof()
    except ConnectionError:
        mark_left(request)  # Leaving aborts its request.
    finally:
        await outputs.aclose()
    return response


class _Delivery:
    """Writes outputs as they arrive, without waking a task."""

    def __init__(
        self,
        request: web.Request,
        writer: AbstractStreamWriter,
        outputs: OutputStream,
        encode: Callable[[RequestOutput], bytes],
    ) -> None:
        self._protocol = request.protocol
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
        while not await self._wake:
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


async def stream(
    request: web.Request, frames: AsyncIterator[bytes], first: Callable[[], Awaitable[bytes]]
) -> web.StreamResponse:
    """Send `frames`, after `first`'s frame, which precedes the status line, so that refused
    requests get their own status.
    """
    start = await first()
    response = web.StreamResponse(headers=HEADERS)
    try:
        await response.prepare(request)
        await response.write(start)
        try:
            async for piece in frames:
                await response.write(piece)
        except JackfieldError as error:
            await response.write(frame(error_body(error)))
        except (ConnectionError, TimeoutError):
            raise
        except Exception:
            logger.exception("a stream failed")
            await response.write(frame(error_body(RequestFailed("the request failed"))))
        await response.write(DONE)
        await response.write_eof()
    except ConnectionError:
        mark_left(request)  # Leaving aborts its request.
    finally:
        with contextlib.suppress(Exception):
            await frames.aclose()  # type: ignore[attr-defined]
    return response
