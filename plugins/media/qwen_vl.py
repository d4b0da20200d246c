"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: pictures of any size, tokens that turn by rows and columns."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from ...core.nn.context import BuildContext
from ...core.parts.media import PlacedItem
from ...core.protocols.media import MediaProcessor, MediaSetup, ProcessedMedia
from .encoder import TransformersEncoder
from .family import Pictures
from .mrope import positions_of, sections_of
from .packed import pack
from .processor import ImageProcessor, check_count, check_fields, sizes_of
from .qwen_video import Glm46Video, GlmVideo, Qwen3Video, QwenVideo


class QwenProcessor(ImageProcessor):
    in_bytes = True

    def __init__(self, setup: MediaSetup) -> None:
        super().__init__(setup)
        if self._normalisation is not None and "Qwen" in type(self.images).__name__:
            # Of others the number of frames decides the size.
            self.images.temporal_patch_size = 1

    def bytes_of(self, pixels: np.ndarray) -> np.ndarray:
        """Return one of the equal frames of each patch: [patches, 3, pixels]"""
        frames = self.images.temporal_patch_size
        return pixels.reshape(len(pixels), 3, frames, -1)[:, :, 0].astype(np.uint8)

    def processed(self, tensors: Mapping[str, np.ndarray]) -> ProcessedMedia:
        units = self._units(tensors["image_grid_thw"][0])
        return ProcessedMedia(tensors, self.repeated(math.prod(units)), grid=units)

    def of_rows(self, count: int, fields: Mapping[str, np.ndarray]) -> Sequence[ProcessedMedia]:
        name = "image_grid_thw"
        check_fields(fields, name)
        grids = [self._units(sizes) for sizes in sizes_of(fields, name, 3)]
        check_count(count, [math.prod(units) for units in grids], name)
        return [ProcessedMedia({}, self.repeated(math.prod(g)), grid=g) for g in grids]

    def _units(self, grid: Sequence[int]) -> tuple[int, int, int]:
        """Return a picture's frames, and rows and columns of units, by those of its patches."""
        frames, rows, columns = (int(size) for size in grid)
        merge = self.config.vision_config.spatial_merge_size
        return frames, rows // merge, columns // merge


GRIDS = "image_grid_thw"


class QwenEncoder(TransformersEncoder):
    channels = (3, 1)

    def __init__(self, setup: MediaSetup, build: BuildContext) -> None:
        super().__init__(setup, build)
        vision = setup.config.vision_config
        self._frames = getattr(vision, "temporal_patch_size", 1)
        self._pixels = vision.patch_size**2
        pack(self.hf.visual, build.operations)
        self.rope = sections_of(setup.config.text_config.rope_parameters)

    def normalised(self, pixels: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
        """[patches, 3, pixels of one frame, or of all] → [patches, numbers of all frames]"""
        normalised = super().normalised(pixels, parameters)
        if pixels.shape[2] != self._pixels:
            return normalised.flatten(1)
        return normalised[:, :, None].expand(-1, -1, self._frames, -1).flatten(1)

    def encode(self, items: Sequence[Mapping[str, torch.Tensor]]) -> Sequence[torch.Tensor]:
        """Encode pictures of any sizes together."""
        return self.encode_together([self.prepared(item) for item in items])

    def encode_together(
        self, items: Sequence[Mapping[str, torch.Tensor]]
    ) -> Sequence[torch.Tensor]:
        """Encode items of one grid or several each."""
        tensors = {name: torch.cat([item[name] for item in items]) for name in items[0]}
        output = self.hf.get_image_features(**tensors)
        parts = iter(self.rows(output, len(tensors[GRIDS])))
        return [torch.cat(list(itertools.islice(parts, len(item[GRIDS])))) for item in items]

    def positions(self, items: Sequence[PlacedItem], num_tokens: int) -> tuple[np.ndarray, int]:
        return positions_of(items, num_tokens)


class PaddleOcrEncoder(QwenEncoder):
    renamed_parts: ClassVar[Mapping[str, str]] = {"mlp_AR.": "projector."}

    def normalised(self, pixels: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
        """[patches, 3, pixels] → [patches, 3, rows, columns]"""
        side = math.isqrt(pixels.shape[2])
        normalised = TransformersEncoder.normalised(self, pixels, parameters)
        return normalised.view(*normalised.shape[:2], side, side)


class QwenPictures(Pictures):
    """Those that take pictures alone."""

    processor_class = QwenProcessor
    encoder_class = QwenEncoder

    @classmethod
    def refusal(cls, setup: MediaSetup) -> str | None:
        if "mrope_section" not in (setup.config.text_config.rope_parameters or {}):
            return "its rope_parameters have no mrope_section"
        return None


class PaddleOcr(QwenPictures):
    encoder_class = PaddleOcrEncoder


class Qwen2VL(QwenPictures):
    modalities = ("image", "video")
    video_class: ClassVar[type[QwenVideo]] = QwenVideo

    @classmethod
    def processor(cls, setup: MediaSetup, modality: str = "image") -> MediaProcessor:
        return (cls.video_class if modality == "video" else cls.processor_class)(setup)


class Glm4v(Qwen2VL):
    video_class = GlmVideo


class Glm46V(Qwen2VL):
    video_class = Glm46Video

    @classmethod
    def refusal(cls, setup: MediaSetup) -> str | None:
        if setup.config.model_type != "glm46v":
            return f"pictures of model_type {setup.config.model_type!r} have other sizes"
        return super().refusal(setup)


class Qwen35(Qwen2VL):
    video_class = Qwen3Video


class Qwen3Encoder(QwenEncoder):
    """Some of the tower's layers give rows of their own, for the first decoder layers
    (deepstack)."""

    def __init__(self, setup: MediaSetup, build: BuildContext) -> None:
        super().__init__(setup, build)
        self.num_levels = len(setup.config.vision_config.deepstack_visual_indexes)

    def rows(self, output: Any, count: int) -> Sequence[torch.Tensor]:
        first = super().rows(output, count)
        sizes = [len(own) for own in first]
        features = (
            torch.split(level, sizes) if isinstance(level, torch.Tensor) else level
            for level in output.deepstack_features
        )  # Some versions split them.
        levels = zip(first, *features, strict=True)
        return [torch.cat(own, dim=-1) for own in levels]


class Qwen3VL(Qwen35):
    encoder_class = Qwen3Encoder

    @classmethod
    def refusal(cls, setup: MediaSetup) -> str | None:
        levels = len(setup.config.vision_config.deepstack_visual_indexes)
        if levels >= setup.config.text_config.num_hidden_layers:
            return "deepstack_visual_indexes has as many entries as the text part has layers"
        return super().refusal(setup)
