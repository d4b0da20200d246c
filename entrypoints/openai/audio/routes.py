"""POST /v1/audio/transcriptions and POST /v1/audio/translations"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

from aiohttp import web

from ....core.audio.files import AudioFile
from ...http.auth.origin import Origin
from ...http.context import ENGINE, reply
from ...http.routing import add_routes, route
from ...http.streaming import named_frame, stream
from ..common.request_body import call_of
from .formats import joined, subtitles, timed, verbose
from .openapi import audio_route
from .request import TranscriptionForm, TranslationForm, read_form
from .speech import SpeechOptions, Transcription, speech_of
from .transcriber import Segment, Transcriber


def add_audio(app: web.Application) -> None:
    add_routes(app, transcriptions, translations)


@route("POST /v1/audio/transcriptions", inference=True)
@audio_route(TranscriptionForm)
async def transcriptions(request: web.Request) -> web.StreamResponse:
    """Write speech down, in its language."""
    params, data, origin = await read_form(call_of(request), request, TranscriptionForm)
    return await _answer(request, params, data, origin, language=params.language)


@route("POST /v1/audio/translations", inference=True)
@audio_route(TranslationForm)
async def translations(request: web.Request) -> web.StreamResponse:
    """Write speech down in English."""
    params, data, origin = await read_form(call_of(request), request, TranslationForm)
    return await _answer(request, params, data, origin, translate=True)


async def _answer(
    request: web.Request,
    params: TranslationForm,
    data: bytes,
    origin: Origin,
    *,
    language: str | None = None,
    translate: bool = False,
) -> web.StreamResponse:
    speech = speech_of(request.app[ENGINE])
    options = SpeechOptions(
        language=language, translate=translate, prompt=params.prompt,
        temperature=params.temperature, params=params.sampling(), form=params.response_format,
        times=params.response_format not in ("json", "text"),
        words="word" in getattr(params, "timestamp_granularities", ()),
    )  # fmt: skip
    speech.check(options)
    file = await asyncio.to_thread(AudioFile, data, speech.sampling_rate)
    transcription = speech.transcription(file, options, origin)
    if params.stream:
        return await stream(request, _events(transcription))
    if options.times:
        assert isinstance(transcription, Transcriber), "others have no times"
        segments = [each async for window in transcription.segments() for each in window]
        return _timed(options, transcription, segments)
    text = "".join([delta async for delta in transcription.deltas()]).strip()
    if options.form == "text":
        return web.Response(text=f"{text}\n", content_type="text/plain")
    return reply({"text": text, "usage": _usage(transcription)})


def _timed(
    options: SpeechOptions, transcriber: Transcriber, segments: Sequence[Segment]
) -> web.Response:
    """Return the response in a form with times."""
    form = options.form
    if form in ("srt", "vtt"):
        kind = "text/vtt" if form == "vtt" else "text/plain"
        return web.Response(text=subtitles(segments, form), content_type=kind)
    body: dict[str, Any] = {
        "task": "translate" if options.translate else "transcribe",
        "language": transcriber.language or "en",
        "duration": round(transcriber.seconds, 3),
        "text": joined(segments),
        "segments": [verbose(segment) for segment in segments],
    }
    if options.words:
        body["words"] = [timed(word) for word in transcriber.words]
    return reply({**body, "usage": _usage(transcriber)})


async def _events(transcription: Transcription) -> AsyncIterator[bytes]:
    """Yield OpenAI's events: a delta for each piece of text."""
    said = ""
    async with contextlib.aclosing(transcription.deltas()) as deltas:
        async for delta in deltas:
            said += delta
            yield named_frame({"type": "transcript.text.delta", "delta": delta})
    yield named_frame(
        {"type": "transcript.text.done", "text": said.strip(), "usage": _usage(transcription)}
    )


def _usage(transcription: Transcription) -> dict[str, Any]:
    return {"type": "duration", "seconds": math.ceil(transcription.seconds)}
