"""Videos of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: frames two by two, of any size."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from ...core.errors import ConfigError
from ...core.protocols.media import MediaSetup, ProcessedMedia, Sampling, Video
from .frames import CLIP_DEVIATION, CLIP_MEAN, normalisation, resize_frames, video_options
from .processor import NORMALISATION

MAX_RATIO = 200


class QwenVideo:
    """Frames are resized each for itself."""

    around = ("", "")
    sampling = Sampling(fps=2.0, least=4, most=768, multiple=2, ends=False)
    patch_size: ClassVar[int] = 14
    least_pixels: ClassVar[int] = 128 * 28 * 28
    most_pixels: ClassVar[int] = 768 * 28 * 28
    mean: ClassVar[Sequence[float]] = CLIP_MEAN
    deviation: ClassVar[Sequence[float]] = CLIP_DEVIATION

    def __init__(self, setup: MediaSetup) -> None:
        self.config, self._tokenize = setup.config, setup.tokenize
        self.placeholder_id = int(setup.config.video_token_id)
        own = video_options(setup.folder)
        size = own.get("size") or {}
        self._least = int(own.get("min_pixels") or size.get("shortest_edge") or self.least_pixels)
        self._most = int(own.get("max_pixels") or size.get("longest_edge") or self.most_pixels)
        self._patch = int(own.get("patch_size") or self.patch_size)
        self._pair = int(own.get("temporal_patch_size") or 2)
        self._merge = int(own.get("merge_size") or 2)
        self._normalisation = normalisation(own, self.mean, self.deviation)
        options = [self._least, self._most, self._patch, self._pair, self._merge]
        text = json.dumps([type(self).__name__, options, self._normalisation.tolist()])
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()

    def video(self, video: Video) -> ProcessedMedia:
        frames = video.frames
        missing = -len(frames) % self._pair
        height, width = self.resized(*frames.shape[:3])
        frames = resize_frames(frames, height, width)
        frames = np.concatenate([frames, *[frames[-1:]] * missing])
        grid = len(frames) // self._pair, height // self._patch, width // self._patch
        tensors = {
            "pixel_values": self._patches(frames, grid),
            "image_grid_thw": np.asarray([grid], dtype=np.int64),
            NORMALISATION: self._normalisation,
        }
        units = grid[0], grid[1] // self._merge, grid[2] // self._merge
        return self.written(video, tensors, units)

    def written(
        self, video: Video, tensors: dict[str, np.ndarray], units: tuple[int, int, int]
    ) -> ProcessedMedia:
        """Return the item with what stands for it."""
        tokens = [self.placeholder_id] * math.prod(units)
        return ProcessedMedia(
            tensors, tokens, grid=units, frame_positions=self.frame_positions(video, units[0])
        )

    def frame_positions(self, video: Video, count: int) -> tuple[int, ...]:
        """See `ProcessedMedia`."""
        per_second = getattr(self.config.vision_config, "tokens_per_second", None)
        if per_second is None:
            return ()
        step = per_second * self._pair / video.sampled_fps
        return tuple(int(number * step) for number in range(count))

    def resized(self, count: int, height: int, width: int) -> tuple[int, int]:
        """Return the height and width to which so many frames are resized. Raises ValueError."""
        return _near(height, width, self._patch * self._merge, self._least, self._most, 1.0, 1)

    def _patches(self, frames: np.ndarray, grid: tuple[int, int, int]) -> np.ndarray:
        """[frames, height, width, 3] → [patches, 3, pixels of a patch's frames], neighbours that
        become one unit together"""
        pairs, rows, columns = grid
        merge, patch = self._merge, self._patch
        parts = frames.reshape(
            pairs, self._pair, rows // merge, merge, patch, columns // merge, merge, patch, 3
        )
        parts = parts.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        return parts.reshape(math.prod(grid), 3, -1)


class Qwen3Video(QwenVideo):
    """The size of frames depends on how many there are; each pair has its time as text."""

    sampling = Sampling(fps=2.0, least=4, most=768)
    patch_size = 16
    least_pixels = 128 * 32 * 32
    most_pixels = 768 * 32 * 32
    mean = deviation = (0.5, 0.5, 0.5)

    def __init__(self, setup: MediaSetup) -> None:
        super().__init__(setup)
        if self._tokenize is None:
            raise ConfigError(
                "skip_tokenizer_init: what stands for a video of this model has times as text; "
                'leave videos out with limit_mm_per_prompt {"video": 0}',
                param="skip_tokenizer_init",
            )

    def resized(self, count: int, height: int, width: int) -> tuple[int, int]:
        side = self._patch * self._merge
        if min(height, width) < side:
            scale = side / min(height, width)
            height, width = int(height * scale), int(width * scale)
        whole = round(count / self._pair) * self._pair
        return _near(height, width, side, self._least, self._most, float(count), whole)

    def written(
        self, video: Video, tensors: dict[str, np.ndarray], units: tuple[int, int, int]
    ) -> ProcessedMedia:
        assert self._tokenize is not None
        config = self.config
        pairs, count = units[0], units[1] * units[2]
        padded = [*video.indices, *[video.indices[-1]] * (-len(video.indices) % self._pair)]
        tokens: list[int] = []
        embedded: list[bool] = []
        for pair in range(pairs):
            first = padded[pair * self._pair] / video.fps
            last = padded[(pair + 1) * self._pair - 1] / video.fps
            words = self._tokenize(f"<{(first + last) / 2:.1f} seconds>")
            tokens += [*words, config.vision_start_token_id, *[self.placeholder_id] * count]
            tokens.append(config.vision_end_token_id)
            embedded += [False] * (len(words) + 1) + [True] * count + [False]
        return ProcessedMedia(tensors, tokens, embedded, grid=units)


def _near(
    height: int, width: int, side: int, least: int, most: int, count: float, whole: int
) -> tuple[int, int]:
    """Return multiples of `side` with about the same ratio. least, most: of the pixels of all
    frames, of which there are `count`, or `whole` with those that fill up a pair."""
    if max(height, width) > MAX_RATIO * min(height, width):
        raise ValueError(f"one side is more than {MAX_RATIO} times as long as the other")
    near = [round(length / side) * side for length in (height, width)]
    if whole * math.prod(near) > most:
        scale = math.sqrt(count * height * width / most)
        near = [max(side, math.floor(length / scale / side) * side) for length in (height, width)]
    elif whole * math.prod(near) < least:
        scale = math.sqrt(least / (count * height * width))
        near = [math.ceil(length * scale / side) * side for length in (height, width)]
    return near[0], near[1]
