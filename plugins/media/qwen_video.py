"""Videos of Qwen's and GLM's models: frames two by two, of any size."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np

from ...core.errors import ConfigError
from ...core.protocols.media import MediaSetup, ProcessedMedia, Sampling, Video
from .frames import CLIP_DEVIATION, CLIP_MEAN, normalisation, resize_frames, video_options
from .processor import NORMALISATION, check_count, check_fields, sizes_of

MAX_RATIO = 200


class QwenVideo:
    """Frames are resized each for itself."""

    around = ("", "")
    sampling = Sampling(fps=2.0, least=4, most=768, multiple=2, place=Fraction(0))
    patch_size: ClassVar[int] = 14
    least_pixels: ClassVar[int] = 128 * 28 * 28
    most_pixels: ClassVar[int] = 768 * 28 * 28
    mean: ClassVar[Sequence[float]] = CLIP_MEAN
    deviation: ClassVar[Sequence[float]] = CLIP_DEVIATION
    sized_by_checkpoint: ClassVar[bool] = True
    """Whether the checkpoint may say other numbers of pixels."""

    def __init__(self, setup: MediaSetup) -> None:
        self.config = setup.config
        self.placeholder_id = int(setup.config.video_token_id)
        own = video_options(setup.folder)
        if not self.sized_by_checkpoint:
            own = {name: own[name] for name in own.keys() - {"size", "min_pixels", "max_pixels"}}
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
            "image_grid_thw": np.asarray(self.encoded_grids(grid), dtype=np.int64),
            NORMALISATION: self._normalisation,
        }
        units = grid[0], grid[1] // self._merge, grid[2] // self._merge
        return self.written(video, tensors, units)

    def encoded_grids(self, grid: tuple[int, int, int]) -> list[tuple[int, int, int]]:
        """Return the grids of patches that the encoder reads."""
        return [grid]

    def written(
        self, video: Video, tensors: dict[str, np.ndarray], units: tuple[int, int, int]
    ) -> ProcessedMedia:
        """Return the item with what stands for it."""
        tokens = [self.placeholder_id] * math.prod(units)
        return ProcessedMedia(
            tensors, tokens, grid=units, frame_positions=self.frame_positions(video, units[0])
        )

    def of_rows(self, count: int, fields: Mapping[str, np.ndarray]) -> Sequence[ProcessedMedia]:
        """See `protocols.media.TakesRows`. A pair of frames lasts one second."""
        name = "video_grid_thw"
        check_fields(fields, name)
        grids = [
            (frames, rows // self._merge, columns // self._merge)
            for frames, rows, columns in sizes_of(fields, name, 3)
        ]
        check_count(count, [math.prod(grid) for grid in grids], name)
        return [
            ProcessedMedia(
                {}, [self.placeholder_id] * math.prod(grid), grid=grid,
                frame_positions=self._positions(self._pair, grid[0]),
            )
            for grid in grids
        ]  # fmt: skip

    def frame_positions(self, video: Video, count: int) -> tuple[int, ...]:
        """See `ProcessedMedia`."""
        return self._positions(video.sampled_fps, count)

    def _positions(self, fps: float, count: int) -> tuple[int, ...]:
        """Return the positions of pairs of frames, of which there are `fps` frames per second."""
        if self.positions_per_second is None:
            return ()
        step = self.positions_per_second * self._pair / fps
        return tuple(int(number * step) for number in range(count))

    @property
    def positions_per_second(self) -> float | None:
        """Return how far positions go on in a second; None: by one for each pair."""
        return getattr(self.config.vision_config, "tokens_per_second", None)

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
        if setup.tokenize is None:
            raise ConfigError(
                "skip_tokenizer_init: what stands for a video of this model has times as text; "
                'leave videos out with limit_mm_per_prompt {"video": 0}',
                param="skip_tokenizer_init",
            )
        self.tokenize = setup.tokenize

    def of_rows(self, count: int, fields: Mapping[str, np.ndarray]) -> Sequence[ProcessedMedia]:
        raise ValueError("videos of this model have times as text, and are not taken as embeddings")

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
        pairs, count = units[0], units[1] * units[2]
        padded = [*video.indices, *[video.indices[-1]] * (-len(video.indices) % self._pair)]
        tokens: list[int] = []
        embedded: list[bool] = []
        for pair in range(pairs):
            first = padded[pair * self._pair] / video.fps
            last = padded[(pair + 1) * self._pair - 1] / video.fps
            before, after = self.around_pair(first, last)
            tokens += [*before, *[self.unit_id] * count, *after]
            embedded += [False] * len(before) + [True] * count + [False] * len(after)
        return ProcessedMedia(tensors, tokens, embedded, grid=units)

    @property
    def unit_id(self) -> int:
        """Return the token that stands for a unit."""
        return self.placeholder_id

    def around_pair(self, first: float, last: float) -> tuple[list[int], list[int]]:
        """Return the tokens before and after the units of two frames at these seconds."""
        config = self.config
        words = self.tokenize(f"<{(first + last) / 2:.1f} seconds>")
        return [*words, config.vision_start_token_id], [config.vision_end_token_id]


@dataclass(frozen=True)
class GlmSampling(Sampling):
    """Frames at equal times, of the first 300 seconds or of 600 shares."""

    seconds: float = 300.0

    def indices(self, total: int, fps: float, most: int) -> list[int]:
        if self.num_frames is not None or self.fps is None:
            return super().indices(total, fps, most)
        duration, last = total / fps, total - 1
        if duration <= self.seconds:
            count = max(int(duration * self.fps), 1)
            chosen = [math.ceil(number * fps / self.fps) for number in range(count)]
        else:
            count = int(self.seconds * self.fps)
            times = np.linspace(0, duration, min(count, total))
            chosen = [math.ceil(second * fps) for second in times]
        return list(dict.fromkeys(min(index, last) for index in chosen))[: min(most, self.most)]


@dataclass(frozen=True)
class Glm46Sampling(Sampling):
    """Frames at equal times, fewer per second of longer videos."""

    fps: float | None = None
    most: int = 640
    rates: tuple[tuple[int, float], ...] = ((30, 6.0), (300, 2.0), (2400, 1.0))
    """(Seconds, frames per second of videos up to that long); more seconds do not count."""

    def indices(self, total: int, fps: float, most: int) -> list[int]:
        if self.num_frames is not None or self.fps is not None:
            return super().indices(total, fps, most)
        longest = self.rates[-1][0]
        duration = min(total / fps, longest)
        rate = next(rate for seconds, rate in self.rates if duration <= seconds)
        count = min(int(duration * rate), self.most)
        chosen = [] if total < count else self._at_times(total, fps, rate)
        if len(chosen) != count:
            first, last = (chosen[0], chosen[-1]) if 0 < len(chosen) < count else (0, total - 1)
            chosen = np.linspace(first, last, count, dtype=int).tolist()
        return list(dict.fromkeys(chosen))[:most] or [0]

    def _at_times(self, total: int, fps: float, rate: float) -> list[int]:
        """Return the first frames from the times on that are `1 / rate` seconds apart."""
        chosen, time, end = [], 0.0, int(total / fps)
        for index in range(total):
            if index * (1 / fps) >= time:
                time += 1 / rate
                chosen.append(index)
                if time >= end:
                    break
        return chosen


class GlmVideo(Qwen3Video):
    """Each pair is written like a picture, with its seconds behind it."""

    sampling: Sampling = GlmSampling()
    patch_size = QwenVideo.patch_size
    least_pixels = 112 * 112
    most_pixels = 2 * 30_000 * 28 * 28
    mean, deviation = CLIP_MEAN, CLIP_DEVIATION

    def encoded_grids(self, grid: tuple[int, int, int]) -> list[tuple[int, int, int]]:
        pairs, rows, columns = grid
        return [(1, rows, columns)] * pairs

    @property
    def unit_id(self) -> int:
        return int(self.config.image_token_id)

    def around_pair(self, first: float, last: float) -> tuple[list[int], list[int]]:
        config = self.config
        return [config.image_start_token_id], [
            config.image_end_token_id, *self.tokenize(self.time(first))
        ]  # fmt: skip

    def time(self, seconds: float) -> str:
        """Return what is written for the time of a pair's first frame."""
        return str(int(seconds))


class Glm46Video(GlmVideo):
    sampling = Glm46Sampling()

    def time(self, seconds: float) -> str:
        return f"{seconds:.1f} seconds"


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
