"""Reads items of each modality: what requests send → what the model takes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..errors import InvalidRequest, JackfieldError
from ..parts.media import MediaContent, MediaTensor
from ..protocols.media import ProcessedMedia, Video
from .audio import decode_audio
from .images import converted, decode_image, from_array
from .video import decode_video, sampled

if TYPE_CHECKING:
    from PIL.Image import Image


LOW_SIDE = 512
"""Most pixels of a side with detail "low"."""
NO_OPTIONS: Mapping[str, Any] = {}


class Reader:
    """Decodes and processes items of one modality, on threads."""

    modality: ClassVar[str]
    noun: ClassVar[str]
    """For errors."""

    def __init__(self, processor: Any, options: Mapping[str, Any] = NO_OPTIONS) -> None:
        """processor: a `protocols.MediaProcessor` of the modality. options: those of
        `EngineConfig.media_io_kwargs` for it."""
        self.processor = processor

    def content(self, value: Any, field: str, detail: str = "auto") -> MediaContent:
        """Return the item of bytes, or of what callers give in their place. Raises
        InvalidRequest."""
        item = self.decode(value, field)
        if detail == "low":
            item = self.smaller(item)
        try:
            processed = self.process(item)
        except JackfieldError:
            raise
        except Exception as error:  # Processors stumble over sizes in many ways.
            raise InvalidRequest(
                f"{field}: a {self.noun} of {self.size(item)} cannot be processed "
                f"({type(error).__name__}: {error})",
                param=field,
            ) from None
        return content_of(processed, self.modality, self._digest(item))

    def decode(self, value: Any, field: str) -> Any:
        """Return the decoded item. Raises InvalidRequest."""
        raise NotImplementedError

    def smaller(self, item: Any) -> Any:
        """Return an item with less detail."""
        return item

    def process(self, item: Any) -> ProcessedMedia:
        raise NotImplementedError

    def size(self, item: Any) -> str:
        """Return how large an item is, in words."""
        raise NotImplementedError

    def shape(self, item: Any) -> tuple[Any, ...]:
        """Return all that `data` means beside its bytes."""
        raise NotImplementedError

    def data(self, item: Any) -> bytes | memoryview:
        raise NotImplementedError

    def _digest(self, item: Any) -> str:
        """Return the hash of an item, its shape, and the processor's options."""
        head = (self.modality, *self.shape(item), self.processor.fingerprint)
        hasher = blake2b(repr(head).encode())
        hasher.update(self.data(item))
        return hasher.hexdigest()[:64]


class ImageReader(Reader):
    modality = "image"
    noun = "picture"

    def decode(self, value: Any, field: str) -> Image:
        """Return a picture in RGB. Raises InvalidRequest."""
        if isinstance(value, bytes | bytearray | memoryview):
            return decode_image(bytes(value), field)
        if hasattr(value, "convert") and hasattr(value, "size"):
            return converted(value, field)
        if hasattr(value, "__array__"):
            return from_array(value, field)
        raise InvalidRequest(
            f"{field}: must be a URL, bytes, a picture of Pillow or an array, got "
            f"{type(value).__name__}",
            param=field,
        )

    def smaller(self, item: Image) -> Image:
        item.thumbnail((LOW_SIDE, LOW_SIDE))
        return item

    def process(self, item: Image) -> ProcessedMedia:
        processed: ProcessedMedia = self.processor.image(item)
        return processed

    def size(self, item: Image) -> str:
        return f"{item.width} x {item.height} pixels"

    def shape(self, item: Image) -> tuple[Any, ...]:
        return item.mode, item.size

    def data(self, item: Image) -> bytes:
        return item.tobytes()


class AudioReader(Reader):
    modality = "audio"
    noun = "recording"

    def decode(self, value: Any, field: str) -> np.ndarray:
        """Return samples of one channel at the model's rate, [n] float32. Raises InvalidRequest."""
        processor = self.processor
        return decode_audio(value, processor.sampling_rate, processor.max_samples, field)

    def process(self, item: np.ndarray) -> ProcessedMedia:
        processed: ProcessedMedia = self.processor.audio(item)
        return processed

    def size(self, item: np.ndarray) -> str:
        return f"{len(item) / self.processor.sampling_rate:.2f} s"

    def shape(self, item: np.ndarray) -> tuple[Any, ...]:
        return (len(item),)

    def data(self, item: np.ndarray) -> memoryview:
        return np.ascontiguousarray(item).data


class VideoReader(Reader):
    modality = "video"
    noun = "video"

    def __init__(self, processor: Any, options: Mapping[str, Any] = NO_OPTIONS) -> None:
        super().__init__(processor, options)
        self._sampling = sampled(processor.sampling, options)

    def decode(self, value: Any, field: str) -> Video:
        """Return the frames that are read. Raises InvalidRequest."""
        rate = getattr(self.processor, "sound_rate", None)
        return decode_video(value, self._sampling, field, rate)

    def process(self, item: Video) -> ProcessedMedia:
        processed: ProcessedMedia = self.processor.video(item)
        return processed

    def size(self, item: Video) -> str:
        count, height, width, _ = item.frames.shape
        return f"{count} frames of {width} x {height} pixels"

    def shape(self, item: Video) -> tuple[Any, ...]:
        own = item.frames.shape, item.indices, item.fps, item.total
        return own if item.sound is None else (*own, blake2b(item.sound.tobytes()).hexdigest())

    def data(self, item: Video) -> memoryview:
        return np.ascontiguousarray(item.frames).data


READERS: Mapping[str, type[Reader]] = {
    reader.modality: reader for reader in (ImageReader, AudioReader, VideoReader)
}


def runs_of(processed: ProcessedMedia) -> tuple[tuple[int, int], ...]:
    """Return (offset in `token_ids`, tokens) where rows stand, in order."""
    tokens = processed.token_ids
    embedded = [True] * len(tokens) if processed.embedded is None else processed.embedded
    runs, start = [], 0
    for is_embedded, group in itertools.groupby(embedded):
        count = sum(1 for _ in group)
        if is_embedded:
            runs.append((start, count))
        start += count
    return tuple(runs)


def content_of(processed: ProcessedMedia, modality: str, digest: str) -> MediaContent:
    tensors: Mapping[str, np.ndarray] = processed.tensors
    return MediaContent(
        modality=modality,
        digest=digest,
        token_ids=tuple(map(int, processed.token_ids)),
        runs=runs_of(processed),
        tensors={
            name: MediaTensor.of(np.ascontiguousarray(value)) for name, value in tensors.items()
        },
        grid=processed.grid,
        frame_positions=processed.frame_positions,
    )
