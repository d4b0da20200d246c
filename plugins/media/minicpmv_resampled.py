"""MiniCPM-V 2.6, 4.0 and 4.5, and pictures of MiniCPM-o: as 4.6, but that a picture and each of its
slices have the same number of rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ...core.protocols.media import MediaSetup, ProcessedMedia
from ..models.whole_configs import HEAD_DIM
from .encoder import TransformersEncoder
from .family import Pictures
from .minicpmv import SlicesProcessor
from .pillow import PillowImages, PillowProcessor
from .processor import NORMALISATION

if TYPE_CHECKING:
    from PIL.Image import Image

WHOLE, SLICES = "pixel_values", "slices"
"""Names of a picture's pixels, [n, 3, height, width]; slices have another size."""
COLUMNS = "columns"
"""Name of the number of slices that stand side by side."""
LONGEST = 10_000.0
"""Longest wave of positions, by 2 π."""


class MiniCPMVImages(PillowImages):
    defaults = {
        "resample": 3, "max_slice_nums": 9, "scale_resolution": 448, "patch_size": 14,
        "slice_mode": True, "use_image_id": True, "norm_mean": [0.5] * 3, "norm_std": [0.5] * 3,
    }  # fmt: skip

    def __init__(self, setup: MediaSetup) -> None:
        super().__init__(setup)
        self.image_mean, self.image_std = self.options["norm_mean"], self.options["norm_std"]

    def tensors(self, image: Image) -> dict[str, Any]:
        columns, rows = self._grid(*image.size)
        whole = self._pixels(image, *self._area(*image.size))[None]
        if columns * rows == 1:
            return {WHOLE: whole}
        across, down = self._area(
            max(round(image.width / columns), 1), max(round(image.height / rows), 1)
        )
        canvas = self._pixels(image, across * columns, down * rows)
        slices = canvas.reshape(3, rows, down, columns, across).transpose(1, 3, 0, 2, 4)
        return {
            WHOLE: whole, SLICES: slices.reshape(-1, 3, down, across),
            COLUMNS: np.array(columns),
        }  # fmt: skip

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the (columns, rows) of slices: about one for each area that the tower was trained
        for, in the shape that is closest to the picture's."""
        most = self.options["max_slice_nums"] if self.options["slice_mode"] else 1
        count = min(math.ceil(width * height / self.options["scale_resolution"] ** 2), most)
        if count <= 1:
            return 1, 1
        grids = [
            (columns, number // columns)
            for number in (count - 1, count, count + 1)
            if 1 < number <= most
            for columns in range(1, number + 1)
            if number % columns == 0
        ]
        shape = math.log(width / height)
        return min(grids, key=lambda grid: abs(shape - math.log(grid[0] / grid[1])))

    def _area(self, width: int, height: int) -> tuple[int, int]:
        """Return the size of a picture of this shape that has the area the tower was trained for,
        in whole patches."""
        shape = width / height
        high = int(self.options["scale_resolution"] / math.sqrt(shape))
        return self._patches(int(high * shape)), self._patches(high)

    def _patches(self, side: int) -> int:
        patch: int = self.options["patch_size"]
        return max(round(side / patch) * patch, patch)

    def _pixels(self, image: Image, width: int, height: int) -> np.ndarray:
        return self.resized(image, height, width).transpose(2, 0, 1)


class MiniCPMVProcessor(SlicesProcessor, PillowProcessor):
    images_class = MiniCPMVImages

    def find_placeholder(self, setup: MediaSetup) -> int:
        return self.token("<unk>")

    def processed(self, tensors: Mapping[str, np.ndarray]) -> ProcessedMedia:
        kept = dict(tensors)
        columns, count = int(kept.pop(COLUMNS, 1)), int(self.config.query_num)
        return self.of_slices(kept, count, [count] * len(kept.get(SLICES, ())), columns)


class Resampler(nn.Module):
    """Reads the patches of a picture by queries that it has learned."""

    def __init__(self, count: int, width: int, vision_width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(count, width))
        self.kv_proj = (
            nn.Identity() if vision_width == width else nn.Linear(vision_width, width, bias=False)
        )
        self.attn = nn.MultiheadAttention(width, width // HEAD_DIM, batch_first=True)
        self.ln_q, self.ln_kv, self.ln_post = (nn.LayerNorm(width, eps=1e-6) for _ in range(3))
        self.proj = nn.Parameter(torch.empty(width, width))

    def forward(self, patches: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """[n, rows * columns, vision width] → [n, queries, width]"""
        values = self.ln_kv(self.kv_proj(patches))
        keys = values + places(rows, columns, values.shape[-1], values.device).to(values.dtype)
        queries = self.ln_q(self.query).expand(len(values), -1, -1)
        read, _ = self.attn(queries, keys, values, need_weights=False)
        out: torch.Tensor = self.ln_post(read) @ self.proj
        return out


def places(rows: int, columns: int, width: int, device: torch.device) -> torch.Tensor:
    """Return sines and cosines of each patch's column, then those of its row: [rows * columns,
    width]."""
    quarter = width // 4
    speeds = LONGEST ** -(torch.arange(quarter, device=device, dtype=torch.float32) / quarter)
    row, column = (
        torch.cat([angles.sin(), angles.cos()], dim=-1)
        for angles in (
            torch.arange(count, device=device, dtype=torch.float32)[:, None] * speeds
            for count in (rows, columns)
        )
    )
    grid = (rows, columns, width // 2)
    return torch.cat([column.expand(grid), row[:, None].expand(grid)], dim=-1).flatten(0, 1)


class MiniCPMVParts(nn.Module):
    """What reads pictures, under the names that checkpoints have."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionTransformer

        vision, width = config.vision_config, config.text_config.hidden_size
        self.vpm = Idefics2VisionTransformer(vision)
        self.resampler = Resampler(config.query_num, width, vision.hidden_size)
        self._patch = vision.patch_size

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """[n, 3, height, width] → [n, query_num, hidden size]"""
        rows, columns = (side // self._patch for side in pixels.shape[2:])
        patches = self.vpm(pixels).last_hidden_state
        out: torch.Tensor = self.resampler(patches, rows, columns)
        return out


class MiniCPMVEncoder(TransformersEncoder):
    @classmethod
    def create(cls, config: Any, dtype: torch.dtype) -> Any:
        return MiniCPMVParts(config).to(dtype)

    def encode(self, items: Sequence[Mapping[str, torch.Tensor]]) -> Sequence[torch.Tensor]:
        """Encode pictures and slices of one size together."""
        parts = [
            (number, self.normalised(item[name], item[NORMALISATION]))
            for number, item in enumerate(items)
            for name in (WHOLE, SLICES)
            if name in item
        ]
        alike: dict[tuple[int, ...], list[int]] = {}
        for index, (_, pixels) in enumerate(parts):
            alike.setdefault(tuple(pixels.shape[2:]), []).append(index)
        rows: dict[int, torch.Tensor] = {}
        for indices in alike.values():
            own_parts = [parts[index][1] for index in indices]
            encoded = torch.split(self.hf(torch.cat(own_parts)), list(map(len, own_parts)))
            rows |= zip(indices, encoded, strict=True)
        own: list[list[torch.Tensor]] = [[] for _ in items]
        for index, (number, _) in enumerate(parts):
            own[number].append(rows[index].flatten(0, 1))
        return [torch.cat(each) for each in own]


class MiniCPMVResampled(Pictures):
    processor_class = MiniCPMVProcessor
    encoder_class = MiniCPMVEncoder
