"""GET /v1/realtime: speech that comes in pieces, over a WebSocket, by OpenAI's events of
transcription sessions, or by vLLM's. A client commits what it has sent, and each commit is written
down as one recording."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
import logging
import math
import time
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable
from typing import Any, NamedTuple

import numpy as np
from aiohttp import WSMsgType, web

from ....core.audio.files import Samples
from ....core.audio.resampling import resampled
from ....core.errors import EngineOverloaded, Forbidden, InvalidRequest, JackfieldError, shown
from ...http.auth.origin import Origin
from ...http.auth.tenants import tenant_of
from ...http.auth.usage import USAGE
from ...http.context import ENGINE, OPTIONS
from ...http.cross_origin.cross_site import same_site
from ...http.model_names import find_adapter
from ...http.routing import add_routes, route
from ..common.openapi import internal
from .speech import SpeechOptions, speech_of

logger = logging.getLogger("jackfield.server")
RATE = 24_000
"""Samples per second, if the session does not say."""
VLLM_RATE = 16_000
"""Sampling rate of vLLM's clients."""
LOWEST_RATE, HIGHEST_RATE = 8_000, 48_000
MAX_MESSAGE = 4 << 20
"""Most bytes of an event."""
MAX_PROMPT = 1 << 14
"""Characters of the text that comes before."""
MAX_SECONDS = 300
"""Most audio that was sent and is not yet transcribed."""
MAX_ITEMS = 16
"""Commits that are not yet written down."""
MAX_SESSIONS = 64
"""Most sessions of a process."""
IDLE_SECONDS = 600
"""Without an event from the client, after which a session is closed."""
HEARTBEAT_SECONDS = 30.0
SESSIONS: web.AppKey[Any] = web.AppKey("realtime_sessions", weakref.WeakSet)
"""A set of sockets."""


class Settings(NamedTuple):
    """What a client sets for the commits that follow."""

    rate: int = RATE
    language: str | None = None
    prompt: str = ""
    of_vllm: bool = False
    """Events are those of vLLM: a commit that is not final says that an utterance begins."""

    @property
    def options(self) -> SpeechOptions:
        return SpeechOptions(self.language, prompt=self.prompt)


class Item(NamedTuple):
    id: str
    pcm: bytes
    settings: Settings

    @property
    def seconds(self) -> float:
        return len(self.pcm) / 2 / self.settings.rate


def add_realtime(app: web.Application) -> None:
    app[SESSIONS] = weakref.WeakSet()
    add_routes(app, realtime)
    app.on_shutdown.append(_close_all)


async def _close_all(app: web.Application) -> None:
    for socket in set(app[SESSIONS]):
        await socket.close(code=1001, message=b"the server stops")


@route("GET /v1/realtime")
@internal
async def realtime(request: web.Request) -> web.WebSocketResponse:
    """Write down speech that comes in pieces."""
    app = request.app
    origin = request.headers.get("Origin")
    if origin is not None and not (
        app[OPTIONS].cors.allows(origin) or same_site(origin, request.headers.get("Host", ""))
    ):
        raise Forbidden(
            f"Origin: pages of {origin[:80]!r} may not use this server; start it with "
            "--allowed-origins"
        )
    speech_of(app[ENGINE])
    socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE, heartbeat=HEARTBEAT_SECONDS)
    if not socket.can_prepare(request).ok:
        raise InvalidRequest("/v1/realtime: speaks WebSocket; connect with a client of that")
    session = Session(request, socket)
    await session.choose_model(request.query.get("model"))
    sessions = app[SESSIONS]
    # Nothing is awaited between the count and what it counts.
    if len(sessions) >= MAX_SESSIONS:
        raise EngineOverloaded(f"this server has {MAX_SESSIONS} realtime sessions; try later")
    sessions.add(socket)
    try:
        await socket.prepare(request)
        await session.run()
    finally:
        sessions.discard(socket)
    return socket


class Session:
    """One client's connection."""

    def __init__(self, request: web.Request, socket: web.WebSocketResponse) -> None:
        self._app, self._tenant, self._socket = request.app, tenant_of(request), socket
        self._engine = request.app[ENGINE]
        self._id = _id("sess")
        self._settings = Settings()
        self._adapter: Any = None
        self._pcm = bytearray()
        self._items: asyncio.Queue[Item | None] = asyncio.Queue()
        self._waiting_seconds = 0.0
        """Audio of items that are not yet transcribed."""
        self._last_item: str | None = None
        self._handlers: dict[str, Callable[[dict[str, Any]], Any]] = {
            "session.update": self._update,
            "transcription_session.update": self._update,
            "input_audio_buffer.append": self._append,
            "input_audio_buffer.commit": self._commit,
            "input_audio_buffer.clear": self._clear,
        }

    async def run(self) -> None:
        """Serve the client until it goes, and has what it committed."""
        created = {"id": self._id, "created": int(time.time())}
        await self._send("session.created", session=self._described(), **created)
        tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[1].done() and not self._socket.closed:
                self._items.put_nowait(None)
                # The connection is read on, so that one that is gone is noticed.
                tasks.append(asyncio.create_task(self._ignore()))
                await asyncio.wait({tasks[0], tasks[2]}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._socket.close()

    async def _ignore(self) -> None:
        async for _ in self._socket:
            pass

    async def choose_model(self, name: str | None) -> None:
        """Raises ModelNotFound."""
        self._adapter = await find_adapter(self._engine, name, self._tenant)

    # ------------------------------------------------------------ events of the client

    async def _read(self) -> None:
        """Handle events until the client goes, or says that a commit was the last."""
        while True:
            try:
                message = await self._socket.receive(timeout=IDLE_SECONDS)
            except TimeoutError:
                await self._error(f"no event for {IDLE_SECONDS} seconds", None, None)
                return
            if message.type is not WSMsgType.TEXT:
                if message.type is not WSMsgType.BINARY:
                    return
                await self._error("events are JSON texts", None, None)
                continue
            event: Any = None
            try:
                event = json.loads(message.data)
                if await self._handle(event):
                    return
            except (ValueError, RecursionError) as error:
                await self._error(f"an event is JSON: {error}", None, event)
            except JackfieldError as error:
                await self._error(str(error), getattr(error, "param", None), event)

    async def _handle(self, event: Any) -> bool:
        """Handle an event; return whether it was the last. Raises InvalidRequest."""
        kind = event.get("type") if isinstance(event, dict) else None
        handler = self._handlers.get(kind) if isinstance(kind, str) else None
        if handler is None:
            names = ", ".join(self._handlers)
            raise InvalidRequest(f"type: {shown(kind)} is none of {names}", param="type")
        await handler(event)
        is_final = kind == "input_audio_buffer.commit" and event.get("final") is True
        return is_final and not self._settings.of_vllm

    async def _update(self, event: dict[str, Any]) -> None:
        if isinstance(event.get("model"), str) and "session" not in event and not self._pcm:
            await self.choose_model(event["model"])
            self._settings = Settings(VLLM_RATE, of_vllm=True)
            return
        given = event.get("session", {})
        if not isinstance(given, dict):
            raise InvalidRequest("session: must be an object", param="session")
        audio = _object(_object(given, "audio"), "input")
        words = _object(audio, "transcription") or _object(given, "input_audio_transcription")
        model = words.get("model", event.get("model"))
        if model is not None and not isinstance(model, str):
            raise InvalidRequest(f"model: must be a name, got {shown(model)}", param="model")
        turns = audio.get("turn_detection", given.get("turn_detection"))
        if turns is not None:
            raise InvalidRequest(
                "turn_detection: is not done; set it to null, and send input_audio_buffer.commit",
                param="turn_detection",
            )
        settings = self._settings._replace(rate=self._rate(audio, given))
        if "language" in words:
            language = words["language"]
            if language is not None and not isinstance(language, str):
                raise InvalidRequest("language: must be a text", param="language")
            settings = settings._replace(language=language or None)
        if "prompt" in words:
            prompt = words["prompt"]
            if not isinstance(prompt, str) or len(prompt) > MAX_PROMPT or not _is_unicode(prompt):
                raise InvalidRequest(
                    f"prompt: must be a text of at most {MAX_PROMPT} characters", param="prompt"
                )
            settings = settings._replace(prompt=prompt)
        speech_of(self._engine).check(settings.options)
        if settings.rate != self._settings.rate and self._pcm:
            raise InvalidRequest("rate: commit or clear the buffer first", param="rate")
        if model is not None:
            await self.choose_model(model)
        self._settings = settings
        await self._send(f"{event['type']}d", session=self._described())

    def _rate(self, audio: dict[str, Any], given: dict[str, Any]) -> int:
        form = audio.get("format", given.get("input_audio_format"))
        if form is None:
            return self._settings.rate
        kind = form.get("type") if isinstance(form, dict) else form
        rate = form.get("rate", RATE) if isinstance(form, dict) else RATE
        if kind not in ("pcm16", "audio/pcm") or type(rate) is not int:
            raise InvalidRequest(
                f'format: must be "pcm16" or {{"type": "audio/pcm", "rate": {RATE}}}, got '
                f"{shown(form)}",
                param="format",
            )
        if not LOWEST_RATE <= rate <= HIGHEST_RATE:
            raise InvalidRequest(
                f"rate: {rate} samples per second; {LOWEST_RATE} to {HIGHEST_RATE} are served",
                param="rate",
            )
        return rate

    async def _append(self, event: dict[str, Any]) -> None:
        text = event.get("audio")
        try:
            data = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
        except (binascii.Error, ValueError):
            data = b""
        if not data:
            raise InvalidRequest("audio: must be PCM of 16 bits in base64", param="audio")
        seconds = (len(self._pcm) + len(data)) / 2 / self._settings.rate
        if seconds + self._waiting_seconds > MAX_SECONDS:
            raise InvalidRequest(
                f"audio: more than {MAX_SECONDS} seconds are not yet written down; commit, and "
                "wait for what is",
                param="audio",
            )
        self._pcm += data

    async def _commit(self, event: dict[str, Any]) -> None:
        of_vllm = self._settings.of_vllm
        if of_vllm and event.get("final") is not True:
            return
        if len(self._pcm) < 2 and not of_vllm:
            if event.get("final") is True:
                return
            raise InvalidRequest("input_audio_buffer: is empty", param="input_audio_buffer")
        if self._items.qsize() >= MAX_ITEMS:
            raise InvalidRequest(
                f"input_audio_buffer: {MAX_ITEMS} commits are not yet written down",
                param="input_audio_buffer",
            )
        item = Item(_id("item"), bytes(self._pcm), self._settings)
        self._pcm.clear()
        self._waiting_seconds += item.seconds
        before, self._last_item = self._last_item, item.id
        if not of_vllm:
            await self._send(
                "input_audio_buffer.committed", previous_item_id=before, item_id=item.id
            )
        self._items.put_nowait(item)

    async def _clear(self, event: dict[str, Any]) -> None:
        self._pcm.clear()
        await self._send("input_audio_buffer.cleared")

    # ------------------------------------------------------------ what is said

    async def _write(self) -> None:
        """Write items down, one after the other."""
        usage = self._app[USAGE]
        while (item := await self._items.get()) is not None:
            try:
                usage.begin(self._tenant)
                try:
                    await self._transcribe(item)
                finally:
                    usage.end(self._tenant)
            except ConnectionError:
                return
            except Exception as error:
                known = isinstance(error, JackfieldError)
                if not known:
                    logger.exception("a recording of a realtime session failed")
                message = str(error) if known else type(error).__name__
                if item.settings.of_vllm:
                    await self._send("error", error=message, code="processing_error")
                    continue
                await self._send(
                    f"{_TRANSCRIPTION}.failed", item_id=item.id, content_index=0,
                    error=_described(message, None),
                )  # fmt: skip
            finally:
                self._waiting_seconds -= item.seconds

    async def _transcribe(self, item: Item) -> None:
        of_vllm = item.settings.of_vllm
        kind = "transcription" if of_vllm else _TRANSCRIPTION
        fields = {} if of_vllm else {"item_id": item.id, "content_index": 0}
        said = ""
        async with contextlib.aclosing(self._deltas(item)) as deltas:
            async for delta in deltas:
                said += delta
                await self._send(f"{kind}.delta", **fields, delta=delta)
        if of_vllm:
            await self._send(f"{kind}.done", text=said.strip(), usage=None)
            return
        usage = {"type": "duration", "seconds": math.ceil(item.seconds)}
        await self._send(f"{kind}.completed", **fields, transcript=said.strip(), usage=usage)

    async def _deltas(self, item: Item) -> AsyncGenerator[str, None]:
        if len(item.pcm) < 2:
            return
        speech = speech_of(self._engine)
        samples = await asyncio.to_thread(_samples, item, speech.sampling_rate)
        origin = Origin(self._tenant, None, self._app[OPTIONS].share_prefix_cache, self._adapter)
        recording = Samples(samples, speech.sampling_rate)
        transcription = speech.transcription(recording, item.settings.options, origin)
        async with contextlib.aclosing(transcription.deltas()) as deltas:
            async for delta in deltas:
                yield delta

    # ------------------------------------------------------------ events of the server

    def _described(self) -> dict[str, Any]:
        settings = self._settings
        return {
            "type": "transcription", "object": "realtime.transcription_session", "id": self._id,
            "audio": {
                "input": {
                    "format": {"type": "audio/pcm", "rate": settings.rate},
                    "transcription": {
                        "model": self._engine.served_model_names[0],
                        "language": settings.language, "prompt": settings.prompt,
                    },
                    "turn_detection": None,
                },
            },
        }  # fmt: skip

    async def _error(self, message: str, param: str | None, event: Any) -> None:
        if self._settings.of_vllm:
            await self._send("error", error=message, code="invalid_event")
            return
        described = _described(message, param)
        if isinstance(event, dict) and isinstance(event.get("event_id"), str):
            described["event_id"] = event["event_id"][:64]
        await self._send("error", error=described)

    async def _send(self, kind: str, **fields: Any) -> None:
        event = {"type": kind, "event_id": _id("event"), **fields}
        # In ASCII, as what a client has sent, and an error tells, may have half of a character.
        await self._socket.send_str(json.dumps(event))


_TRANSCRIPTION = "conversation.item.input_audio_transcription"


def _described(message: str, param: str | None) -> dict[str, Any]:
    return {
        "type": "invalid_request_error", "code": None, "message": message, "param": param
    }  # fmt: skip


def _is_unicode(text: str) -> bool:
    """Return whether a text has no halves of characters, which JSON can write."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _object(value: dict[str, Any], name: str) -> dict[str, Any]:
    inner = value.get(name)
    return inner if isinstance(inner, dict) else {}


def _samples(item: Item, rate: int) -> np.ndarray:
    """Return an item's samples, [n] float32. Raises InvalidRequest."""
    words = np.frombuffer(item.pcm[: len(item.pcm) // 2 * 2], dtype="<i2")
    return resampled(words.astype(np.float32) / (1 << 15), item.settings.rate, rate, "rate")


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex[:24]}"
