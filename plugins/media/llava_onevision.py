"""LLaVA-OneVision: a picture as a whole and in tiles, whose padding is cut off."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...core.nn.context import BuildContext
from ...core.protocols.media import MediaProcessor, MediaSetup, ProcessedMedia, Sampling, Video
from .encoder import TransformersEncoder
from .family import Pictures
from .frames import CLIP_DEVIATION, CLIP_MEAN, normalisation, resize_frames, video_options
from .processor import NORMALISATION, ImageProcessor


class OnevisionProcessor(ImageProcessor):
    def processed(self, tensors: Mapping[str, np.ndarray]) -> ProcessedMedia:
        pixels, sizes = tensors["pixel_values"], tensors["image_sizes"]
        height, width = (int(size) for size in sizes[0])
        count = self._num_rows(height, width, pixels.shape[-1])
        return ProcessedMedia({"pixel_values": pixels, "image_sizes": sizes}, self.repeated(count))

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


class OnevisionVideo:
    """Frames of one size, whose rows are pooled by 2 by 2, and one row after the last."""

    around = ("", "")
    sampling = Sampling(fps=None, num_frames=32, ends=True)

    def __init__(self, setup: MediaSetup) -> None:
        self.config = setup.config
        self.placeholder_id = int(setup.config.video_token_id)
        own = video_options(setup.folder)
        side = setup.config.vision_config.image_size
        size = own.get("size") or {}
        self._size = int(size.get("height") or side), int(size.get("width") or side)
        self._normalisation = normalisation(own, CLIP_MEAN, CLIP_DEVIATION)
        text = json.dumps([type(self).__name__, self._size, self._normalisation.tolist()])
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()

    def video(self, video: Video) -> ProcessedMedia:
        frames = resize_frames(video.frames, *self._size).transpose(0, 3, 1, 2)
        count = len(frames) * pooled_rows(self.config) + 1
        return ProcessedMedia(
            {FRAMES: np.ascontiguousarray(frames), NORMALISATION: self._normalisation},
            [self.placeholder_id] * count,
        )


FRAMES = "frames"
"""Name of the tensor [frames, 3, height, width] uint8 of a video."""


def pooled_rows(config: Any) -> int:
    """Return the rows of a frame."""
    vision = config.vision_config
    return int(math.ceil(vision.image_size // vision.patch_size / 2) ** 2)


class OnevisionEncoder(TransformersEncoder):
    def __init__(self, setup: MediaSetup, build: BuildContext) -> None:
        super().__init__(setup, build)
        self._pooled_rows = pooled_rows(setup.config)

    def prepared(self, item: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if FRAMES not in item:
            return super().prepared(item)
        return {FRAMES: self.normalised(item[FRAMES], item[NORMALISATION])}

    def encode_together(
        self, items: Sequence[Mapping[str, torch.Tensor]]
    ) -> Sequence[torch.Tensor]:
        if FRAMES not in items[0]:
            return super().encode_together(items)
        return [self._of_frames(item[FRAMES]) for item in items]

    def _of_frames(self, frames: torch.Tensor) -> torch.Tensor:
        config = self.hf.config
        output = self.hf.get_video_features(
            frames[None],
            vision_feature_layer=config.vision_feature_layer,
            vision_feature_select_strategy=config.vision_feature_select_strategy,
        )
        rows: torch.Tensor = output.pooler_output.flatten(0, 1)
        # Some versions leave the last row to those who call.
        own = rows[: len(frames) * self._pooled_rows]
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
