"""Phi-3-vision and Phi-3.5-vision: a picture in tiles, on white where its shape is another, then
the whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ...core.protocols.media import MediaSetup, ProcessedMedia
from .encoder import TransformersEncoder
from .family import Pictures
from .pillow import PillowImages, PillowProcessor, cut

if TYPE_CHECKING:
    from PIL.Image import Image

PATCHES = 2
"""Patches of a side of what becomes a row."""
COLUMNS = "columns"
"""Name of the number of tiles that stand side by side."""


class Phi3VisionImages(PillowImages):
    defaults = {
        "num_crops": 16, "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }  # fmt: skip

    def __init__(self, setup: MediaSetup) -> None:
        super().__init__(setup)
        self._side = int(setup.config.vision_config.image_size)

    def tensors(self, image: Image) -> dict[str, Any]:
        from PIL.Image import Transpose

        wide = image if image.width >= image.height else image.transpose(Transpose.TRANSPOSE)
        ratio = wide.width / wide.height
        columns = 1
        while (columns + 1) * math.ceil((columns + 1) / ratio) <= self.options["num_crops"]:
            columns += 1
        width = columns * self._side
        height = max(int(width / ratio), 1)
        rows = math.ceil(height / self._side)
        canvas = np.full((rows * self._side, width, 3), 255, dtype=np.uint8)
        top = (len(canvas) - height) // 2
        canvas[top : top + height] = self.resized(wide, height, width)
        if wide is not image:
            canvas, columns = canvas.swapaxes(0, 1), rows
        tiles = cut(canvas, self._side).transpose(0, 3, 1, 2)
        return {"pixel_values": tiles, COLUMNS: np.array(columns)}


class Phi3VisionProcessor(PillowProcessor):
    images_class = Phi3VisionImages

    def find_placeholder(self, setup: MediaSetup) -> int:
        return self.token("<|image|>")

    def processed(self, tensors: Mapping[str, np.ndarray]) -> ProcessedMedia:
        vision, columns = self.config.vision_config, int(tensors[COLUMNS])
        side = vision.image_size // vision.patch_size // PATCHES
        rows = len(tensors["pixel_values"]) // columns
        # Each line ends with a row of its own, and one is between the tiles and the whole.
        count = rows * side * (columns * side + 1) + 1 + side * (side + 1)
        return ProcessedMedia(tensors, self.repeated(count))


class Phi3VisionParts(nn.Module):
    """What reads pictures, under the names that checkpoints have."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers import CLIPVisionModel

        vision, width = config.vision_config, config.text_config.hidden_size
        create: Any = CLIPVisionModel._from_config  # Untyped.
        self.img_processor = create(vision)
        wide = vision.hidden_size * PATCHES**2
        self.glb_GN = nn.Parameter(torch.empty(1, 1, wide))
        self.sub_GN = nn.Parameter(torch.empty(1, 1, 1, wide))
        self.img_projection = nn.Sequential(
            nn.Linear(wide, width), nn.GELU(), nn.Linear(width, width)
        )

    def grids(self, pixels: torch.Tensor) -> torch.Tensor:
        """[n, 3, side, side] → [n, rows, columns, wide]"""
        states: Any = self.img_processor(pixels).last_hidden_state[:, 1:]
        side = round(states.shape[1] ** 0.5) // PATCHES
        squares: torch.Tensor = states.unflatten(1, (side, PATCHES, side, PATCHES))
        return squares.transpose(2, 3).flatten(3)

    def forward(self, tiles: torch.Tensor, columns: int) -> torch.Tensor:
        """Return the rows of a picture."""
        lines = tiles.view(-1, columns, *tiles.shape[1:]).permute(2, 0, 3, 1, 4)
        canvas = lines.flatten(3).flatten(1, 2)[None]
        # As theirs, without smoothing.
        whole = F.interpolate(canvas.float(), tiles.shape[2:], mode="bicubic").to(tiles.dtype)
        first, *others = self.grids(torch.cat([whole, tiles]))
        side, wide = others[0].shape[0], others[0].shape[-1]
        grid = torch.stack(others).view(-1, columns, side, side, wide).transpose(1, 2)
        grid = grid.flatten(2, 3).flatten(0, 1)
        rows = [self._lines(grid), self.glb_GN[0], self._lines(first)]
        out: torch.Tensor = self.img_projection(torch.cat(rows))
        return out

    def _lines(self, grid: torch.Tensor) -> torch.Tensor:
        ends = self.sub_GN[0].expand(len(grid), -1, -1)
        return torch.cat([grid, ends], dim=1).flatten(0, 1)


class Phi3VisionEncoder(TransformersEncoder):
    @classmethod
    def create(cls, config: Any, dtype: torch.dtype) -> Any:
        return nn.ModuleDict({"vision_embed_tokens": Phi3VisionParts(config)}).to(dtype)

    def encode(self, items: Sequence[Mapping[str, torch.Tensor]]) -> Sequence[torch.Tensor]:
        prepared = [self.prepared(item) for item in items]
        read = self.hf["vision_embed_tokens"]
        return [read(item["pixel_values"], int(item[COLUMNS])) for item in prepared]


class Phi3Vision(Pictures):
    processor_class = Phi3VisionProcessor
    encoder_class = Phi3VisionEncoder
