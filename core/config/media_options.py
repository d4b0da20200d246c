"""Media (pictures, recordings) in prompts: how many, from where, and how they are processed."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from ..errors import ConfigError
from .adapter_options import AdapterOptions
from .annotations import doc

DEFAULT_LIMIT = 64
"""Items of a modality that a prompt may have."""


class MediaOptions(AdapterOptions, frozen=True, kw_only=True):
    """Media (pictures, recordings) in prompts: how many, from where, and how they are processed."""

    limit_mm_per_prompt: Annotated[
        dict[str, int],
        doc(
            'Most items of a modality per prompt: {"image": 4, "audio": 1}; with 0 for all of a '
            f"model's, its encoder is not loaded. Default: {DEFAULT_LIMIT}."
        ),
    ] = {}
    language_model_only: Annotated[
        bool, doc("Serve the text part of a multimodal checkpoint; its encoders are not loaded.")
    ] = False
    mm_processor_kwargs: Annotated[
        dict[str, Any] | None,
        doc(
            'Options of the checkpoint\'s processor of pictures, such as {"max_pixels": 1003520}, '
            "for all requests."
        ),
    ] = None
    media_io_kwargs: Annotated[
        dict[str, Any] | None,
        doc(
            'Which frames of videos are read: {"video": {"num_frames": 32}}, or {"video": {"fps": '
            "1}}; num_frames -1 reads all. Default: as the model's family does."
        ),
    ] = None
    allowed_local_media_path: Annotated[
        str,
        doc("Folder from which requests may read media, as file:// URLs; empty: from none."),
    ] = ""
    allowed_media_domains: Annotated[
        tuple[str, ...],
        doc(
            "Hosts from which requests may let the server fetch media, by http and https; * "
            "allows all hosts with public addresses. Default: none."
        ),
    ] = ()
    enable_mm_embeds: Annotated[
        bool,
        doc(
            "Let media be given as embeddings (image_embeds, audio_embeds, video_embeds), as the "
            "model's encoder would return them, which only trusted clients should send."
        ),
    ] = False
    enable_prompt_embeds: Annotated[
        bool,
        doc(
            "Let prompts be embeddings in place of text or token ids (prompt_embeds), which only "
            "trusted clients should send: they are what no text gives."
        ),
    ] = False

    def media_limit(self, modality: str) -> int:
        """Return how many items of a modality a prompt may have."""
        if self.language_model_only:
            return 0
        return self.limit_mm_per_prompt.get(modality, DEFAULT_LIMIT)


MODALITIES = ("image", "audio", "video")


def media_io_options(value: Any) -> dict[str, Any] | None:
    """Read `media_io_kwargs`. Raises ConfigError."""
    field = "media_io_kwargs"
    if value is None:
        return None
    video = value.get("video", {}) if isinstance(value, dict) else None
    if not isinstance(value, dict) or set(value) - {"video"} or not isinstance(video, dict):
        raise ConfigError(
            f'{field}: must be an object such as {{"video": {{"num_frames": 32}}}}, got {value!r}',
            param=field,
        )
    for name, given in video.items():
        whole = name == "num_frames" and type(given) is int and (given > 0 or given == -1)
        if not whole and not (name == "fps" and type(given) in (int, float) and 0 < given <= 1000):
            raise ConfigError(
                f"{field}.video.{name}: takes num_frames (a number from 1, or -1 for all) or fps "
                f"(a number above 0), got {given!r}",
                param=field,
            )
    if len(video) == 2:
        raise ConfigError(f"{field}.video: takes num_frames or fps, not both", param=field)
    return value


def media_limits(value: Any) -> dict[str, int]:
    """Read `limit_mm_per_prompt`: modality → a number, or vLLM's {"count": number, ...}. Raises
    ConfigError."""
    field = "limit_mm_per_prompt"
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{field}: {error}", param=field) from error
    if not isinstance(value, dict):
        raise ConfigError(f'{field}: must be an object such as {{"image": 4}}', param=field)
    limits = {}
    for modality, limit in value.items():
        count = limit.get("count", DEFAULT_LIMIT) if isinstance(limit, dict) else limit
        if modality not in MODALITIES:
            raise ConfigError(
                f"{field}: {modality!r} is none of {', '.join(MODALITIES)}", param=field
            )
        if type(count) is not int or not 0 <= count <= 10_000:
            raise ConfigError(
                f"{field}.{modality}: must be a number from 0 to 10000, got {limit!r}", param=field
            )
        limits[modality] = count
    return limits
