"""DeepSeek-OCR: a picture's tiles, and then the whole on a grey square."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ...core.protocols.media import MediaSetup, ProcessedMedia
from .deepseek_ocr2 import TILES, DeepseekOcr2Encoder
from .encoder import TransformersEncoder
from .family import Pictures
from .fused import FusedAttention
from .pillow import PillowImages, PillowProcessor, closest_grid, cut, grids
from .processor import NORMALISATION

if TYPE_CHECKING:
    from PIL.Image import Image

GREY = (127, 127, 127)
UNIT = 64
"""Pixels of a row's side."""
COLUMNS = "columns"
"""Name of the number of tiles that stand side by side."""


class DeepseekOcrImages(PillowImages):
    defaults = {
        "resample": 3, "size": {"height": 1024, "width": 1024}, "tile_size": 640,
        "min_patches": 2, "max_patches": 6,
    }  # fmt: skip

    def tensors(self, image: Image) -> dict[str, Any]:
        from PIL import ImageOps

        side, tile = self.options["size"]["height"], self.options["tile_size"]
        square = ImageOps.pad(image, (side, side), self.options["resample"], color=GREY)
        tensors = {"pixel_values": np.asarray(square).transpose(2, 0, 1)[None]}
        if max(image.size) > tile:
            possible = grids(self.options["min_patches"], self.options["max_patches"])
            columns, rows = closest_grid(possible, *image.size, tile)
            canvas = self.resized(image, rows * tile, columns * tile)
            tensors[TILES] = cut(canvas, tile).transpose(0, 3, 1, 2)
            tensors[COLUMNS] = np.array(columns)
        return tensors


class DeepseekOcrProcessor(PillowProcessor):
    images_class = DeepseekOcrImages

    def find_placeholder(self, setup: MediaSetup) -> int:
        return self.token("<image>")

    def processed(self, tensors: Mapping[str, np.ndarray]) -> ProcessedMedia:
        side = tensors["pixel_values"].shape[-1] // UNIT
        count = side * (side + 1) + 1  # Each line ends with a row of its own.
        if TILES in tensors:
            side, columns = tensors[TILES].shape[-1] // UNIT, int(tensors[COLUMNS])
            rows = len(tensors[TILES]) // columns
            count += rows * side * (columns * side + 1)
        return ProcessedMedia(tensors, self.repeated(count))


class DeepseekOcrParts(nn.Module):
    """What reads pictures: SAM's encoder, then CLIP's over its rows, and both side by side."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers.models.unlimited_ocr.modeling_unlimited_ocr import (
            UnlimitedOcrVisionModel,
        )

        vision, width = config.vision_config, config.text_config.hidden_size
        self.vision_tower = UnlimitedOcrVisionModel(vision)
        layers: Any = self.vision_tower.vision_encoder.encoder.layers
        for layer in layers:
            layer.self_attn = FusedAttention(layer.self_attn, layer.self_attn.out_proj)
        vision_width = vision.sam_config.downsample_channels[-1] + vision.encoder_config.hidden_size
        self.multi_modal_projector = nn.Linear(vision_width, width)
        self.image_newline = nn.Parameter(torch.empty(width))
        self.view_separator = nn.Parameter(torch.empty(width))

    def grids(self, pixels: torch.Tensor) -> torch.Tensor:
        """[n, 3, side, side] → [n, rows, columns, hidden size]"""
        rows = self.multi_modal_projector(self.vision_tower(pixels).last_hidden_state)
        side = pixels.shape[-1] // UNIT
        out: torch.Tensor = rows.unflatten(1, (side, side))
        return out

    def lines(self, grid: torch.Tensor) -> torch.Tensor:
        """Return the rows of a grid, with one that ends each line."""
        ends = self.image_newline.expand(len(grid), 1, -1)
        return torch.cat([grid, ends], dim=1).flatten(0, 1)


class DeepseekOcrEncoder(TransformersEncoder):
    original_names = (
        *DeepseekOcr2Encoder.original_names,
        (r"\.self_attn\.qkv_proj\.", ".self_attn.qkv."),
        (r"\.self_attn\.out_proj\.", ".self_attn.proj."),
        (r"^vision_model\.transformer\.", "vision_tower.vision_encoder.encoder."),
        (r"^vision_model\.", "vision_tower.vision_encoder."),
    )

    @classmethod
    def create(cls, config: Any, dtype: torch.dtype) -> Any:
        return DeepseekOcrParts(config).to(dtype)

    def prepared(self, item: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: self.normalised(item[name], item[NORMALISATION])
            for name in ("pixel_values", TILES)
            if name in item
        } | {name: item[name] for name in (COLUMNS,) if name in item}

    def encode_together(
        self, items: Sequence[Mapping[str, torch.Tensor]]
    ) -> Sequence[torch.Tensor]:
        wholes = self.hf.grids(torch.cat([item["pixel_values"] for item in items]))
        rows = [torch.cat([self.hf.lines(whole), self.hf.view_separator[None]]) for whole in wholes]
        if TILES not in items[0]:
            return rows
        tiles = self.hf.grids(torch.cat([item[TILES] for item in items]))
        for number, (item, own) in enumerate(zip(items, tiles.chunk(len(items)), strict=True)):
            lines = own.unflatten(0, (-1, int(item[COLUMNS]))).transpose(1, 2)
            rows[number] = torch.cat(
                [self.hf.lines(lines.flatten(2, 3).flatten(0, 1)), rows[number]]
            )
        return rows


class DeepseekOcr(Pictures):
    processor_class = DeepseekOcrProcessor
    encoder_class = DeepseekOcrEncoder
