"""InternVL 2 to 3.5 as they were published: pictures in tiles of one size, with the whole as the
last one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ...core.protocols.media import MediaSetup
from .encoder import TransformersEncoder
from .family import Pictures
from .fused import FusedAttention
from .internvl import TilesProcessor
from .pillow import PillowImages, PillowProcessor, closest_grid, cut, grids

if TYPE_CHECKING:
    from PIL.Image import Image

OF_CONFIG = ("min_dynamic_patch", "max_dynamic_patch", "use_thumbnail", "dynamic_image_size")
"""Options that config.json states."""


class InternVLChatImages(PillowImages):
    defaults = {
        "resample": 3, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
        "min_dynamic_patch": 1, "max_dynamic_patch": 12, "use_thumbnail": True,
        "dynamic_image_size": True,
    }  # fmt: skip

    def __init__(self, setup: MediaSetup) -> None:
        super().__init__(setup)
        self._side = int(setup.config.vision_config.image_size[0])
        self._grids = [(1, 1)]
        if self.options["dynamic_image_size"]:
            self._grids = grids(*(self.options[name] for name in OF_CONFIG[:2]))

    def stated(self, setup: MediaSetup) -> dict[str, Any]:
        own = {name: getattr(setup.config, name, None) for name in OF_CONFIG}
        return super().stated(setup) | own

    def tensors(self, image: Image) -> dict[str, Any]:
        side = self._side
        columns, rows = closest_grid(self._grids, *image.size, side)
        tiles = cut(self.resized(image, rows * side, columns * side), side)
        if columns * rows > 1 and self.options["use_thumbnail"]:
            tiles = np.concatenate([tiles, self.resized(image, side, side)[None]])
        return {"pixel_values": tiles.transpose(0, 3, 1, 2)}


class InternVLChatProcessor(TilesProcessor, PillowProcessor):
    images_class = InternVLChatImages

    def find_placeholder(self, setup: MediaSetup) -> int:
        return self.token("<IMG_CONTEXT>")


class InternVLChatParts(nn.Module):
    """What reads pictures: a vision transformer, of whose rows some side by side make one."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers.models.internvl.modeling_internvl import InternVLVisionModel

        vision, width = config.vision_config, config.text_config.hidden_size
        self.vision_model = InternVLVisionModel(vision)
        layers: Any = self.vision_model.encoder.layer
        for layer in layers:
            layer.attention = FusedAttention(layer.attention, layer.attention.projection_layer)
        self._factor = round(1 / config.downsample_ratio)
        wide = vision.hidden_size * self._factor**2
        self.mlp1 = nn.Sequential(
            nn.LayerNorm(wide), nn.Linear(wide, width), nn.GELU(), nn.Linear(width, width)
        )

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """[n, 3, side, side] → [n, rows, hidden size]"""
        patches = self.vision_model(pixels).last_hidden_state[:, 1:]
        side, factor = round(patches.shape[1] ** 0.5), self._factor
        groups = patches.unflatten(1, (side // factor, factor, side // factor, factor))
        rows: torch.Tensor = self.mlp1(groups.transpose(2, 3).flatten(3).flatten(1, 2))
        return rows


class InternVLChatEncoder(TransformersEncoder):
    original_names = (
        (r"\.class_embedding$", ".cls_token"),
        (r"\.position_embedding$", ".position_embeddings"),
        (r"\.patch_embedding\.", ".patch_embeddings.projection."),
        (r"\.encoder\.layers\.", ".encoder.layer."), (r"\.attn\.", ".attention."),
        (r"\.norm1\.", ".layernorm_before."), (r"\.norm2\.", ".layernorm_after."),
        (r"\.ls(\d)$", r".lambda_\1"),
    )  # fmt: skip

    @classmethod
    def create(cls, config: Any, dtype: torch.dtype) -> Any:
        return InternVLChatParts(config).to(dtype)

    def encode(self, items: Sequence[Mapping[str, torch.Tensor]]) -> Sequence[torch.Tensor]:
        """Encode the tiles of all pictures together."""
        tiles = [self.prepared(item)["pixel_values"] for item in items]
        parts = torch.split(self.hf(torch.cat(tiles)), list(map(len, tiles)))
        return [part.flatten(0, 1) for part in parts]


class InternVLChat(Pictures):
    processor_class = InternVLChatProcessor
    encoder_class = InternVLChatEncoder

    @classmethod
    def present(cls, setup: MediaSetup) -> tuple[str, ...]:
        return () if setup.config.vision_config is None else cls.modalities

    @classmethod
    def refusal(cls, setup: MediaSetup) -> str | None:
        if setup.config.ps_version != "v2":
            return f"its rows stand in the order {setup.config.ps_version}, and v2 alone is read"
        return None
