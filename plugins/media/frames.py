"""What processors of videos share. Those of `transformers` take torchvision; these, Pillow."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from ...core.protocols.media import MediaSetup, ProcessedMedia, Sampling, Video
from .encoder import TransformersEncoder
from .processor import NORMALISATION

FILES = ("video_preprocessor_config.json", "processor_config.json", "preprocessor_config.json")
"""Of which the first that a checkpoint has says how its videos are processed."""
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_DEVIATION = (0.26862954, 0.26130258, 0.27577711)


def video_options(folder: Path) -> dict[str, Any]:
    """Return what a checkpoint says of the processing of videos."""
    for name in FILES:
        if (folder / name).is_file():
            own: dict[str, Any] = json.loads((folder / name).read_text())
            own = own.get("video_processor", {}) if name == "processor_config.json" else own
            if own:
                return own
    return {}


def normalisation(
    own: Mapping[str, Any], mean: Sequence[float], deviation: Sequence[float]
) -> np.ndarray:
    """Return the tensor `NORMALISATION`. mean, deviation: where the checkpoint does not say."""
    rows = [
        [float(own.get("rescale_factor") or 1 / 255)] * 3,
        own.get("image_mean") or mean,
        own.get("image_std") or deviation,
    ]
    return np.asarray(rows, dtype=np.float32)


def resize_frames(
    frames: np.ndarray, height: int, width: int, resample: int | None = None
) -> np.ndarray:
    """Return frames of this size, [frames, height, width, 3] uint8. resample: a filter of Pillow;
    None: bicubic."""
    from PIL import Image

    if frames.shape[1:3] == (height, width):
        return frames
    own = Image.Resampling.BICUBIC if resample is None else Image.Resampling(resample)
    return np.stack([
        np.asarray(Image.fromarray(frame).resize((width, height), own)) for frame in frames
    ])  # fmt: skip


FRAMES = "frames"
"""Name of the tensor [frames, 3, height, width] uint8 of a video."""


class FrameVideo:
    """Frames of one size, each of which has the same number of rows."""

    around = ("", "")
    sampling = Sampling(fps=None, num_frames=32)
    name: ClassVar[str] = FRAMES
    """Of the tensor of frames."""
    mean: ClassVar[Sequence[float]] = CLIP_MEAN
    deviation: ClassVar[Sequence[float]] = CLIP_DEVIATION
    """Where the checkpoint does not say."""

    def __init__(self, setup: MediaSetup) -> None:
        """Raises ConfigError."""
        self.config = setup.config
        self.placeholder_id = self.find_placeholder(setup)
        own = video_options(setup.folder)
        self._size = self.size(own, setup.config.vision_config.image_size)
        self._normalisation = normalisation(own, self.mean, self.deviation)
        text = json.dumps([type(self).__name__, self._size, self._normalisation.tolist()])
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()

    def find_placeholder(self, setup: MediaSetup) -> int:
        """Return the token by which prompts say where a video stands."""
        return int(setup.config.video_token_id)

    def size(self, own: Mapping[str, Any], side: int | Sequence[int]) -> tuple[int, int]:
        """Return a frame's height and width. own: what the checkpoint says; side: of the tower's
        pictures."""
        height, width = (side, side) if isinstance(side, int) else side
        given = own.get("size") or {}
        return int(given.get("height") or height), int(given.get("width") or width)

    def resized(self, frames: np.ndarray) -> np.ndarray:
        """[frames, height, width, 3] uint8, of this size"""
        return resize_frames(frames, *self._size)

    def video(self, video: Video) -> ProcessedMedia:
        frames = self.resized(video.frames).transpose(0, 3, 1, 2)
        tensors = {self.name: np.ascontiguousarray(frames), NORMALISATION: self._normalisation}
        return self.written(tensors, len(frames))

    def written(self, tensors: Mapping[str, np.ndarray], count: int) -> ProcessedMedia:
        """Return an item of so many frames with what stands for it."""
        return ProcessedMedia(tensors, [self.placeholder_id] * self.num_rows(count))

    def num_rows(self, count: int) -> int:
        """Return the rows of so many frames."""
        raise NotImplementedError


class FramesEncoder(TransformersEncoder):
    """Encodes videos apart from pictures."""

    def prepared(self, item: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if FRAMES not in item:
            return super().prepared(item)
        return {FRAMES: self.normalised(item[FRAMES], item[NORMALISATION])}

    def encode_together(
        self, items: Sequence[Mapping[str, torch.Tensor]]
    ) -> Sequence[torch.Tensor]:
        if FRAMES not in items[0]:
            return super().encode_together(items)
        return [self.rows_of_frames(item[FRAMES]) for item in items]

    def rows_of_frames(self, frames: torch.Tensor) -> torch.Tensor:
        """[frames, 3, height, width] → rows"""
        config = self.hf.config
        output = self.hf.get_video_features(
            frames[None],
            vision_feature_layer=config.vision_feature_layer,
            vision_feature_select_strategy=config.vision_feature_select_strategy,
        )
        rows = torch.cat(tuple(output.pooler_output))  # Some versions split them.
        return rows.reshape(-1, rows.shape[-1])
