"""LLaVA-NeXT-Video: LLaVA-NeXT's pictures, and frames whose rows are pooled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...core.protocols.media import MediaProcessor, MediaSetup
from .derived import Derived
from .frames import FramesEncoder, FrameVideo, resize_frames


class NextVideo(FrameVideo):
    """The shorter side becomes the tower's, and the middle is read."""

    def size(self, own: Mapping[str, Any], side: int | Sequence[int]) -> tuple[int, int]:
        return super().size({"size": own.get("crop_size")}, side)

    def resized(self, frames: np.ndarray) -> np.ndarray:
        height, width = frames.shape[1:3]
        shorter = max(self._size)
        if height <= width:
            height, width = shorter, int(shorter * width / height)
        else:
            height, width = int(shorter * height / width), shorter
        whole = resize_frames(frames, height, width)
        top, left = (height - self._size[0]) // 2, (width - self._size[1]) // 2
        return whole[:, top : top + self._size[0], left : left + self._size[1]]

    def num_rows(self, count: int) -> int:
        each: int = self.config.vision_config.patch_size * self.config.spatial_pool_stride
        return count * (self._size[0] // each) * (self._size[1] // each)


class LlavaNextVideo(Derived):
    modalities = ("image", "video")
    encoder_class = FramesEncoder

    @classmethod
    def processor(cls, setup: MediaSetup, modality: str = "image") -> MediaProcessor:
        return NextVideo(setup) if modality == "video" else cls.processor_class(setup)

    @classmethod
    def refusal(cls, setup: MediaSetup) -> str | None:
        if setup.config.vision_feature_select_strategy != "default":
            return "rows of its tower are not pooled without the class token"
        return super().refusal(setup)
