"""POST /v1/audio/transcriptions and POST /v1/audio/translations"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
from aiohttp import web

from ....core.audio.files import AudioFile
from ....core.audio.source import make_source
from ....core.engine.async_engine import AsyncEngine
from ....core.errors import InvalidRequest
from ....core.protocols.audio import AudioSource, SpeechTokens
from ....core.sampling_params import SamplingParams
from ...http.auth.origin import Origin
from ...http.context import ENGINE, new_id, part_id, reply, tokenizer_of
from ...http.request_log import watched
from ...http.routing import add_routes, route
from ...http.streaming import named_frame, stream
from ..common.request_body import call_of
from .formats import joined, subtitles, timed, verbose
from .openapi import audio_route
from .request import (
    TranscriptionForm,
    TranslationForm,
    language_of,
    read_form,
    speech_of,
)
from .transcriber import Heard, Segment, Task, Transcriber


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
    engine = request.app[ENGINE]
    audio, tokens = speech_of(engine)
    if translate and tokens.translate is None:
        raise InvalidRequest("model: this model does not translate", param="model")
    words = "word" in getattr(params, "timestamp_granularities", ())
    if words:
        _check_words(engine, tokens)
    file = await asyncio.to_thread(AudioFile, data, audio.sampling_rate)
    tokenizer = tokenizer_of(engine)
    before: list[int] = []
    if text := params.prompt.strip():
        before = tokenizer.encode(f" {text}", add_special_tokens=False, allow_special=False)
    task = Task(
        tokens=tokens,
        language=language_of(tokens, language),
        translate=translate,
        prompt_token_ids=tuple(before),
        temperatures=params.temperatures,
        params=params.sampling(),
        times=params.response_format not in ("json", "text"),
        words=words,
    )
    decoder = EngineDecoder(engine, audio, tokens, origin)
    longest = engine.model_config.max_model_len
    transcriber = Transcriber(file, decoder, task, audio.max_samples, longest)
    if params.stream:
        return await stream(request, _events(transcriber))
    segments = [each async for window in transcriber.segments() for each in window]
    return _response(params.response_format, transcriber, segments, translate=translate)


def _check_words(engine: AsyncEngine, tokens: SpeechTokens) -> None:
    """Raise InvalidRequest where no times of words can be had."""
    reason = None
    if not tokens.alignment_heads:
        reason = "this model's generation_config.json has no alignment_heads"
    elif engine.config.tensor_parallel_size > 1:
        reason = "times of words are not made where ranks divide the model"
    if reason is not None:
        raise InvalidRequest(
            f"timestamp_granularities: {reason}; ask for segment", param="timestamp_granularities"
        )


def _response(
    form: str, transcriber: Transcriber, segments: Sequence[Segment], *, translate: bool
) -> web.Response:
    if form == "text":
        return web.Response(text=joined(segments) + "\n", content_type="text/plain")
    if form in ("srt", "vtt"):
        kind = "text/vtt" if form == "vtt" else "text/plain"
        return web.Response(text=subtitles(segments, form), content_type=kind)
    body: dict[str, Any] = {"text": joined(segments)}
    if form == "verbose_json":
        body = {
            "task": "translate" if translate else "transcribe",
            "language": transcriber.language or "en",
            "duration": round(transcriber.seconds, 3),
            **body,
            "segments": [verbose(segment) for segment in segments],
        }
    if transcriber.words:
        body["words"] = [timed(word) for word in transcriber.words]
    return reply({**body, "usage": _usage(transcriber)})


async def _events(transcriber: Transcriber) -> AsyncIterator[bytes]:
    """Yield OpenAI's events: a delta for each window."""
    said = ""
    async for segments in transcriber.segments():
        delta = "".join(segment.text for segment in segments)
        delta = delta if said else delta.lstrip()
        said += delta
        yield named_frame({"type": "transcript.text.delta", "delta": delta})
    yield named_frame(
        {"type": "transcript.text.done", "text": said.strip(), "usage": _usage(transcriber)}
    )


def _usage(transcriber: Transcriber) -> dict[str, Any]:
    return {"type": "duration", "seconds": math.ceil(transcriber.seconds)}


class EngineDecoder:
    """An engine's model of speech, for one request."""

    def __init__(
        self, engine: AsyncEngine, audio: AudioSource, tokens: SpeechTokens, origin: Origin
    ) -> None:
        self._engine, self._audio, self._tokens = engine, audio, tokens
        self._origin = origin
        self._tokenizer = tokenizer_of(engine)
        self._id, self._count = new_id("trsc"), 0

    async def listen(self, samples: np.ndarray) -> Any:
        """Return a source, made once for several prompts."""
        return await asyncio.to_thread(make_source, self._audio, {"audio": samples})

    async def write(
        self, window: Any, prompt_token_ids: list[int], params: SamplingParams
    ) -> Heard:
        """Run a request of its own."""
        self._count += 1
        options = self._origin.engine_options(part_id(self._id, self._count), 0, None)
        prompt: Any = {
            "prompt_token_ids": prompt_token_ids, "multi_modal_data": {"audio": window}
        }  # fmt: skip
        outputs = watched(self._engine.generate(prompt, params, **options))
        async for output in outputs:
            last = output
        if (completion := last.outputs[0]).finish_reason == "error":
            raise last.failure()
        logprobs = [
            position[token].logprob
            for token, position in zip(
                completion.token_ids, completion.logprobs or (), strict=False
            )
            if position is not None
        ]
        return Heard(completion.token_ids, logprobs)

    async def attention(self, window: Any, token_ids: Sequence[int]) -> np.ndarray:
        heads = self._tokens.alignment_heads
        args = (window.features.data, list(token_ids), [list(head) for head in heads])
        [data, *_] = await self._engine.collective_rpc("source_weights", args=args)
        weights = np.frombuffer(data, dtype=np.float32)
        return weights.reshape(len(heads), len(token_ids), -1)

    def text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)
