"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: pictures of any size, tokens that turn by rows and columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...core.nn.context import BuildContext
from ...core.parts.media import PlacedItem
from ...core.protocols.media import MediaSetup, ProcessedMedia
from .encoder import TransformersEncoder
from .family import Pictures
from .mrope import positions_of, sections_of
from .processor import ImageProcessor


class QwenProcessor(ImageProcessor):
    def processed(self, tensors: Mapping[str, np.ndarray]) -> ProcessedMedia:
        grid = tensors["image_grid_thw"]
        frames, rows, columns = (int(size) for size in grid[0])
        merge = self.config.vision_config.spatial_merge_size
        units = frames, rows // merge, columns // merge
        return ProcessedMedia(
            {"pixel_values": tensors["pixel_values"], "image_grid_thw": grid},
            self.repeated(np.prod(units)),
            grid=units,
        )


class QwenEncoder(TransformersEncoder):
    def __init__(self, setup: MediaSetup, build: BuildContext) -> None:
        super().__init__(setup, build)
        self.rope = sections_of(setup.config.text_config.rope_parameters)

    def positions(self, items: Sequence[PlacedItem], num_tokens: int) -> tuple[np.ndarray, int]:
        return positions_of(items, num_tokens)


class Qwen2VL(Pictures):
    processor_class = QwenProcessor
    encoder_class = QwenEncoder

    @classmethod
    def refusal(cls, setup: MediaSetup) -> str | None:
        if "mrope_section" not in (setup.config.text_config.rope_parameters or {}):
            return "its rope_parameters have no mrope_section"
        return None


class Qwen3Encoder(QwenEncoder):
    """Some of the tower's layers give rows of their own, for the first decoder layers
    (deepstack)."""

    def __init__(self, setup: MediaSetup, build: BuildContext) -> None:
        super().__init__(setup, build)
        self.num_levels = len(setup.config.vision_config.deepstack_visual_indexes)

    def rows(self, output: Any) -> torch.Tensor:
        levels = [super().rows(output), *(torch.cat(list(v)) for v in output.deepstack_features)]
        return torch.cat(levels, dim=-1)


class Qwen3VL(Qwen2VL):
    encoder_class = Qwen3Encoder

    @classmethod
    def refusal(cls, setup: MediaSetup) -> str | None:
        levels = len(setup.config.vision_config.deepstack_visual_indexes)
        if levels >= setup.config.text_config.num_hidden_layers:
            return "deepstack_visual_indexes has as many entries as the text part has layers"
        return super().refusal(setup)
