"""The forms of /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web

from ....core.errors import BodyTooLarge, InvalidRequest
from ....core.sampling_params import SamplingParams
from ....core.tenancy import ReceivedRequest
from ...http.auth.origin import Origin
from ...http.auth.tenants import TENANCY, received
from ...http.context import ENGINE, OPTIONS
from ...http.forms import FormReader
from ...http.model_names import find_adapter
from ..common.decoding import convert
from ..common.request_body import Call

MAX_FIELD = 1 << 14
"""Most bytes of a form field other than the file."""
LISTS = frozenset({"timestamp_granularities", "include"})
NUMBERS = frozenset({
    "temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
})  # fmt: skip
INTEGERS = frozenset({"seed", "top_k"})
SWITCHES = frozenset({
    "stream", "stream_include_usage", "stream_continuous_usage_stats",
})  # fmt: skip
Form = Literal["json", "text", "srt", "verbose_json", "vtt"]


class TranslationForm(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/audio/translations: a form with `file`."""

    model: str | None = None
    prompt: str = ""
    """Text that comes before the recording, in the language of the result."""
    response_format: Form = "json"
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 0.0
    """0: higher ones are tried where a text repeats itself or is improbable."""
    stream: bool = False
    """Events, for the formats json and text; the last one has the usage."""
    stream_include_usage: bool = True
    stream_continuous_usage_stats: bool = False
    """These two are vLLM's, and change nothing."""
    chunking_strategy: Literal["auto"] = "auto"
    """Where recordings are cut is found by what is said."""
    seed: int | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    def check(self) -> None:
        """Raise InvalidRequest for what does not go together."""
        if self.stream and self.response_format not in ("json", "text"):
            raise InvalidRequest(
                f"stream: is for the formats json and text, not {self.response_format}",
                param="stream",
            )

    def sampling(self) -> SamplingParams:
        return SamplingParams(
            seed=self.seed, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p,
            repetition_penalty=self.repetition_penalty, frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
        )  # fmt: skip


class TranscriptionForm(TranslationForm, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/audio/transcriptions: a form with `file`."""

    language: str | None = None
    """ISO 639-1; without it, the language is detected."""
    timestamp_granularities: tuple[Literal["word", "segment"], ...] = ("segment",)
    include: tuple[str, ...] = ()

    def check(self) -> None:
        super().check()
        if "word" in self.timestamp_granularities and self.response_format != "verbose_json":
            raise InvalidRequest(
                "timestamp_granularities: word is for the format verbose_json, not "
                f"{self.response_format}",
                param="timestamp_granularities",
            )
        if self.include:
            raise InvalidRequest(
                "include: is not supported; verbose_json has avg_logprob of each segment",
                param="include",
            )


async def read_form(
    call: Call, request: web.Request, kind: type[TranslationForm]
) -> tuple[Any, bytes, Origin]:
    """Return the form, the file, and the request's origin. Raises InvalidRequest with the field's
    name, BodyTooLarge, plugins' refusals, and ModelNotFound."""
    limit = call.app[OPTIONS].max_audio_bytes
    fields: dict[str, Any] = {}
    data: bytes | None = None
    form = FormReader(request)
    while (part := await form.next_part()) is not None:
        name = part.name[:64].removesuffix("[]")
        if name == "file":
            if data is not None:
                raise InvalidRequest("file: give one", param="file")
            data = await _content(form, limit)
        elif name in LISTS:
            fields.setdefault(name, []).append(await _field(form, name))
        elif name in fields:
            raise InvalidRequest(f"{name}: give one", param=name)
        else:
            fields[name] = _typed(name, await _field(form, name))
    if not data:
        raise InvalidRequest("file: a recording is missing", param="file")
    if call.app[TENANCY].received:
        seen = ReceivedRequest(call.route, fields, call.tenant, call.headers)
        fields = await received(call.app[TENANCY], seen)
    params = convert(fields, kind)
    params.check()
    adapter = await find_adapter(call.app[ENGINE], params.model, call.tenant)
    return params, data, Origin(call.tenant, None, call.app[OPTIONS].share_prefix_cache, adapter)


async def _field(form: FormReader, name: str) -> str:
    value = b""
    while piece := await form.read():
        value += piece
        if len(value) > MAX_FIELD:
            raise InvalidRequest(f"{name}: is longer than {MAX_FIELD} bytes", param=name)
    return value.decode("utf-8", "replace")


async def _content(form: FormReader, limit: int) -> bytes:
    pieces, size = [], 0
    while piece := await form.read():
        pieces.append(piece)
        size += len(piece)
        if size > limit:
            raise BodyTooLarge(f"file: is larger than {limit} bytes (--max-audio-bytes)")
    return await asyncio.to_thread(b"".join, pieces)


def _typed(name: str, text: str) -> Any:
    """Return what a form's text stands for; the text itself where it is nothing of the kind."""
    if name in SWITCHES:
        return {"true": True, "false": False, "1": True, "0": False}.get(text.lower(), text)
    if name in NUMBERS or name in INTEGERS:
        try:
            return float(text) if name in NUMBERS else int(text)
        except ValueError:
            return text
    return text
