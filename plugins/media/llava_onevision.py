"""LLaVA-OneVision: a picture as a whole and in tiles, whose padding is cut off."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...core.nn.context import BuildContext
from ...core.protocols.media import MediaProcessor, MediaSetup, ProcessedMedia
from .family import Pictures
from .frames import FramesEncoder, FrameVideo
from .processor import ImageProcessor, check_fields


class OnevisionProcessor(ImageProcessor):
    def processed(self, tensors: Mapping[str, np.ndarray]) -> ProcessedMedia:
        pixels, sizes = tensors["pixel_values"], tensors["image_sizes"]
        height, width = (int(size) for size in sizes[0])
        count = self._num_rows(height, width, pixels.shape[-1])
        return ProcessedMedia({"pixel_values": pixels, "image_sizes": sizes}, self.repeated(count))

    def of_count(self, count: int) -> ProcessedMedia:
        return ProcessedMedia({}, self.repeated(count))

    def _num_rows(self, height: int, width: int, tile: int) -> int:
        """Return the rows of a picture: of the whole, of its tiles without padding, and one after
        each line of these."""
        from transformers.image_processing_utils import select_best_resolution

        side = self.config.vision_config.image_size // self.config.vision_config.patch_size
        best = select_best_resolution((height, width), self.config.image_grid_pinpoints)
        lines, columns = best[0] // tile * side, best[1] // tile * side
        if width / height > columns / lines:
            kept = int(round(height * (columns / width), 7))
            lines -= (lines - kept) // 2 * 2
        else:
            kept = int(round(width * (lines / height), 7))
            columns -= (columns - kept) // 2 * 2
        most = int(self.config.vision_aspect_ratio.removeprefix("anyres_max_"))
        ratio = math.sqrt(lines * columns / (most * side**2))
        if ratio > 1.1:
            lines, columns = int(lines // ratio), int(columns // ratio)
        return int(side**2 + lines * columns + lines)


class OnevisionVideo(FrameVideo):
    """Rows are pooled by 2 by 2, and one row comes after the last."""

    def num_rows(self, count: int) -> int:
        return count * pooled_rows(self.config) + 1

    def of_rows(self, count: int, fields: Mapping[str, np.ndarray]) -> Sequence[ProcessedMedia]:
        """See `protocols.media.TakesRows`."""
        check_fields(fields)
        return [ProcessedMedia({}, [self.placeholder_id] * count)]


def pooled_rows(config: Any) -> int:
    """Return the rows of a frame."""
    vision = config.vision_config
    return int(math.ceil(vision.image_size // vision.patch_size / 2) ** 2)


class OnevisionEncoder(FramesEncoder):
    def __init__(self, setup: MediaSetup, build: BuildContext) -> None:
        super().__init__(setup, build)
        self._pooled_rows = pooled_rows(setup.config)

    def rows_of_frames(self, frames: torch.Tensor) -> torch.Tensor:
        # Some versions leave the last row to those who call.
        own = super().rows_of_frames(frames)[: len(frames) * self._pooled_rows]
        return torch.cat([own, self.hf.image_newline[None].to(own.dtype)])


class LlavaOnevision(Pictures):
    modalities = ("image", "video")
    encoder_class = OnevisionEncoder
    processor_class = OnevisionProcessor

    @classmethod
    def processor(cls, setup: MediaSetup, modality: str = "image") -> MediaProcessor:
        return OnevisionVideo(setup) if modality == "video" else cls.processor_class(setup)

    @classmethod
    def refusal(cls, setup: MediaSetup) -> str | None:
        config = setup.config
        if not config.vision_aspect_ratio.startswith("anyres_max_"):
            return f"vision_aspect_ratio {config.vision_aspect_ratio!r} is not served"
        if config.vision_feature_select_strategy != "full":
            return "its tower has a class token, which those of this family have not"
        return None
