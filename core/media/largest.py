"""The largest items that requests may send, so that the memory of encoding them is measured before
there are any."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from ..config import EngineConfig
from ..loading.model_config import ModelConfig
from ..protocols.media import MediaModel, MediaSetup, ProcessedMedia, Video
from ..registry import Plugins
from ..text.tokenizer import Tokenizer
from .audio import MAX_SECONDS
from .images import MAX_PIXELS
from .video import MAX_FRAMES, MAX_VIDEO_PIXELS

FIRST_SIDE = 128
"""Pixels of a side of the first picture that is tried; each next one has twice as many."""
GROWTH = 3.0
"""Times that a picture of twice the side takes more, while no option makes it smaller."""
SHAPES = (1.0, 4 / 3, 2.0)
"""Width over height of pictures of the largest size: tiles fill some shapes better than others."""
FRAME_SIDE = 448
"""Pixels of a side of a video's frames."""


def largest_items(
    config: EngineConfig,
    model_config: ModelConfig,
    plugins: Plugins,
    max_tokens: int | None = None,
) -> list[ProcessedMedia]:
    """Return the largest item of each modality that requests may send, or of so many tokens.
    Blocks. Raises as processors do."""
    media, registry = model_config.media, plugins["media_model"]
    if media is None:
        return []
    tokenize = None
    if not config.skip_tokenizer_init:
        tokenizer = Tokenizer.of_engine(config, model_config, plugins)
        tokenize = functools.partial(tokenizer.encode, add_special_tokens=False)
    setup = MediaSetup(
        model_config.path, model_config.whole_config, config.mm_processor_kwargs or {}, tokenize
    )
    kind: type[MediaModel] = registry.load(media.architecture)
    with registry.calling(media.architecture, "processor"):
        return [
            largest_item(
                kind.processor(setup, name), name, max_tokens or model_config.max_model_len
            )
            for name in media.modalities
        ]


def largest_item(processor: Any, modality: str, max_tokens: int) -> ProcessedMedia:
    """Return the item of a modality that takes most, of those that a prompt of so many tokens may
    have. Blocks, for seconds where pictures may be large. Raises as processors do."""
    if modality == "audio":
        return _recording(processor, max_tokens)
    if modality == "video":
        return _video(processor, max_tokens)
    return _picture(processor, max_tokens)


def _size(item: ProcessedMedia) -> int:
    return sum(np.asarray(tensor).nbytes for tensor in item.tensors.values())


def _fits(item: ProcessedMedia, max_tokens: int) -> bool:
    return len(item.token_ids) <= max_tokens


def _picture(processor: Any, max_tokens: int) -> ProcessedMedia:
    from PIL import Image

    def processed(side: float, shape: float = 1.0) -> ProcessedMedia:
        size = round(side * math.sqrt(shape)), round(side / math.sqrt(shape))
        item: ProcessedMedia = processor.image(Image.new("RGB", size))
        return item

    side = FIRST_SIDE
    largest = processed(side)
    while 4 * side * side <= MAX_PIXELS:
        item = processed(2 * side)
        if not _fits(item, max_tokens):
            # As large as a prompt takes.
            side = math.floor(side * math.sqrt(max_tokens / max(1, len(largest.token_ids))))
            break
        grown, largest, side = _size(item) / _size(largest), item, 2 * side
        if grown < GROWTH:
            break
    candidates = [largest, *(processed(side, shape) for shape in SHAPES)]
    return max((item for item in candidates if _fits(item, max_tokens)), key=_size, default=largest)


def _recording(processor: Any, max_tokens: int) -> ProcessedMedia:
    rate = processor.sampling_rate
    most = min(MAX_SECONDS * rate, processor.max_samples or MAX_SECONDS * rate)
    sample: ProcessedMedia = processor.audio(np.zeros(min(most, 10 * rate), dtype=np.float32))
    if most > 10 * rate:
        most = min(most, 10 * rate * max_tokens // len(sample.token_ids))
        sample = processor.audio(np.zeros(most, dtype=np.float32))
    return sample


def _video(processor: Any, max_tokens: int) -> ProcessedMedia:
    def processed(count: int) -> ProcessedMedia:
        frames = np.zeros((count, FRAME_SIDE, FRAME_SIDE, 3), dtype=np.uint8)
        fps = processor.sampling.fps or 1.0
        item: ProcessedMedia = processor.video(Video(frames, tuple(range(count)), fps, count))
        return item

    few = 4
    most = min(processor.sampling.most, MAX_FRAMES, MAX_VIDEO_PIXELS // FRAME_SIDE**2)
    by_tokens = few * max_tokens // len(processed(few).token_ids)
    return processed(max(few, min(most, by_tokens)))
