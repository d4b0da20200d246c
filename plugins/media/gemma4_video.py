"""Videos of Gemma 4: each frame is a small picture, with its time as text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

from ...core.errors import ConfigError
from ...core.protocols.media import MediaSetup, ProcessedMedia, Sampling, Video
from .frames import video_options
from .processor import ImageProcessor

OPTIONS = {"max_soft_tokens": 70, "patch_size": 16, "pooling_kernel_size": 3}
"""Of frames, where the checkpoint does not say."""


class Gemma4Video(ImageProcessor):
    sampling = Sampling(fps=None, num_frames=32, place=Fraction(0))

    def __init__(self, setup: MediaSetup) -> None:
        if setup.tokenize is None:
            raise ConfigError(
                "skip_tokenizer_init: what stands for a video of this model has times as text; "
                'leave videos out with limit_mm_per_prompt {"video": 0}',
                param="skip_tokenizer_init",
            )
        super().__init__(setup)
        stated = video_options(setup.folder)
        self._frame = {name: stated.get(name) or own for name, own in OPTIONS.items()}
        text = json.dumps([self.fingerprint, self._frame], sort_keys=True)
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()

    def find_placeholder(self, setup: MediaSetup) -> int:
        return int(setup.config.video_token_id)

    def of_rows(self, count: int, fields: Mapping[str, np.ndarray]) -> Sequence[ProcessedMedia]:
        raise ValueError("videos of this model have times as text, and are not taken as embeddings")

    def video(self, video: Video) -> ProcessedMedia:
        from PIL import Image

        frames = [Image.fromarray(frame) for frame in video.frames]
        pictures = self.images(images=frames, return_tensors="np", **self._frame)
        tokenize, config = self.tokenizer(), self.config
        tokens: list[int] = []
        embedded: list[bool] = []
        for number, index in enumerate(video.indices):
            count = int(pictures["num_soft_tokens_per_image"][number])
            minutes, seconds = divmod(int(index / video.fps), 60)
            before = tokenize(f"{' ' * bool(number)}{minutes:02d}:{seconds:02d} ")
            tokens += [*before, config.boi_token_id, *self.repeated(count), config.eoi_token_id]
            embedded += [*[False] * len(before), False, *[True] * count, False]
        tensors = {name: pictures[name] for name in ("pixel_values", "image_position_ids")}
        return ProcessedMedia(tensors, tokens, embedded)
