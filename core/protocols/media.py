"""The contract of media models: how a multimodal architecture takes pictures."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL.Image import Image

    from ..loading.weight_map import WeightMap
    from ..nn.context import BuildContext
    from ..parts.media import PlacedItem
    from .audio import SpeechChat


@dataclass(frozen=True)
class MediaSetup:
    """What a checkpoint says about its media."""

    folder: Path
    config: Any
    """The whole checkpoint's configuration, of `transformers`."""
    processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """`EngineConfig.mm_processor_kwargs`."""
    tokenize: Callable[[str], list[int]] | None = None
    """Text with special tokens → token ids; None without a tokenizer, and for the encoder."""


@dataclass(frozen=True)
class ProcessedMedia:
    """An item as the encoder takes it, and what stands for it in a prompt."""

    tensors: Mapping[str, np.ndarray]
    """What `MediaEncoder.encode` gets."""
    token_ids: Sequence[int]
    """Take the place of the placeholder."""
    embedded: Sequence[bool] | None = None
    """[len(token_ids)] Which of them a row of the encoder's output stands for; None: all."""
    grid: tuple[int, ...] = ()
    """(frames, rows, columns) of units, if the model rotates by place. Of several runs of rows,
    each has as many of the frames."""
    frame_positions: tuple[int, ...] = ()
    """How far each frame's position is from the first one's; empty: as far as its number."""


class Video(NamedTuple):
    """Frames that were chosen of a video."""

    frames: np.ndarray
    """[frames, height, width, 3] uint8"""
    indices: tuple[int, ...]
    """Their numbers in the video."""
    fps: float
    """Of the video."""
    total: int
    """Frames that the video has."""
    sound: np.ndarray | None = None
    """[n] float32: samples at the rate that its processor has named; None: it has none."""

    @property
    def sampled_fps(self) -> float:
        return len(self.indices) / self.total * self.fps


@dataclass(frozen=True)
class Sampling:
    """Which frames of a video are read."""

    fps: float | None = 2.0
    """As many per second, if `num_frames` does not say; None: all."""
    num_frames: int | None = None
    least: int = 1
    most: int = 768
    multiple: int = 1
    """Of which their number is one, if the video has as many."""
    place: Fraction | None = None
    """Of each in its share of the video: 0 is its first frame, 1/2 its middle; None: from the
    first to the last frame of the video."""

    def indices(self, total: int, fps: float, most: int) -> list[int]:
        """Return the numbers of the frames of a video that has `total`; at most `most`."""
        count = total if self.fps is None else int(total / fps * self.fps)
        if self.num_frames is not None:
            count = self.num_frames if self.num_frames > 0 else total
        else:
            count = max(count, self.least)
        count = min(count, self.most, most, total)
        count = max(count // self.multiple * self.multiple, 1)
        if self.place is not None:
            return [int((number + self.place) * total / count) for number in range(count)]
        if count == 1:
            return [0]
        return [round(number * (total - 1) / (count - 1)) for number in range(count)]


class MediaProcessor(Protocol):
    """Turns decoded items of one modality into tensors and tokens: an `ImageProcessor`,
    `AudioProcessor` or `VideoProcessor`. Used by several threads at once."""

    placeholder_id: int
    """The token by which a prompt says where an item stands."""
    around: tuple[str, str]
    """Texts that stand before and after it."""
    fingerprint: str
    """Of all options that change the tensors."""


@runtime_checkable
class ArrangesPrompts(Protocol):
    """A `MediaProcessor` of a model that takes prompts with items in one form alone."""

    def arranged(self, token_ids: Sequence[int]) -> list[int]:
        """Return a prompt's tokens, with placeholders, in that form; those that are in it, as they
        are. Raises ValueError for items that the model does not take together."""


@runtime_checkable
class TakesRows(Protocol):
    """A `MediaProcessor` whose items may be given as the rows that the encoder would return."""

    def of_rows(self, count: int, fields: Mapping[str, np.ndarray]) -> Sequence[ProcessedMedia]:
        """Return what stands for items in a prompt, without tensors: of `count` rows in all, one
        item's after the other's. fields: what else requests say of their sizes, by name. Called on
        a thread. Raises ValueError for what does not go together, and for items that are not taken
        in this form."""


class ImageProcessor(MediaProcessor, Protocol):
    """Processes pictures."""

    def image(self, image: Image) -> ProcessedMedia:
        """Process a picture in RGB. Raises ValueError for one that it cannot take."""

    def lowered(self, options: Mapping[str, Any]) -> ImageProcessor:
        """Return a processor with a request's `mm_processor_kwargs`. Blocks. Raises ValueError for
        those that it does not have, or that could make items larger."""


class VideoProcessor(MediaProcessor, Protocol):
    """Processes videos. One may have `sound_rate`, the samples per second of the sound that it
    takes (None: it takes none), and `lowered`, as an `ImageProcessor`."""

    sampling: Sampling

    def video(self, video: Video) -> ProcessedMedia:
        """Process frames. Raises ValueError for those that it cannot take."""


class AudioProcessor(MediaProcessor, Protocol):
    """Processes recordings."""

    sampling_rate: int
    """Of the samples that it takes, per second."""
    max_samples: int | None
    """Of a recording; None: as many as the server decodes."""

    def audio(self, samples: np.ndarray) -> ProcessedMedia:
        """Process samples of one channel, [n] float32. Raises ValueError for those that it cannot
        take."""


@dataclass(frozen=True)
class RopeSections:
    """How a head's pairs are divided among three axes of positions."""

    sizes: tuple[int, ...]
    """Pairs that turn by frame, row and column."""
    interleaved: bool = False
    """Pairs of the axes alternate, in place of one block each."""


class MediaEncoder(Protocol):
    """Encodes items of all modalities on the device, each by what its processor has returned. A
    `torch.nn.Module`, part of the model; see `MediaModel`."""

    weight_map: WeightMap
    """Its `own` says which of the checkpoint's tensors are the encoder's, and gives their names
    here."""
    num_levels: int
    """Decoder layers, from the first, that get rows of their own added after them."""
    rope: RopeSections | None
    """None: one position a token."""

    def encode(self, items: Sequence[Mapping[str, torch.Tensor]]) -> Sequence[torch.Tensor]:
        """Encode items, as their processor returned them: per item [num_rows, (1 + num_levels) *
        hidden_size]."""

    def positions(self, items: Sequence[PlacedItem], num_tokens: int) -> tuple[np.ndarray, int]:
        """Return the positions of a prompt's tokens, [3, num_tokens], and what is added to the
        position of later ones. Only with `rope`."""


class Spans(enum.Enum):
    """Which tokens see each other in both directions."""

    ALL = "all"
    """Those of an item, in all layers."""
    WINDOWED = "windowed"
    """Those of an item, in layers with a sliding window."""
    PROMPT = "prompt"
    """Those of the prompt, in all layers; also of prompts without items."""


class MediaModel(Protocol):
    """How a multimodal architecture takes media beside text. Its text part is served as another
    architecture (`Registry.add_text_part`)."""

    modalities: ClassVar[tuple[str, ...]]
    """Of items: "image", "audio", "video"."""

    @classmethod
    def present(cls, setup: MediaSetup) -> tuple[str, ...]:
        """Return the modalities that this checkpoint has parts for, of `modalities`. A class may
        leave this method out: it has all."""

    @classmethod
    def spans(cls, setup: MediaSetup) -> Spans | None:
        """Return which tokens see each other in both directions; None: none."""

    @classmethod
    def refusal(cls, setup: MediaSetup) -> str | None:
        """Return why this checkpoint's media cannot be served, in one clause; None: they can."""

    @classmethod
    def speech(cls, setup: MediaSetup) -> SpeechChat | None:
        """Return how the model is asked to write recordings down; None: it is not trained to. A
        class may leave this method out."""

    @classmethod
    def processor(cls, setup: MediaSetup, modality: str) -> MediaProcessor:
        """Create the processor of a modality. Blocks."""

    @classmethod
    def encoder(cls, setup: MediaSetup, build: BuildContext) -> MediaEncoder:
        """Create the encoder's module, without weights, on `build.device` in `build.dtype`."""


def present_modalities(media: type[MediaModel], setup: MediaSetup) -> tuple[str, ...]:
    """Return the modalities that a checkpoint has parts for."""
    return media.present(setup) if hasattr(media, "present") else tuple(media.modalities)
