"""Finds the media of a request: parts of messages, `multi_modal_data` of a prompt."""

from __future__ import annotations

import json
import mimetypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..errors import InvalidRequest, shown

MAX_OPTIONS = 1000
"""Most characters of a request's `mm_processor_kwargs`, as JSON."""
DETAILS = ("auto", "low", "high", "original")
"""How closely a picture is looked at: "low" makes it smaller, the others leave it as it is."""
TEXTS = frozenset({"text", "refusal"})
PARTS = {
    "image_url": "image", "input_image": "image", "image": "image", "image_pil": "image",
    "input_audio": "audio", "audio_url": "audio", "audio": "audio",
    "video_url": "video", "input_video": "video", "video": "video",
    "image_embeds": "image", "audio_embeds": "audio", "video_embeds": "video",
}  # fmt: skip
"""Type of a part → its modality."""


class MediaPart(dict[str, Any]):
    """A part of content whose request calls it otherwise than by its place in the messages."""

    def __init__(
        self, url: str, field: str, kind: str, modality: str = "image", detail: str = "auto"
    ) -> None:
        """field: what the request calls it, for errors; kind: its type there."""
        super().__init__({"type": f"{modality}_url", f"{modality}_url": url})
        self.field, self.kind, self.detail = field, kind, detail


def file_part(file: Mapping[str, Any], path: str, kind: str) -> MediaPart:
    """Return the part of a file that a request sends as data, which is an item by its type, or by
    the file's name. Raises InvalidRequest."""
    data, field = file.get("file_data"), f"{path}.file_data"
    if not isinstance(data, str) or not data:
        raise InvalidRequest(
            f"{field}: must be a data: URL or base64; files are not kept here", param=field
        )
    is_url = data[:5].lower() == "data:"
    name = file.get("filename")
    if is_url:
        named: str | None = data[5:200].partition(",")[0].partition(";")[0].lower()
    else:
        named = mimetypes.guess_type(name)[0] if isinstance(name, str) else None
    modality = (named or "").partition("/")[0]
    if modality not in PARTS.values():
        what = named or ("without a type" if is_url else "without a filename that says what it is")
        raise InvalidRequest(
            f"{field}: is {what}; a file must be a picture, a recording or a video", param=field
        )
    return MediaPart(data if is_url else data_url(data, modality), field, kind, modality)


@dataclass(frozen=True)
class Embeds:
    """Rows of one item, or of several one after the other, as a request sends them."""

    modality: str
    tensors: Mapping[str, Any]
    """`name` → rows; names of what else the family needs to know, such as `image_grid_thw`. Values
    as `read_tensor` takes them."""
    single: bool = False
    """It is one item."""

    @property
    def name(self) -> str:
        return f"{self.modality}_embeds"

    @property
    def nbytes(self) -> int:
        """Of what was sent."""
        values = self.tensors.values()
        return sum(len(value) for value in values if isinstance(value, str | bytes))


def embeds_of(value: Any, modality: str) -> Embeds | None:
    """Return an item of `multi_modal_data` that is given as embeddings; None: it is not."""
    if isinstance(value, Mapping):
        return Embeds(modality, value)
    is_float = getattr(value, "is_floating_point", None)
    if is_float is None or not is_float() or value.dim() < 2:
        return None
    return Embeds(modality, {f"{modality}_embeds": value})


class MediaSource(NamedTuple):
    """Where an item comes from."""

    modality: str
    value: Any
    """A URL, bytes, `Embeds`, or what is decoded: a picture of Pillow, an array, or samples with
    their rate."""
    field: str
    """What the request calls it, for errors."""
    detail: str = "auto"
    """One of `DETAILS`, for pictures."""
    options: str = ""
    """The request's `mm_processor_kwargs`, as JSON; empty: none."""


def split(
    messages: Any, modalities: Sequence[str], reason: str = ""
) -> tuple[Any, list[MediaSource]]:
    """Return messages whose media parts are {"type": modality} alone, and the sources of these, in
    order; the same messages if they have none. Raises InvalidRequest for other modalities, perhaps
    with a reason."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        return messages, []
    sources: list[MediaSource] = []
    changed: dict[int, Any] = {}
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple):
            continue
        parts = []
        for number, part in enumerate(content):
            field = getattr(part, "field", f"messages[{index}].content[{number}]")
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind == "file" and modalities:
                file, where = part.get(kind), f"{field}.{kind}"
                part = file_part(file if isinstance(file, Mapping) else {}, where, kind)
                kind, field = part["type"], part.field
            if not isinstance(kind, str) or kind not in PARTS:
                parts.append(part)
                continue
            modality = PARTS[kind]
            if modality not in modalities:
                named = getattr(part, "kind", kind)
                because = f": {reason}" if reason else ""
                raise InvalidRequest(
                    f"{field}: {shown(named)} parts are not supported; this server takes "
                    f"{' and '.join(('text', *modalities))}{because}",
                    param=field,
                )
            sources.append(_source(part, kind, modality, field))
            parts.append({"type": modality})
            changed[index] = {**message, "content": parts}
        if index in changed:
            changed[index]["content"] = parts
    if not changed:
        return messages, []
    return [changed.get(index, message) for index, message in enumerate(messages)], sources


def _source(part: Mapping[str, Any], kind: str, modality: str, field: str) -> MediaSource:
    """Return the source of a part. Raises InvalidRequest."""
    names = (f"{modality}_url", kind, modality, "url")
    name = next((name for name in names if name in part), kind)
    value = part.get(name)
    if isinstance(part, MediaPart):
        return MediaSource(modality, value, field, part.detail)
    if kind == f"{modality}_embeds":
        return _given(part.get(kind), modality, f"{field}.{kind}")
    detail = detail_of(part, field) if modality == "image" else "auto"
    field = f"{field}.{name}"
    if isinstance(value, Mapping):
        detail = detail_of(value, field, detail) if modality == "image" else detail
        given = "data" if name == "input_audio" else "url"
        value, field = value.get(given), f"{field}.{given}"
        if given == "data" and isinstance(value, str) and value:
            value = data_url(value, modality)
    if value is None or (isinstance(value, str) and not value):
        raise InvalidRequest(
            f"{field}: is missing; give a URL (data:{modality}/…;base64,…)", param=field
        )
    return MediaSource(modality, value, field, detail)


def _given(value: Any, modality: str, field: str) -> MediaSource:
    """Return the source of a part that has embeddings. Raises InvalidRequest."""
    if value is None:
        raise InvalidRequest(f"{field}: is missing; give base64 of a tensor", param=field)
    tensors = value if isinstance(value, Mapping) else {f"{modality}_embeds": value}
    return MediaSource(modality, Embeds(modality, tensors, single=True), field)


OPTIONS_FIELD = "mm_processor_kwargs"
SOUND_OPTION = "use_audio_in_video"
"""That of videos: their sound is heard, too."""


def with_options(
    sources: Sequence[MediaSource], options: Mapping[str, Any] | None
) -> list[MediaSource]:
    """Return sources with a request's `mm_processor_kwargs`. Raises InvalidRequest."""
    if not options:
        return list(sources)
    field = OPTIONS_FIELD
    if not isinstance(options, Mapping):
        raise InvalidRequest(f"{field}: must be an object, got {shown(options)}", param=field)
    options, of_videos = dict(options), {}
    if SOUND_OPTION in options:
        of_videos[SOUND_OPTION] = options.pop(SOUND_OPTION)
    if options and (others := sorted({source.modality for source in sources} - {"image"})):
        raise InvalidRequest(
            f"{field}: of {' and '.join(others)} there are no options for a request; leave it out",
            param=field,
        )
    text, video_text = (_options_text(own, field) for own in (options, of_videos))
    return [
        source._replace(options=video_text if source.modality == "video" else text)
        for source in sources
    ]


def _options_text(options: Mapping[str, Any], field: str) -> str:
    """Return options as JSON; empty: there are none. Raises InvalidRequest."""
    if not options:
        return ""
    try:
        text = json.dumps(options, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{field}: {error}", param=field) from None
    if len(text) > MAX_OPTIONS:
        raise InvalidRequest(f"{field}: has more than {MAX_OPTIONS} characters", param=field)
    return text


def detail_of(given: Mapping[str, Any], field: str, default: str = "auto") -> str:
    """Return how closely a picture is looked at. Raises InvalidRequest."""
    detail = given.get("detail")
    if detail is None:
        return default
    if detail not in DETAILS:
        raise InvalidRequest(
            f"{field}.detail: must be one of {', '.join(DETAILS)}, got {shown(detail)}",
            param=f"{field}.detail",
        )
    return str(detail)


def data_url(data: str, modality: str) -> str:
    """Return the URL of content in base64; its format is found by what it contains."""
    return f"data:{modality}/*;base64,{data}"


def of_prompt(data: Any, modalities: Sequence[str]) -> list[MediaSource]:
    """Return the sources in `multi_modal_data`: modality → an item or a list of items. Raises
    InvalidRequest."""
    field = "multi_modal_data"
    if not isinstance(data, Mapping):
        raise InvalidRequest(f'{field}: must be a dict such as {{"image": picture}}', param=field)
    sources = []
    for modality, items in data.items():
        if modality not in modalities:
            raise InvalidRequest(
                f"{field}: {shown(modality)} is not taken; this model takes "
                f"{' and '.join(('text', *modalities))}",
                param=field,
            )
        if getattr(items, "ndim", 0) == 3 and embeds_of(items, modality) is not None:
            items = list(items)
        many = isinstance(items, list | tuple) and not _is_one(items, modality)
        for number, item in enumerate(items if many else [items]):
            name = f"{field}.{modality}[{number}]" if many else f"{field}.{modality}"
            if item is None:
                raise InvalidRequest(f"{name}: is missing", param=name)
            sources.append(MediaSource(modality, embeds_of(item, modality) or item, name))
    return sources


def _is_one(item: Any, modality: str) -> bool:
    """Return whether a sequence is one item: (samples or frames, their rate), or the pictures of a
    video."""
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], int | float | np.number):
        return True
    return modality == "video" and bool(item) and hasattr(item[0], "convert")
