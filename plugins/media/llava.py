"""LLaVA: pictures of one size, one row per patch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...core.protocols.media import MediaSetup, ProcessedMedia
from .family import Pictures
from .processor import ImageProcessor


class LlavaProcessor(ImageProcessor):
    in_bytes = True

    def processed(self, tensors: Mapping[str, np.ndarray]) -> ProcessedMedia:
        pixels = tensors["pixel_values"]
        patch = self.config.vision_config.patch_size
        count = (pixels.shape[-2] // patch) * (pixels.shape[-1] // patch)
        if self.config.vision_config.model_type == "clip_vision_model":
            count += 1  # The tower's class token.
        if self.config.vision_feature_select_strategy == "default":
            count -= 1  # The first row is left out.
        return ProcessedMedia(tensors, self.repeated(count))

    def of_count(self, count: int) -> ProcessedMedia:
        return ProcessedMedia({}, self.repeated(count))


class Llava(Pictures):
    processor_class = LlavaProcessor

    @classmethod
    def refusal(cls, setup: MediaSetup) -> str | None:
        kind = setup.config.vision_config.model_type
        if kind not in ("clip_vision_model", "siglip_vision_model"):
            return f"its tower is a {kind}, and only those of CLIP and SigLIP are served"
        return None
