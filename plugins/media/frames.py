"""What processors of videos share. Those of `transformers` take torchvision; these, Pillow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

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


def resize_frames(frames: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return frames of this size, [frames, height, width, 3] uint8."""
    from PIL import Image

    if frames.shape[1:3] == (height, width):
        return frames
    bicubic = Image.Resampling.BICUBIC
    return np.stack([
        np.asarray(Image.fromarray(frame).resize((width, height), bicubic)) for frame in frames
    ])  # fmt: skip
