"""InternVL: pictures in tiles of one size, with the whole as the last one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.errors import ConfigError
from ...core.protocols.media import MediaProcessor, MediaSetup, ProcessedMedia, Sampling
from .family import Pictures
from .frames import FrameVideo
from .processor import ImageProcessor

if TYPE_CHECKING:
    from PIL.Image import Image


VIDEO = "<video>"


class TilesProcessor(ImageProcessor):
    """What stands for a picture's tiles."""

    in_bytes = True

    def __init__(self, setup: MediaSetup) -> None:
        super().__init__(setup)
        self._begin, self._end = self.token("<img>"), self.token("</img>")

    def processed(self, tensors: Mapping[str, np.ndarray]) -> ProcessedMedia:
        pixels = tensors["pixel_values"]
        count = len(pixels) * tile_rows(self.config, pixels.shape[-2:])
        kept = {name: tensor for name, tensor in tensors.items() if name != "num_patches"}
        return dataclasses.replace(self.of_count(count), tensors=kept)

    def of_count(self, count: int) -> ProcessedMedia:
        tokens = [self._begin, *self.repeated(count), self._end]
        return ProcessedMedia({}, tokens, [False, *[True] * count, False])


class InternVLProcessor(TilesProcessor):
    def __init__(self, setup: MediaSetup) -> None:
        super().__init__(setup)
        self._tiles = bool(setup.processor_kwargs.get("crop_to_patches", True))

    def image(self, image: Image) -> ProcessedMedia:
        return self.processed(self.tensors(image, crop_to_patches=self._tiles))


class InternVLVideo(FrameVideo):
    """Each frame is one tile, with its number as text."""

    sampling = Sampling(fps=None, num_frames=32, place=Fraction(1, 2))
    name = "pixel_values"

    def find_placeholder(self, setup: MediaSetup) -> int:
        if setup.tokenize is None:
            raise ConfigError(
                "skip_tokenizer_init: what stands for a video of this model is text; leave videos "
                'out with limit_mm_per_prompt {"video": 0}',
                param="skip_tokenizer_init",
            )
        self._tokenize = setup.tokenize
        self._begin, self._end, video = (self._token(text) for text in ("<img>", "</img>", VIDEO))
        return video

    def _token(self, text: str) -> int:
        ids = self._tokenize(text)
        if len(ids) != 1:
            raise ConfigError(
                f"model: its tokenizer has no token {text!r}; leave videos out with "
                'limit_mm_per_prompt {"video": 0}',
                param="model",
            )
        return ids[0]

    def written(self, tensors: Mapping[str, np.ndarray], count: int) -> ProcessedMedia:
        rows = tile_rows(self.config, self._size)
        tokens: list[int] = []
        for number in range(1, count + 1):
            tokens += self._tokenize(f"Frame{number}: " if number == 1 else f"\nFrame{number}: ")
            tokens += [self._begin, *[self.config.image_token_id] * rows, self._end]
        embedded = [token == self.config.image_token_id for token in tokens]
        return ProcessedMedia(tensors, tokens, embedded)


def tile_rows(config: Any, size: Sequence[int]) -> int:
    """Return the rows of a tile of this height and width."""
    patch, factor = config.vision_config.patch_size, config.downsample_ratio
    return math.prod(int(each // side * factor) for each, side in zip(size, patch, strict=True))


class InternVL(Pictures):
    modalities = ("image", "video")
    processor_class = InternVLProcessor

    @classmethod
    def processor(cls, setup: MediaSetup, modality: str = "image") -> MediaProcessor:
        return InternVLVideo(setup) if modality == "video" else cls.processor_class(setup)
