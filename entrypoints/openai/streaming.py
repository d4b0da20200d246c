"""Server-sent events: one frame a piece, an error frame when a stream breaks, [DONE] at the end."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web

from ...core.errors import JackfieldError, RequestFailed
from .context import encoder, error_body

logger = logging.getLogger("jackfield.server")
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
DONE = b"data: [DONE]\n\n"


def frame(data: Any) -> bytes:
    """One event."""
    return b"data: " + encoder.encode(data) + b"\n\n"


async def stream(
    request: web.Request, frames: AsyncIterator[bytes], first: Callable[[], Awaitable[bytes]]
) -> web.StreamResponse:
    """Send what `frames` yields. `first` gives the first frame before the status line goes out, so
    that a refused request still gets its proper status."""
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
        pass  # The client is gone; leaving aborts its request.
    finally:
        with contextlib.suppress(Exception):
            await frames.aclose()  # type: ignore[attr-defined]
    return response
