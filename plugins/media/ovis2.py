"""Ovis 2: marks between the tiles of a picture have rows of the visual vocabulary, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...core.protocols.media import ProcessedMedia
from .derived import Derived, DerivedProcessor
from .encoder import TransformersEncoder

if TYPE_CHECKING:
    from PIL.Image import Image

MARKS = "marks"
"""Name of the tensor that says which mark each row is, [rows]; -1: part of a tile."""


class Ovis2Processor(DerivedProcessor):
    def image(self, image: Image) -> ProcessedMedia:
        made = super().image(image)
        marks = list(self.config.visual_indicator_token_ids)
        embedded = [
            token == self.config.image_token_id or token in marks for token in made.token_ids
        ]
        numbers = [
            marks.index(token) if token in marks else -1
            for token, is_embedded in zip(made.token_ids, embedded, strict=True)
            if is_embedded
        ]
        tensors = {**made.tensors, MARKS: np.asarray(numbers, dtype=np.int64)}
        return ProcessedMedia(tensors, made.token_ids, embedded)


class Ovis2Encoder(TransformersEncoder):
    def encode_together(
        self, items: Sequence[Mapping[str, torch.Tensor]]
    ) -> Sequence[torch.Tensor]:
        outputs = []
        for item in items:
            output = self.hf.get_image_features(pixel_values=item["pixel_values"])
            rows = output.visual_indicator_features[item[MARKS].clamp(min=0)]
            rows[item[MARKS] < 0] = output.pooler_output.flatten(0, 1)
            outputs.append(rows)
        return outputs


class Ovis2(Derived):
    processor_class = Ovis2Processor
    encoder_class = Ovis2Encoder
