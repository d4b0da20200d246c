"""DeepSeek-OCR 2: a picture's tiles, and then the whole in a square."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .derived import Derived, DerivedProcessor
from .encoder import TransformersEncoder

if TYPE_CHECKING:
    from PIL.Image import Image

TILES = "pixel_values_local"


class DeepseekOcr2Processor(DerivedProcessor):
    def written(self, image: Image) -> tuple[Mapping[str, Any], str]:
        made, text = super().written(image)
        names = ("pixel_values", TILES)
        tensors = {name: np.asarray(made[name]) for name in names if name in made}
        return {name: value for name, value in tensors.items() if value.size}, text


class DeepseekOcr2Encoder(TransformersEncoder):
    original_names = (
        (r"^sam_model\.blocks\.(\d+)\.norm(\d)\.", r"sam_model.layers.\1.layer_norm\2."),
        (r"^sam_model\.blocks\.", "sam_model.layers."),
        (r"^sam_model\.patch_embed\.proj\.", "sam_model.patch_embed.projection."),
        (r"^sam_model\.neck\.0\.", "sam_model.neck.conv1."),
        (r"^sam_model\.neck\.1\.", "sam_model.neck.layer_norm1."),
        (r"^sam_model\.neck\.2\.", "sam_model.neck.conv2."),
        (r"^sam_model\.neck\.3\.", "sam_model.neck.layer_norm2."),
        (r"^sam_model\.net_2\.", "sam_model.proj.conv1."),
        (r"^sam_model\.net_3\.", "sam_model.proj.conv2."),
        (r"^sam_model\.", "vision_tower.sam_encoder."),
        (r"^qwen2_model\.model\.model\.", "vision_tower.vision_encoder."),
        (r"^qwen2_model\.query_(\d+)\.", r"vision_tower.query_\1_resolution."),
        (r"^projector\.layers\.", "multi_modal_projector."),
        (r"^view_seperator$", "view_separator"),
    )

    def encode_together(
        self, items: Sequence[Mapping[str, torch.Tensor]]
    ) -> Sequence[torch.Tensor]:
        tensors: dict[str, Any] = {
            name: torch.cat([item[name] for item in items]) for name in items[0]
        }
        if TILES in tensors:
            tensors["num_local_patches"] = [len(item[TILES]) for item in items]
        rows: Sequence[torch.Tensor] = self.hf.get_image_features(**tensors).pooler_output
        return rows


class DeepseekOcr2(Derived):
    processor_class = DeepseekOcr2Processor
    encoder_class = DeepseekOcr2Encoder
