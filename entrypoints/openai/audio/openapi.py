"""OpenAPI descriptions of the routes of speech."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from ..common.response_schemas import ErrorResponse

F = TypeVar("F", bound=Callable[..., Any])


class TranscriptionUsage(msgspec.Struct):
    type: str
    seconds: int


class TranscriptionSegment(msgspec.Struct):
    """A piece of speech; seek in frames of 10 ms, start and end in seconds."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class TranscriptionWord(msgspec.Struct):
    """A word; start and end in seconds."""

    word: str
    start: float
    end: float


class TranscriptionResponse(msgspec.Struct):
    """A transcription; all fields in the format verbose_json."""

    text: str
    usage: TranscriptionUsage
    task: str | msgspec.UnsetType = msgspec.UNSET
    language: str | msgspec.UnsetType = msgspec.UNSET
    duration: float | msgspec.UnsetType = msgspec.UNSET
    segments: list[TranscriptionSegment] | msgspec.UnsetType = msgspec.UNSET
    words: list[TranscriptionWord] | msgspec.UnsetType = msgspec.UNSET


def audio_route(form: type[msgspec.Struct]) -> Callable[[F], F]:
    """Return a decorator that describes a handler whose body is a form with a file."""
    fields = msgspec.json.schema_components([form])[1][form.__name__]["properties"]
    body = {
        "type": "object",
        "required": ["file"],
        "properties": {
            "file": {"type": "string", "contentMediaType": "application/octet-stream"},
            **fields,
        },
    }
    errors = (400, 404, 408, 413, 415, 500, 503)

    def decorate(handler: F) -> F:
        handler.openapi = {  # type: ignore[attr-defined]
            "tags": ["speech"],
            "summary": (handler.__doc__ or "").strip().rstrip("."),
            "requestBody": {
                "required": True, "content": {"multipart/form-data": {"schema": body}},
            },
            "responses": {
                "200": {
                    "description": "Done; text for the formats text, srt and vtt",
                    "content": {
                        "application/json": {"schema": TranscriptionResponse},
                        "text/plain": {"schema": {"type": "string"}},
                        "text/vtt": {"schema": {"type": "string"}},
                        "text/event-stream": {"schema": {"type": "string"}},
                    },
                },
                **{
                    str(status): {
                        "description": "Refused",
                        "content": {"application/json": {"schema": ErrorResponse}},
                    }
                    for status in errors
                },
            },
        }  # fmt: skip
        return handler

    return decorate
