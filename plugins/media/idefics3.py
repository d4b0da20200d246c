"""Idefics 3 and SmolVLM: pictures in tiles with their row and column as text, then the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...core.protocols.media import MediaSetup, ProcessedMedia
from .encoder import TransformersEncoder
from .family import Pictures
from .processor import ImageProcessor

if TYPE_CHECKING:
    from PIL.Image import Image

PATCHES = "patch_attention_mask"
AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"


def in_patches(mask: np.ndarray, side: int) -> np.ndarray:
    """Return which pixels of whole patches are a picture's: [tiles, height, width] → [tiles, rows,
    side, columns, side]."""
    rows, columns = (size // side for size in mask.shape[1:])
    cut = np.asarray(mask, dtype=np.bool_)[:, : rows * side, : columns * side]
    return cut.reshape(-1, rows, side, columns, side)


class Idefics3Processor(ImageProcessor):
    def __init__(self, setup: MediaSetup) -> None:
        super().__init__(setup)
        self._tokenize = self.tokenizer()
        vision = self.config.vision_config
        side = vision.image_size // vision.patch_size
        self._per_tile = int(side**2 / self.config.scale_factor**2)

    def image(self, image: Image) -> ProcessedMedia:
        tensors = self.images(images=[image], return_row_col_info=True, return_tensors="np")
        return self.processed(tensors)

    def processed(self, tensors: Mapping[str, np.ndarray]) -> ProcessedMedia:
        rows, columns = (int(np.ravel(tensors[name])[0]) for name in ("rows", "cols"))
        tokens: list[int] = []
        for row in range(rows):
            for column in range(columns):
                tokens += self._tile(f"{AROUND}<row_{row + 1}_col_{column + 1}>")
            # What follows the last line is one text with the line's end.
            if row < rows - 1:
                tokens += self._tokenize("\n")
        tokens += self._tile(f"\n\n{AROUND}{WHOLE}" if rows else f"{AROUND}{WHOLE}")
        tokens += self._tokenize(AROUND)
        cut = in_patches(tensors["pixel_attention_mask"][0], self.config.vision_config.patch_size)
        return ProcessedMedia(
            {"pixel_values": tensors["pixel_values"][0], PATCHES: np.asarray(cut.any((2, 4)))},
            tokens,
            [token == self.placeholder_id for token in tokens],
        )

    def _tile(self, text: str) -> list[int]:
        return [*self._tokenize(text), *self.repeated(self._per_tile)]


class Idefics3Encoder(TransformersEncoder):
    """Encodes all tiles: theirs looks at the pixels for tiles that pad a batch, and there are
    none."""

    def encode_together(
        self, items: Sequence[Mapping[str, torch.Tensor]]
    ) -> Sequence[torch.Tensor]:
        tensors = {name: torch.cat([item[name] for item in items]) for name in items[0]}
        states = self.hf.vision_model(**tensors)
        rows = self.hf.connector(states.last_hidden_state)
        return list(rows.reshape(len(items), -1, rows.shape[-1]))


class Idefics3(Pictures):
    processor_class = Idefics3Processor
    encoder_class = Idefics3Encoder
