"""Kimi K2.5: pictures of their own size, on black where it is no multiple of a token's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import nn

from ...core.nn.context import BuildContext
from ...core.protocols.media import MediaSetup, ProcessedMedia
from .encoder import TransformersEncoder
from .family import Pictures
from .packed import PackedAttention, pack
from .pillow import PillowImages, PillowProcessor

if TYPE_CHECKING:
    from PIL.Image import Image


class KimiK25Images(PillowImages):
    defaults = {
        "size": {"max_height": 512, "max_width": 512}, "max_patches": 16384, "patch_size": 14,
        "merge_size": 2, "resample": 3,
    }  # fmt: skip

    def tensors(self, image: Image) -> dict[str, Any]:
        patch, unit = self.options["patch_size"], self._unit
        height, width = self._size(image)
        rows, columns = (-(-side // unit) * unit // patch for side in (height, width))
        canvas = np.zeros((rows * patch, columns * patch, 3), dtype=np.uint8)
        canvas[:height, :width] = self.resized(image, height, width)
        patches = canvas.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
        return {
            "pixel_values": patches.reshape(rows * columns, 3, patch, patch),
            "image_grid_thw": np.array([[1, rows, columns]]),
        }

    def _size(self, image: Image) -> tuple[int, int]:
        """Return the (height, width) of a picture, within the bounds; it is never enlarged."""
        patch, side = self.options["patch_size"], self.options["size"]["max_height"]
        count = max(1, image.height // patch) * max(1, image.width // patch)
        bounds = (side * patch / image.height, side * patch / image.width)
        scale = min(1.0, math.sqrt(self.options["max_patches"] / count), *bounds)
        height, width = (max(1, int(own * scale)) for own in (image.height, image.width))
        return min(height, side * patch), min(width, side * patch)

    @property
    def _unit(self) -> int:
        """Pixels of a token's side."""
        unit: int = self.options["patch_size"] * self.options["merge_size"]
        return unit


class KimiK25Processor(PillowProcessor):
    images_class = KimiK25Images

    def processed(self, tensors: Mapping[str, np.ndarray]) -> ProcessedMedia:
        per_token = self.images.options["merge_size"] ** 2
        return ProcessedMedia(tensors, self.repeated(tensors["image_grid_thw"].prod() // per_token))


class KimiAttention(PackedAttention):
    """What turns together stands side by side in checkpoints."""

    def heads(self, hidden_states: torch.Tensor) -> torch.Tensor:
        heads = super().heads(hidden_states)
        turning = heads[:, :2].reshape(len(heads), 2, self.num_heads, -1, 2)
        return torch.cat([turning.transpose(-1, -2).flatten(-2), heads[:, 2:]], dim=1)


class KimiK25Encoder(TransformersEncoder):
    original_names: ClassVar[Sequence[tuple[str, str]]] = (
        (r"^vision_tower\.encoder\.", "vision_tower."), (r"\.blocks\.", ".layers."),
        (r"\.norm1\.", ".norm2."), (r"\.norm0\.", ".norm1."),
        (r"\.fc1\.", ".fc2."), (r"\.fc0\.", ".fc1."),
        (r"\.wqkv\.", ".attn.qkv."), (r"\.wo\.", ".attn.proj."),
        (r"\.proj\.0\.", ".in_proj."), (r"\.proj\.2\.", ".out_proj."),
        (r"pos_emb\.weight$", "pos_emb.position_embeddings"),
    )  # fmt: skip

    def __init__(self, setup: MediaSetup, build: BuildContext) -> None:
        super().__init__(setup, build)
        pack(self.hf.vision_tower, build.operations, KimiAttention)

    @classmethod
    def create(cls, config: Any, dtype: torch.dtype) -> Any:
        """Return the model with queries, keys and values in one, as checkpoints have them."""
        whole = super().create(config, dtype)
        for module in whole.vision_tower.modules():
            if type(module).__name__ == "Kimi_K25VisionAttention":
                for name in ("q_proj", "k_proj", "v_proj"):
                    delattr(module, name)
                module.qkv = nn.Linear(module.dim, 3 * module.dim, dtype=dtype)
        return whole

    def encode(self, items: Sequence[Mapping[str, torch.Tensor]]) -> Sequence[torch.Tensor]:
        """Encode pictures of any sizes together."""
        return self.encode_together([self.prepared(item) for item in items])


class KimiK25(Pictures):
    processor_class = KimiK25Processor
    encoder_class = KimiK25Encoder
