"""SmolVLM: pictures as Idefics 3's, and videos: each frame is a whole picture, with its time as
text, after the number of frames and the video's length."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np

from ...core.errors import ConfigError
from ...core.protocols.media import MediaProcessor, MediaSetup, ProcessedMedia, Sampling, Video
from .frames import FILES, FrameVideo, resize_frames, video_options
from .idefics3 import AROUND, PATCHES, WHOLE, Idefics3
from .processor import NORMALISATION
from .text_runs import TextRuns

HEAD, TAIL = "You are provided the following series of", "\n\n"
"""What is written before and behind all videos alike."""
PLACEHOLDERS = ("<video>", "<|reserved_special_token_0|>", WHOLE)
"""Published tokenizers lack the first. The last is in all, and in no prompt of text alone."""
MOST_SIDE = 4096
SIDE = 364
"""Of frames, where the checkpoint does not say."""
ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def in_words(number: int) -> str:
    """Return a number below a thousand as it is spoken."""
    hundreds, rest = divmod(number, 100)
    if hundreds:
        return f"{ONES[hundreds]} hundred" + (f" and {in_words(rest)}" if rest else "")
    if number < len(ONES):
        return ONES[number]
    return TENS[number // 10 - 2] + (f"-{ONES[number % 10]}" if number % 10 else "")


@dataclass(frozen=True)
class SmolVLMSampling(Sampling):
    """Frames at equal distances; of long videos not those of the first and the last second."""

    fps: float | None = 1.0
    most: int = 64

    def indices(self, total: int, fps: float, most: int) -> list[int]:
        if self.num_frames is not None or self.fps is None:
            return super().indices(total, fps, most)
        duration = total / fps
        count = max(min(round(self.fps * duration), self.most, most), 1)
        first, last = 0, total - 1
        if duration - 2 > self.most * self.fps:
            first, last = int(fps), min(int(total - fps), total - 1)
        if first >= last:
            first, last = 0, total - 1
        return list(dict.fromkeys(np.linspace(first, last, count, dtype=int).tolist()))


class SmolVLMVideo(FrameVideo):
    name = "pixel_values"
    mean = deviation = (0.5, 0.5, 0.5)

    def __init__(self, setup: MediaSetup) -> None:
        super().__init__(setup)
        self._runs = TextRuns(setup.folder, self._tokenize, AROUND)
        self.fingerprint = hashlib.sha256(
            f"{self.fingerprint} {self._longest}".encode()
        ).hexdigest()
        vision, (side, _) = self.config.vision_config, self._size
        self._patches = side // vision.patch_size
        image: int = self.config.image_token_id
        count = int(self._patches**2 / self.config.scale_factor**2)
        self._frame = [*self._tokenize(f"{AROUND}{WHOLE}"), *[image] * count]
        self._frame += self._tokenize(AROUND)

    def find_placeholder(self, setup: MediaSetup) -> int:
        alone = 'leave videos out with limit_mm_per_prompt {"video": 0}'
        if setup.tokenize is None:
            raise ConfigError(
                f"skip_tokenizer_init: what stands for a video of this model is text; {alone}",
                param="skip_tokenizer_init",
            )
        self._tokenize: Callable[[str], list[int]] = setup.tokenize
        for ids in map(setup.tokenize, PLACEHOLDERS):
            if len(ids) == 1 and ids[0] < setup.config.text_config.vocab_size:
                return ids[0]
        raise ConfigError(
            f"model: its tokenizer has none of {', '.join(PLACEHOLDERS)}, of which one would stand "
            f"for a video; {alone}",
            param="model",
        )

    def size(self, own: Mapping[str, Any], side: int | Sequence[int]) -> tuple[int, int]:
        sampling = own.get("video_sampling") or {}
        self.sampling = SmolVLMSampling(
            fps=float(sampling.get("fps") or own.get("fps") or 1),
            most=int(sampling.get("max_frames") or own.get("num_frames") or 64),
        )
        longest = (sampling.get("video_size") or own.get("size") or {}).get("longest_edge")
        self._longest = min(int(longest or 4 * SIDE), MOST_SIDE)
        frame = int((own.get("max_image_size") or {}).get("longest_edge") or SIDE)
        return frame, frame

    def resized(self, frames: np.ndarray) -> np.ndarray:
        from PIL import Image

        height, width = frames.shape[1:3]
        longest = self._longest
        if width >= height:
            size = even(int(longest / (width / height))), longest
        else:
            size = longest, even(int(longest * (width / height)))
        lanczos = Image.Resampling.LANCZOS
        return resize_frames(resize_frames(frames, *size, lanczos), *self._size, lanczos)

    def video(self, video: Video) -> ProcessedMedia:
        pixels = self.resized(video.frames).transpose(0, 3, 1, 2)
        tensors = {
            self.name: np.ascontiguousarray(pixels), NORMALISATION: self._normalisation,
            PATCHES: np.ones((len(pixels), self._patches, self._patches), dtype=np.bool_),
        }  # fmt: skip
        length = timedelta(seconds=int(video.total / video.fps))
        text = f"{HEAD} {in_words(len(pixels))} frames from a {length} [H:MM:SS] video.\n"
        tokens: list[int] = []
        for index in video.indices:
            minutes, seconds = divmod(int(index / video.fps), 60)
            text += f"\nFrame from {minutes:02d}:{seconds:02d}:"
            tokens += [*self._runs.tokens(text), *self._frame]
            text = ""
        tokens = tokens[len(self._runs.tokens(HEAD)) :]
        embedded = [token == self.config.image_token_id for token in tokens]
        return ProcessedMedia(tensors, tokens, embedded)

    def arranged(self, token_ids: Sequence[int]) -> list[int]:
        """Write what is before and behind each video, unless it is there."""
        runs: list[list[int]] = [[]]
        marks: list[int | None] = [None]  # Before each run.
        for token in token_ids:
            if token in self._runs.added:
                marks.append(token)
                runs.append([])
            else:
                runs[-1].append(token)
        tokens: list[int] = []
        place = self.placeholder_id
        for mark, run, following in zip(marks, runs, [*marks[1:], None], strict=True):
            tokens += [] if mark is None else [mark]
            text = self._runs.text(run, first=mark is None) if place in (mark, following) else None
            if text is not None and text.endswith(HEAD) and following == place:
                return list(token_ids)
            tail, head = TAIL * (mark == place), HEAD * (following == place)
            if text is not None:
                tokens += self._runs.tokens(tail + text + head, first=mark is None)
            else:
                tokens += [*self._runs.tokens(tail), *run, *self._runs.tokens(head)]
        return tokens


def even(side: int) -> int:
    return max(side + side % 2, 1)


class SmolVLM(Idefics3):
    modalities = ("image", "video")

    @classmethod
    def present(cls, setup: MediaSetup) -> tuple[str, ...]:
        """Videos, where the checkpoint says how they are processed."""
        stated = "video_sampling" in video_options(setup.folder)
        return cls.modalities if stated or (setup.folder / FILES[0]).is_file() else ("image",)

    @classmethod
    def processor(cls, setup: MediaSetup, modality: str = "image") -> MediaProcessor:
        return SmolVLMVideo(setup) if modality == "video" else cls.processor_class(setup)
